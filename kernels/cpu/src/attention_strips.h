// The products of attention: a strip of at most MAX_STRIP query vectors times a panel of 16 columns, sums in registers.
// Scores are Q times a key block (head_dim deep, 16 keys wide); outputs are the weights times 16 columns of a value
// block (16 keys deep). Both step two rows of the panel at a time, as bfloat16 panels are interleaved in pairs.
#pragma once

#include "attention.h"
#include "attention_e4m3.h"
#include "simd.h"

namespace gm {

constexpr int CHUNK = 128;                  // keys at a time: their values and a strip's weights fit the L1 cache
constexpr int QUERY_STRIDE = MAX_DIM + 16;  // a constant lets the products address a strip by one register
constexpr int VECTORS = 16 / W;                // of a panel's row
constexpr int MAX_STRIP = W == 16 ? 12 : 6;    // sums, a panel's row and a broadcast fit the registers

template <int ROWS>
struct Sums {
    vf at[ROWS][VECTORS];

    GM_INLINE void zero() {
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < VECTORS; v++) at[i][v] = vf{};
    }
    GM_INLINE void load_from(const float* p, int64_t stride) {
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < VECTORS; v++) at[i][v] = load(p + i * stride + v * W);
    }
    GM_INLINE void store_to(float* p, int64_t stride) const {
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < VECTORS; v++) store(p + i * stride + v * W, at[i][v]);
    }
    // Adds left[i] times a row of the panel.
    GM_INLINE void add(const float* left, int64_t stride, const vf* row) {
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) at[i][v] += left[i * stride] * row[v];
    }
};

GM_INLINE void load_row(const float* p, vf* row) {
    for (int v = 0; v < VECTORS; v++) row[v] = load(p + v * W);
}

// Two rows of a float32 or e4m3 panel; `width` elements lie between a row and the next.
template <int ROWS, class T>
GM_INLINE void add_pair(Sums<ROWS>& sums, const float* left, int64_t stride, const T* panel, int64_t width) {
    vf row[VECTORS];
    for (int half = 0; half < 2; half++) {
        load_row(panel + half * width, row);
        sums.add(left + half, stride, row);
    }
}

// Two interleaved bfloat16 rows, widened to float32.
template <int ROWS>
GM_INLINE void add_pair(Sums<ROWS>& sums, const float* left, int64_t stride, const bf16* panel, int64_t) {
    vf row[VECTORS];
    for (int v = 0; v < VECTORS; v++) row[v] = (vf)(load_bits(panel + v * 2 * W) << 16);
    sums.add(left, stride, row);
    for (int v = 0; v < VECTORS; v++) row[v] = (vf)(load_bits(panel + v * 2 * W) & 0xffff0000u);
    sums.add(left + 1, stride, row);
}

// Two interleaved bfloat16 rows times bfloat16 pairs.
template <int ROWS>
GM_INLINE void add_pair(Sums<ROWS>& sums, const bf16* left, int64_t stride, const bf16* panel, int64_t) {
    vu row[VECTORS];
    for (int v = 0; v < VECTORS; v++) row[v] = load_bits(panel + v * 2 * W);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
        uint32_t pair;
        std::memcpy(&pair, left + i * stride, sizeof pair);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sums.at[i][v] = dot_pairs(sums.at[i][v], broadcast_bits(pair), row[v]);
    }
}

// What a strip fetches into the cache while it computes: blocks that are read next, or null.
template <class T>
struct Ahead {
    const T *keys, *values;

    // The lines of both blocks that lie where the p-th pair of rows does in a block of keys.
    GM_INLINE void fetch(int64_t p) const {
        for (int64_t i = 0; i < 2 * BLOCK; i += CACHE_LINE / (int64_t)sizeof(T)) {
            prefetch(keys + 2 * p * BLOCK + i);
            prefetch(values + 2 * p * BLOCK + i);
        }
    }
};

// Functions of their own, not inlined, since the compiler then keeps all sums in registers.

// scores[ROWS][16] = queries[ROWS][2 * num_pairs] x keys.
template <int ROWS, class A, class T, class U>
__attribute__((noinline)) void score_strip(
    const A* queries, const T* keys, int64_t num_pairs, float* scores, Ahead<U> ahead) {
    Sums<ROWS> sums;
    sums.zero();
    if (ahead.keys)
        for (int64_t p = 0; p < num_pairs; p++) {
            ahead.fetch(p);
            add_pair(sums, queries + 2 * p, QUERY_STRIDE, keys + 2 * p * BLOCK, BLOCK);
        }
    else
        for (int64_t p = 0; p < num_pairs; p++)
            add_pair(sums, queries + 2 * p, QUERY_STRIDE, keys + 2 * p * BLOCK, BLOCK);
    sums.store_to(scores, CHUNK);
}

// outputs[ROWS][16] += weights[ROWS][num_keys] x the panels' first num_keys rows.
template <int ROWS, class A, class T>
__attribute__((noinline)) void add_value_strip(
    const A* weights, const T* const* panels, int64_t width, int num_keys, float* outputs, int64_t outputs_stride) {
    Sums<ROWS> sums;
    sums.load_from(outputs, outputs_stride);
    for (int key = 0; key < num_keys; key += BLOCK) {
        // Slots behind the last key hold what an earlier owner of the block left.
        const int num_pairs = num_keys - key < BLOCK ? (num_keys - key + 1) / 2 : BLOCK / 2;
        const T* panel = panels[key / BLOCK];
        for (int p = 0; p < num_pairs; p++)
            add_pair(sums, weights + key + 2 * p, CHUNK, panel + 2 * p * width, width);
    }
    sums.store_to(outputs, outputs_stride);
}

// Turns 16 columns of interleaved bfloat16 rows into float32 rows of 16.
inline void widen_panel(const bf16* panel, int64_t width, int64_t num_pairs, float* to) {
    for (int64_t p = 0; p < num_pairs; p++)
        for (int v = 0; v < VECTORS; v++) {
            const vu pair = load_bits(panel + 2 * (p * width + v * W));
            store(to + 32 * p + v * W, (vf)(pair << 16));
            store(to + 32 * p + 16 + v * W, (vf)(pair & 0xffff0000u));
        }
}

// Turns 16 columns of e4m3 rows into float32 rows of 16.
inline void widen_panel(const e4m3* panel, int64_t width, int64_t num_pairs, float* to) {
    for (int64_t i = 0; i < 2 * num_pairs; i++) {
        vf row[VECTORS];
        load_row(panel + i * width, row);
        for (int v = 0; v < VECTORS; v++) store(to + 16 * i + v * W, row[v]);
    }
}

// Calls body(first, std::integral_constant<int, size>) for strips that cover `count` vectors evenly.
template <int SIZE, class Body>
GM_INLINE void call_with_size(int size, int first, Body& body) {
    if constexpr (SIZE > 0) {
        if (size == SIZE)
            body(first, std::integral_constant<int, SIZE>());
        else
            call_with_size<SIZE - 1>(size, first, body);
    }
}

template <class Body>
GM_INLINE void for_each_strip(int count, Body body) {
    const int num_strips = (count + MAX_STRIP - 1) / MAX_STRIP;
    int first = 0;
    for (int s = 0; s < num_strips; s++) {
        const int size = (count - first + num_strips - s - 1) / (num_strips - s);
        call_with_size<MAX_STRIP>(size, first, body);
        first += size;
    }
}

}  // namespace gm
