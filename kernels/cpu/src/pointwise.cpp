// Row-wise operations of a step that are no matrix products: RMS norm and argmax, for float32 and bfloat16.
#include "simd.h"

#include <omp.h>

#include <algorithm>
#include <type_traits>

namespace gm {
namespace {

constexpr int64_t MIN_PARALLEL_SIZE = 1 << 14;  // fewer numbers than this take less time than waking the threads

template <class T, class Weight>
void rms_norm_row(const T* x, const Weight* weight, T* out, int64_t size, float eps) {
    vf sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * W <= size; i += 2 * W) {
        const vf a = load(x + i), b = load(x + i + W);
        sums[0] = a * a + sums[0];
        sums[1] = b * b + sums[1];
    }
    float total = horizontal_sum(sums[0] + sums[1]);
    for (; i < size; i++) total += to_float(x[i]) * to_float(x[i]);
    const float scale = 1.0f / std::sqrt(total / size + eps);
    for (i = 0; i + W <= size; i += W) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < size; i++) out[i] = from_float<T>(to_float(x[i]) * scale * to_float(weight[i]));
}

// The first place of the largest number; a NaN counts as larger than all, as in torch.
template <class T>
int64_t argmax_row(const T* x, int64_t size) {
    constexpr int64_t CHUNK = 64 * W;  // its place is searched for only in the chunk that holds the maximum
    float best = -INFINITY;
    int64_t best_chunk = 0;
    for (int64_t begin = 0; begin < size; begin += CHUNK) {
        const int64_t end = std::min(size, begin + CHUNK);
        vf largest = broadcast(-INFINITY);
        vi is_nan = {};
        int64_t i = begin;
        for (; i + W <= end; i += W) {
            const vf a = load(x + i);
            is_nan |= a != a;
            largest = max(a, largest);
        }
        float m = horizontal_max(largest);
        bool found_nan = false;
        for (int lane = 0; lane < W; lane++) found_nan |= is_nan[lane] != 0;
        for (; i < end; i++) {
            const float a = to_float(x[i]);
            found_nan |= a != a;
            m = a > m ? a : m;
        }
        if (found_nan) {
            for (i = begin; to_float(x[i]) == to_float(x[i]);) i++;
            return i;
        }
        if (m > best) best = m, best_chunk = begin;
    }
    for (int64_t i = best_chunk; i < size; i++)
        if (to_float(x[i]) == best) return i;
    return 0;
}

template <class T, class Weight>
void rms_norm(const T* x, int64_t x_stride, const Weight* weight, T* out, int64_t num_rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (num_rows * size >= MIN_PARALLEL_SIZE)
    for (int64_t row = 0; row < num_rows; row++)
        rms_norm_row(x + row * x_stride, weight, out + row * size, size, eps);
}

template <class T>
void argmax(const T* x, int64_t x_stride, int64_t* out, int64_t num_rows, int64_t size) {
#pragma omp parallel for schedule(dynamic) if (num_rows * size >= MIN_PARALLEL_SIZE)
    for (int64_t row = 0; row < num_rows; row++) out[row] = argmax_row(x + row * x_stride, size);
}

}  // namespace
}  // namespace gm

// out: [num_rows, size] = x / rms(x) * weight; x's rows lie x_stride apart, out's are dense. x and out are of one type.
GM_API void gm_rms_norm(const void* x, int64_t x_stride, const void* weight, void* out, int64_t num_rows, int64_t size,
    float eps, int64_t x_is_bf16, int64_t weight_is_bf16) {
    const auto run = [&](auto* typed_x, auto* typed_weight) {
        gm::rms_norm(typed_x, x_stride, typed_weight, (std::remove_const_t<std::remove_pointer_t<decltype(typed_x)>>*)out,
            num_rows, size, eps);
    };
    const auto with_weight = [&](auto* typed_x) {
        weight_is_bf16 ? run(typed_x, (const gm::bf16*)weight) : run(typed_x, (const float*)weight);
    };
    x_is_bf16 ? with_weight((const gm::bf16*)x) : with_weight((const float*)x);
}

// out: [num_rows] the first place of each row's maximum; size must not be 0.
GM_API void gm_argmax(const void* x, int64_t x_stride, int64_t* out, int64_t num_rows, int64_t size, int64_t is_bf16) {
    if (is_bf16)
        gm::argmax((const gm::bf16*)x, x_stride, out, num_rows, size);
    else
        gm::argmax((const float*)x, x_stride, out, num_rows, size);
}
