// AMX tiles behind templates on the tile's number, with an emulation in plain memory for GRISTMILL_EMULATE.
// A tile has up to 16 rows of 64 bytes. Linux must have been asked for them: kernels/cpu_features.py does.
#pragma once

#ifdef GRISTMILL_AMX

#include "simd.h"

namespace gm {

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "the layout that ldtilecfg reads");

#ifdef GRISTMILL_EMULATE

struct EmulatedTiles {
    TileConfig config;
    uint8_t data[8][16][64];
};
inline thread_local EmulatedTiles tiles;

GM_INLINE void configure_tiles(const TileConfig& config) { tiles.config = config; }
GM_INLINE void release_tiles() {}

template <int T>
GM_INLINE void zero_tile() {
    std::memset(tiles.data[T], 0, sizeof tiles.data[T]);
}

template <int T>
GM_INLINE void load_tile(const void* p, int64_t stride_bytes) {
    zero_tile<T>();
    for (int i = 0; i < tiles.config.num_rows[T]; i++)
        std::memcpy(tiles.data[T][i], (const char*)p + i * stride_bytes, tiles.config.row_bytes[T]);
}

template <int T>
GM_INLINE void store_tile(void* p, int64_t stride_bytes) {
    for (int i = 0; i < tiles.config.num_rows[T]; i++)
        std::memcpy((char*)p + i * stride_bytes, tiles.data[T][i], tiles.config.row_bytes[T]);
}

// C[m][n] += sum over k of the pairs A[m][k] . B[k][n]: bfloat16 in, float32 sums.
template <int C, int A, int B>
inline void multiply_tiles() {
    const int num_m = tiles.config.num_rows[C], num_n = tiles.config.row_bytes[C] / 4;
    const int num_k = tiles.config.row_bytes[A] / 4;
    for (int m = 0; m < num_m; m++)
        for (int k = 0; k < num_k; k++)
            for (int n = 0; n < num_n; n++) {
                bf16 a[2], b[2];
                float c;
                std::memcpy(a, tiles.data[A][m] + 4 * k, 4);
                std::memcpy(b, tiles.data[B][k] + 4 * n, 4);
                std::memcpy(&c, tiles.data[C][m] + 4 * n, 4);
                c += to_float(a[0]) * to_float(b[0]) + to_float(a[1]) * to_float(b[1]);
                std::memcpy(tiles.data[C][m] + 4 * n, &c, 4);
            }
}

#else

// Assembly, since the compiler's own macros take the tile's number as a literal only.
GM_INLINE void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
GM_INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int T>
GM_INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
GM_INLINE void load_tile(const void* p, int64_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
}

template <int T>
GM_INLINE void store_tile(void* p, int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
}

template <int C, int A, int B>
GM_INLINE void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace gm

#endif
