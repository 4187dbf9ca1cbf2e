// Readies a step's fused projections for attention: norms and rotates queries and keys in place, stores keys and
// values in their KV blocks. Also copies whole blocks. The blocks' layout is described in attention.h.

#include <algorithm>

#include "attention.h"
#include "attention_e4m3.h"
#include "simd.h"

namespace gm {

namespace {

template <class X>
void norm_head(X* x, const float* weight, int64_t dim, float eps) {
    float squares = 0;
    for (int64_t d = 0; d < dim; d++) squares += to_float(x[d]) * to_float(x[d]);
    const float scale = 1 / std::sqrt(squares / dim + eps);
    for (int64_t d = 0; d < dim; d++) x[d] = from_float<X>(to_float(x[d]) * scale * weight[d]);
}

// [a, b] -> [a cos - b sin, b cos + a sin] on the head's halves.
template <class X>
void rotate_head(X* x, const float* cos, const float* sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d += 8) {
        for (int64_t i = d; i < d + 8; i++) {
            const float a = to_float(x[i]), b = to_float(x[i + half]);
            x[i] = from_float<X>(a * cos[i] - b * sin[i]);
            x[i + half] = from_float<X>(b * cos[i] + a * sin[i]);
        }
    }
}

template <class X, class T>
void round_head(const X* x, T* rounded, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) rounded[d] = from_float<T>(to_float(x[d]));
}

template <class T>
void store_key(const T* x, T* block, int64_t offset, int64_t dim) {
    if constexpr (std::is_same<T, bf16>::value)
        for (int64_t d = 0; d < dim; d++) block[(d / 2 * BLOCK + offset) * 2 + d % 2] = x[d];
    else
        for (int64_t d = 0; d < dim; d++) block[d * BLOCK + offset] = x[d];
}

template <class T>
void store_value(const T* x, T* block, int64_t offset, int64_t dim) {
    if constexpr (std::is_same<T, bf16>::value)
        for (int64_t d = 0; d < dim; d++) block[(offset / 2 * dim + d) * 2 + offset % 2] = x[d];
    else
        std::memcpy(block + offset * dim, x, dim * sizeof(T));
}

template <class X, class T>
void append_token(const AppendArgs& a, int64_t token) {
    const int64_t dim = a.head_dim, num_turned = a.num_heads + a.num_kv_heads;
    X* row = (X*)a.qkv + token * (num_turned + a.num_kv_heads) * dim;
    const int64_t at = a.positions[token] * (dim / 2);
    for (int64_t h = 0; h < num_turned; h++) {
        const float* norm = h < a.num_heads ? a.q_norm : a.k_norm;
        if (norm) norm_head(row + h * dim, norm, dim, a.eps);
        rotate_head(row + h * dim, a.cos + at, a.sin + at, dim);
    }
    const int64_t block = a.slots[token] / BLOCK, offset = a.slots[token] % BLOCK;
    for (int64_t h = 0; h < a.num_kv_heads; h++) {
        const int64_t start = block * a.block_stride + h * BLOCK * dim;
        const X *key = row + (a.num_heads + h) * dim, *value = row + (num_turned + h) * dim;
        T key_rounded[MAX_DIM], value_rounded[MAX_DIM];
        if constexpr (std::is_same<T, e4m3>::value) {
            round_head(key, key_rounded, dim, a.key_scales[h]);
            round_head(value, value_rounded, dim, a.value_scales[h]);
        } else {
            round_head(key, key_rounded, dim);
            round_head(value, value_rounded, dim);
        }
        store_key(key_rounded, (T*)a.keys + start, offset, dim);
        store_value(value_rounded, (T*)a.values + start, offset, dim);
    }
}

// A weight of 0 times what an earlier owner of the block left must be 0, even if that was not finite.
template <class T>
void clear_values(const AppendArgs& a, int64_t block) {
    std::memset((T*)a.values + block * a.block_stride, 0, a.num_kv_heads * BLOCK * a.head_dim * sizeof(T));
}

template <class X, class T>
void append(const AppendArgs& a) {
#pragma omp parallel if (a.num_tokens > 8)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < a.num_tokens; i++)
            if (a.slots[i] % BLOCK == 0) clear_values<T>(a, a.slots[i] / BLOCK);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < a.num_tokens; i++) append_token<X, T>(a, i);
    }
}

template <class X>
void append(const AppendArgs& a) {
    if (a.kv_type == KV_FLOAT32) return append<X, float>(a);
    if (a.kv_type == KV_BFLOAT16) return append<X, bf16>(a);
    append<X, e4m3>(a);
}

}  // namespace
}  // namespace gm

GM_API void gristmill_append(const gm::AppendArgs* args) {
    args->qkv_is_bf16 ? gm::append<gm::bf16>(*args) : gm::append<float>(*args);
}

// Copies block pairs[i][0] onto pairs[i][1], one after the other; block_bytes: of a block's keys, or values, in all layers.
GM_API void gristmill_copy_blocks(void* storage, const int32_t* pairs, int64_t num_pairs, int64_t block_bytes) {
    char* blocks = (char*)storage;
    for (int64_t i = 0; i < num_pairs; i++)
        std::memcpy(blocks + pairs[2 * i + 1] * block_bytes, blocks + pairs[2 * i] * block_bytes, block_bytes);
}
