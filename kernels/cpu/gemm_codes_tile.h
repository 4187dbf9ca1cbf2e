// The product of a few rows with panels of codes, held in registers: the inner loop of gemm_codes.cpp.
// A group's sum is made of codes, x times powers of two, and then scaled: fewer instructions than scaled weights take.
#pragma once

#include "gemm_codes.h"

#include <algorithm>
#include <type_traits>

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

// W of a group's scales or, with `offsets`, of its offsets. tables: what follows the group's codes.
template <class Codes>
GM_INLINE vf load_scales(const char* tables, bool are_half, int half, bool offsets = false) {
    if (Codes::MAY_SCALE_BY_HALVES && are_half) return load_halves(tables + offsets * 2 * NR + half * 2 * W);
    return load((const float*)tables + offsets * NR + half * W);
}

// x as the tiles read it: columns gathered, each times its factor, padded; and the sum of x over each group where
// codes have an offset.
struct Prepared {
    float* x;  // [M, row_size]
    int64_t row_size;
    float* sums;      // [M, num_sums], one a group, or null: what offsets are multiplied by
    int64_t num_sums;
    bool are_starts;  // instead, of codes whose 0 is a constant: what the group's sum starts from
};

template <int ROWS, int PANELS>
using PanelSums = vf[PANELS][ROWS][2];

// Adds NUM_K neighbouring k.
template <class Codes, int ROWS, int PANELS, int NUM_K>
GM_INLINE void add_step(
    PanelSums<ROWS, PANELS>& sums, const float* x, int64_t row_size, const char* codes, int64_t panel_bytes) {
#pragma GCC unroll 8
    for (int i = 0; i < NUM_K; i++) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
            multiply_add<ROWS>(sums[p], x + i, row_size, Codes::load(codes + p * panel_bytes, 0, i),
                Codes::load(codes + p * panel_bytes, 1, i));
    }
}

// Adds a group's products; returns where its scales are. ahead_bytes: how far before the codes to ask for more.
template <class Codes, int ROWS, int PANELS>
GM_INLINE const char* add_codes(PanelSums<ROWS, PANELS>& sums, const float* x, int64_t row_size, const char* codes,
    int64_t size, int64_t panel_bytes, int64_t ahead_bytes) {
    if constexpr (std::is_same_v<Codes, Numbers>) {
        accumulate<ROWS, false>(sums[0], x, row_size, (const float*)codes, size, Prefetch{});
        return codes + codes_bytes<Numbers>(size);
    }
    int64_t k = 0;
    for (; k + (Codes::IS_PADDED ? 1 : Codes::STEP) <= size; k += Codes::STEP, codes += Codes::STEP_BYTES) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
            for (int64_t line = 0; line < Codes::STEP_BYTES; line += CACHE_LINE)
                prefetch(codes + p * panel_bytes + line + ahead_bytes);
        add_step<Codes, ROWS, PANELS, Codes::STEP>(sums, x + k, row_size, codes, panel_bytes);
    }
    for (; k < size; k++, codes += Codes::STEP_BYTES / Codes::STEP)
        add_step<Codes, ROWS, PANELS, 1>(sums, x + k, row_size, codes, panel_bytes);
    return codes;
}

// Adds a group's sums, times their scales, to the tile, and its offsets times the sums of x.
template <class Codes, int ROWS, bool HAS_OFFSETS>
GM_INLINE void add_scaled(const Sums<ROWS>& sums, const char* tables, bool are_half, const float* x_sums,
    int64_t num_sums, float* tile) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const vf scale = load_scales<Codes>(tables, are_half, half) * Codes::UNIT;
        const vf offset = HAS_OFFSETS ? load_scales<Codes>(tables, are_half, half, true) : vf{};
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            float* out = tile + r * NR + half * W;
            vf y = sums[r][half] * scale + load(out);
            if (HAS_OFFSETS) y = broadcast(x_sums[r * num_sums]) * offset + y;
            store(out, y);
        }
    }
}

// Adds rows of x times neighbouring panels to the tile: [PANELS][ROWS][NR].
template <class Codes, int ROWS, int PANELS>
__attribute__((noinline)) void run_codes_tile(
    const Weights& w, const Prepared& in, int64_t row, const char* panel, float* tile, int64_t ahead_bytes) {
    // Copies: stores into the tile can't change them.
    const int64_t row_size = in.row_size, num_sums = in.num_sums, group_size = w.group_size, K = w.K;
    const int64_t panel_bytes = PANELS > 1 ? w.panel_bytes<Codes>() : 0, tables_bytes = w.tables_bytes();
    const float *x = in.x + row * row_size, *x_sums = in.sums ? in.sums + row * num_sums : nullptr;
    const bool are_starts = in.are_starts, are_half = w.scales_are_half, has_offsets = w.has_offsets;
    for (int64_t rest = K; rest > 0; rest -= group_size) {
        const int64_t size = std::min(group_size, rest);
        PanelSums<ROWS, PANELS> sums;
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const vf start = are_starts ? broadcast(x_sums[r * num_sums]) : vf{};
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) sums[p][r][0] = sums[p][r][1] = start;
        }
        panel = add_codes<Codes, ROWS, PANELS>(sums, x, row_size, panel, size, panel_bytes, ahead_bytes);
        x += size;
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            const char* tables = panel + p * panel_bytes;
            float* out = tile + p * ROWS * NR;
            if (!std::is_same_v<Codes, Numbers>) prefetch(tables + ahead_bytes);
            if (has_offsets)
                add_scaled<Codes, ROWS, true>(sums[p], tables, are_half, x_sums, num_sums, out);
            else
                add_scaled<Codes, ROWS, false>(sums[p], tables, are_half, x_sums, num_sums, out);
        }
        panel += tables_bytes;
        if (x_sums) x_sums++;
    }
}

template <class Codes, int PANELS, int ROWS>
void run_codes_tile_of(int num_rows, const Weights& w, const Prepared& in, int64_t row, const char* panel, float* tile,
    int64_t ahead_bytes) {
    if constexpr (ROWS > 1) {
        if (num_rows < ROWS)
            return run_codes_tile_of<Codes, PANELS, ROWS - 1>(num_rows, w, in, row, panel, tile, ahead_bytes);
    }
    run_codes_tile<Codes, ROWS, PANELS>(w, in, row, panel, tile, ahead_bytes);
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
