// The products of attention in AMX tiles: 16 query vectors at a time, sums in four tiles, bfloat16 in and float32 out.
// A block of keys or values is laid out as the tiles' right sides take it, so nothing is packed.
#pragma once

#include <utility>

#include "attention.h"
#include "simd.h"
#include "tiles.h"

namespace gm {

#ifdef GRISTMILL_AMX

constexpr int MIN_AMX_VECTORS = 8;  // fewer waste more of a tile than it gains
constexpr int TILE_ROWS = 16;
constexpr int LEFT = 4, RIGHT = 5;            // 32 deep
constexpr int LEFT_HALF = 6, RIGHT_HALF = 7;  // 16 deep: a value block, or what head_dim has over a multiple of 32

// Holds the thread's tile configuration while it lives.
struct AmxSession {
    AmxSession() {
        TileConfig config;
        for (int t = 0; t < 8; t++) {
            config.num_rows[t] = t == RIGHT_HALF ? 8 : 16;
            config.row_bytes[t] = t == LEFT_HALF ? 32 : 64;
        }
        configure_tiles(config);
    }
    ~AmxSession() { release_tiles(); }
};

// Calls body with std::integral_constant 0, 1, .. of as many of the four sum tiles as `count` says.
template <class Body>
GM_INLINE void for_each_sum(int count, Body body) {
    body(std::integral_constant<int, 0>());
    if (count > 1) body(std::integral_constant<int, 1>());
    if (count > 2) body(std::integral_constant<int, 2>());
    if (count > 3) body(std::integral_constant<int, 3>());
}

// scores[16][count * 16] of 16 queries and up to four key blocks.
inline void amx_score_strip(
    const bf16* queries, int64_t queries_stride, int64_t dim, const bf16* const* keys, int count, float* scores,
    int64_t scores_stride) {
    for_each_sum(count, [&](auto t) { zero_tile<t>(); });
    for (int64_t d = 0; d < dim; d += 32) {
        if (d + 32 <= dim) {
            load_tile<LEFT>(queries + d, queries_stride * 2);
            for_each_sum(count, [&](auto t) {
                load_tile<RIGHT>(keys[t] + d * BLOCK, 64);
                multiply_tiles<t, LEFT, RIGHT>();
            });
        } else {
            load_tile<LEFT_HALF>(queries + d, queries_stride * 2);
            for_each_sum(count, [&](auto t) {
                load_tile<RIGHT_HALF>(keys[t] + d * BLOCK, 64);
                multiply_tiles<t, LEFT_HALF, RIGHT_HALF>();
            });
        }
    }
    for_each_sum(count, [&](auto t) { store_tile<t>(scores + t * BLOCK, scores_stride * 4); });
}

// Reads and writes whole strips of 16 vectors: the buffers have room for that.
inline void amx_scores(
    const bf16* queries, int64_t queries_stride, int count, int64_t dim, const bf16* const* keys, int num_blocks,
    float* scores, int64_t scores_stride) {
    for (int b = 0; b < num_blocks; b += 4)
        for (int m = 0; m < count; m += TILE_ROWS)
            amx_score_strip(
                queries + m * queries_stride, queries_stride, dim, keys + b, std::min(4, num_blocks - b),
                scores + m * scores_stride + b * BLOCK, scores_stride);
}

// outputs[16][dim] += weights[16][num_blocks * 16] x values.
inline void amx_add_strip(
    const bf16* weights, int64_t weights_stride, const bf16* const* values, int num_blocks, float* outputs,
    int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64) {
        const int count = (int)std::min<int64_t>(4, (dim - d) / 16);
        for_each_sum(count, [&](auto t) { load_tile<t>(outputs + d + t * 16, dim * 4); });
        for (int b = 0; b < num_blocks; b++) {
            load_tile<LEFT_HALF>(weights + b * BLOCK, weights_stride * 2);
            for_each_sum(count, [&](auto t) {
                load_tile<RIGHT_HALF>(values[b] + (d + t * 16) * 2, dim * 4);
                multiply_tiles<t, LEFT_HALF, RIGHT_HALF>();
            });
        }
        for_each_sum(count, [&](auto t) { store_tile<t>(outputs + d + t * 16, dim * 4); });
    }
}

inline void amx_add_values(
    const bf16* weights, int64_t weights_stride, int count, const bf16* const* values, int num_keys, float* outputs,
    int64_t dim) {
    const int num_blocks = (num_keys + BLOCK - 1) / BLOCK, whole = count / TILE_ROWS * TILE_ROWS;
    for (int m = 0; m < whole; m += TILE_ROWS)
        amx_add_strip(weights + m * weights_stride, weights_stride, values, num_blocks, outputs + m * dim, dim);
    if (whole == count) return;
    // The last strip's other rows belong to vectors that do not see these keys.
    alignas(CACHE_LINE) float last[TILE_ROWS * 256];
    const size_t size = (count - whole) * dim * sizeof(float);
    std::memcpy(last, outputs + whole * dim, size);
    amx_add_strip(weights + whole * weights_stride, weights_stride, values, num_blocks, last, dim);
    std::memcpy(outputs + whole * dim, last, size);
}

#else

struct AmxSession {
    AmxSession() {}
};

#endif

}  // namespace gm
