// The product of up to 6 rows with one panel of weights, held in registers: the inner loop of gemm.cpp.
// A panel is NR output columns: [K][NR] float32, or [ceil(K / 2)][NR][2] bfloat16, k and k + 1 in one 32-bit lane.
#pragma once

#include "simd.h"

namespace gm {

constexpr int NR = 2 * W;
constexpr int MAX_ROWS = W == 8 ? 6 : 12;  // MAX_ROWS * 2 sums and 2 weights fit in 16 (AVX512: 32) registers

// Memory to ask for while computing: one address per step of the inner loop. Sums stay exact with any of them.
struct Prefetch {
    const char* address;
    int64_t step_bytes;
};

template <int ROWS>
using Sums = vf[ROWS][2];

template <int ROWS>
GM_INLINE void multiply_add(Sums<ROWS>& sums, const float* x, int64_t x_stride, vf w0, vf w1) {
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
        const vf a = broadcast(x[i * x_stride]);
        sums[i][0] = a * w0 + sums[i][0];
        sums[i][1] = a * w1 + sums[i][1];
    }
}

template <int ROWS, bool AHEAD>
GM_INLINE void accumulate(
    Sums<ROWS>& sums, const float* x, int64_t x_stride, const float* panel, int64_t K, Prefetch ahead) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < K; k++) {
        if (AHEAD) prefetch(ahead.address);
        ahead.address += ahead.step_bytes;
        multiply_add<ROWS>(sums, x + k, x_stride, load(panel + k * NR), load(panel + k * NR + W));
    }
}

// Weights of even k (ODD: of odd k) of a bfloat16 panel as float32.
template <bool ODD>
GM_INLINE vf load_half(const bf16* pairs) {
    return ODD ? (vf)(load_bits(pairs) & 0xffff0000u) : (vf)(load_bits(pairs) << 16);
}

template <int ROWS, bool AHEAD, bool ODD>
GM_INLINE void accumulate_half(
    Sums<ROWS>& sums, const float* x, int64_t x_stride, const bf16* panel, int64_t K, Prefetch ahead) {
#pragma GCC unroll 4
    for (int64_t k = ODD; k < K; k += 2) {
        if (AHEAD) prefetch(ahead.address);
        ahead.address += ahead.step_bytes;
        const bf16* pairs = panel + (k - ODD) * NR;
        multiply_add<ROWS>(sums, x + k, x_stride, load_half<ODD>(pairs), load_half<ODD>(pairs + NR));
    }
}

template <int ROWS, bool AHEAD>
GM_INLINE void accumulate(
    Sums<ROWS>& sums, const float* x, int64_t x_stride, const bf16* panel, int64_t K, Prefetch ahead) {
    // Even and odd k apart: with the halves of a lane in hand at once, not all sums would have a register.
    constexpr bool FITS = 2 * ROWS + 7 <= (W == 8 ? 16 : 32);
    if constexpr (!FITS) {
        constexpr int64_t BLOCK = 512;  // so that the second pass finds the panel in the L1 cache
        for (int64_t k = 0; k < K; k += BLOCK) {
            const int64_t size = K - k < BLOCK ? K - k : BLOCK;
            accumulate_half<ROWS, AHEAD, false>(sums, x + k, x_stride, panel + k * NR, size, ahead);
            accumulate_half<ROWS, false, true>(sums, x + k, x_stride, panel + k * NR, size, ahead);
            ahead.address += BLOCK / 2 * ahead.step_bytes;
        }
        return;
    }
#pragma GCC unroll 2
    for (int64_t k = 0; k + 1 < K; k += 2) {
        if (AHEAD) prefetch(ahead.address);
        ahead.address += ahead.step_bytes;
        const bf16* pairs = panel + k * NR;
        multiply_add<ROWS>(sums, x + k, x_stride, load_half<false>(pairs), load_half<false>(pairs + NR));
        multiply_add<ROWS>(sums, x + k + 1, x_stride, load_half<true>(pairs), load_half<true>(pairs + NR));
    }
    if (K % 2 == 1) {
        const bf16* pairs = panel + (K - 1) * NR;
        multiply_add<ROWS>(sums, x + K - 1, x_stride, load_half<false>(pairs), load_half<false>(pairs + NR));
    }
}

// out: [ROWS][NR], x times the panel.
template <int ROWS, bool AHEAD, class T>
GM_INLINE void run_tile(
    const float* x, int64_t x_stride, const T* panel, int64_t K, float* out, Prefetch ahead) {
    Sums<ROWS> sums;
    for (int i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = vf{};
    accumulate<ROWS, AHEAD>(sums, x, x_stride, panel, K, ahead);
    for (int i = 0; i < ROWS; i++) {
        store(out + i * NR, sums[i][0]);
        store(out + i * NR + W, sums[i][1]);
    }
}

template <bool AHEAD, class T, int ROWS = MAX_ROWS>
static void run_tile_of(
    int num_rows, const float* x, int64_t x_stride, const T* panel, int64_t K, float* out, Prefetch ahead) {
    if constexpr (ROWS > 1) {
        if (num_rows < ROWS)
            return run_tile_of<AHEAD, T, ROWS - 1>(num_rows, x, x_stride, panel, K, out, ahead);
    }
    run_tile<ROWS, AHEAD>(x, x_stride, panel, K, out, ahead);
}

}  // namespace gm
