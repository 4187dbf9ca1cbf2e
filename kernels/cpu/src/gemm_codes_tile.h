// The product of a few rows with panels of codes, held in registers: the inner loop of gemm_codes.cpp.
// A weight is code * scale + offset, rounded once, wherever it is made: with float16 scales the number that
// QuantizedTensor.dequantize gives, so that codes and float32 panels (gemm_tile.h) give the same bits.
#pragma once

#include "gemm_codes.h"

#include <algorithm>

namespace gm {

// The fields of _Weights in kernels/linear_codes.py.
struct Weights {
    const char* panels;
    int64_t kind;  // 0: int4, 1: int8, 2: fp8
    int64_t K, N, group_size;
    int64_t scales_are_half, has_offsets, is_gated;
    const int64_t* columns;  // [K], which column of x meets k; or null: column k
    const float* bias;       // [N] or null
    const float* up_bias;

    int64_t num_groups() const { return (K + group_size - 1) / group_size; }
    // Of a group's scales, and its offsets if there are any.
    int64_t tables_bytes() const { return (has_offsets ? 2 : 1) * (scales_are_half ? 2 : 4) * NR; }

    template <class Codes>
    int64_t panel_bytes() const {
        return K / group_size * codes_bytes<Codes>(group_size) + codes_bytes<Codes>(K % group_size) +
               num_groups() * tables_bytes();
    }
};

// W of a group's tables: index 0 the scales, 1 the offsets. tables: what follows the group's codes.
GM_INLINE vf load_table(const Weights& w, const char* tables, int index, int half) {
    if (w.scales_are_half) return load_halves(tables + index * 2 * NR + half * 2 * W);
    return load((const float*)tables + index * NR + half * W);
}

// What makes numbers of a group's codes of NR columns.
template <class Codes>
struct Scaling {
    vf scales[2], offsets[2];

    GM_INLINE void load(const Weights& w, const char* tables) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            scales[half] = load_table(w, tables, 0, half) * Codes::UNIT;
            offsets[half] = w.has_offsets ? load_table(w, tables, 1, half) : scales[half] * -Codes::ZERO;
        }
    }
    // W weights of k + i, of the step that begins at k.
    GM_INLINE vf weights(const char* step, int half, int i) const {
        return Codes::load(step, half, i) * scales[half] + offsets[half];
    }
};

template <int ROWS, int PANELS>
using PanelSums = vf[PANELS][ROWS][2];

// Adds the products of k + i, of the step that begins at k.
template <class Codes, int ROWS, int PANELS>
GM_INLINE void add_one(PanelSums<ROWS, PANELS>& sums, const float* x, int64_t x_stride, const char* codes,
    int64_t panel_bytes, const Scaling<Codes> (&scaling)[PANELS], int i) {
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
        multiply_add<ROWS>(sums[p], x + i, x_stride, scaling[p].weights(codes + p * panel_bytes, 0, i),
            scaling[p].weights(codes + p * panel_bytes, 1, i));
}

// Adds a group's products. ahead_bytes: how far before the codes to ask for more.
template <class Codes, int ROWS, int PANELS>
GM_INLINE void add_group(PanelSums<ROWS, PANELS>& sums, const float* x, int64_t x_stride, const char* codes,
    int64_t size, int64_t panel_bytes, const Scaling<Codes> (&scaling)[PANELS], int64_t ahead_bytes) {
    int64_t k = 0;
    for (; k + Codes::STEP <= size; k += Codes::STEP, codes += Codes::STEP_BYTES) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
            for (int64_t line = 0; line < Codes::STEP_BYTES; line += CACHE_LINE)
                prefetch(codes + p * panel_bytes + line + ahead_bytes);
#pragma GCC unroll 8
        for (int i = 0; i < Codes::STEP; i++)
            add_one<Codes, ROWS, PANELS>(sums, x + k, x_stride, codes, panel_bytes, scaling, i);
    }
    for (int i = 0; k + i < size; i++)
        add_one<Codes, ROWS, PANELS>(sums, x + k, x_stride, codes, panel_bytes, scaling, i);
}

// tile: [PANELS][ROWS][NR], rows of x times neighbouring panels.
template <class Codes, int ROWS, int PANELS>
__attribute__((noinline)) void run_codes_tile(
    const Weights& w, const float* x, int64_t x_stride, const char* panel, float* tile, int64_t ahead_bytes) {
    const int64_t panel_bytes = PANELS > 1 ? w.panel_bytes<Codes>() : 0, tables_bytes = w.tables_bytes();
    PanelSums<ROWS, PANELS> sums{};
    for (int64_t rest = w.K, size; rest > 0; rest -= size, x += size) {
        size = std::min(w.group_size, rest);
        const char* tables = panel + codes_bytes<Codes>(size);
        Scaling<Codes> scaling[PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            prefetch(tables + p * panel_bytes + ahead_bytes);
            scaling[p].load(w, tables + p * panel_bytes);
        }
        add_group<Codes, ROWS, PANELS>(sums, x, x_stride, panel, size, panel_bytes, scaling, ahead_bytes);
        panel = tables + tables_bytes;
    }
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            store(tile + (p * ROWS + r) * NR, sums[p][r][0]);
            store(tile + (p * ROWS + r) * NR + W, sums[p][r][1]);
        }
    }
}

template <class Codes, int PANELS, int ROWS>
void run_codes_tile_of(int num_rows, const Weights& w, const float* x, int64_t x_stride, const char* panel, float* tile,
    int64_t ahead_bytes) {
    if constexpr (ROWS > 1) {
        if (num_rows < ROWS)
            return run_codes_tile_of<Codes, PANELS, ROWS - 1>(num_rows, w, x, x_stride, panel, tile, ahead_bytes);
    }
    run_codes_tile<Codes, ROWS, PANELS>(w, x, x_stride, panel, tile, ahead_bytes);
}

// Calls run(row, end) for tiles of at most max_rows rows, of even size: one of a single row would take as long as one
// of four.
template <class Run>
GM_INLINE void for_each_tile(int64_t first, int64_t last, int64_t max_rows, const Run& run) {
    const int64_t num_rows = last - first, num_tiles = (num_rows + max_rows - 1) / max_rows;
    for (int64_t t = 0; t < num_tiles; t++)
        run(first + t * num_rows / num_tiles, first + (t + 1) * num_rows / num_tiles);
}

}  // namespace gm
