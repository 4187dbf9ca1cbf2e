// y = f(x W^T + b) for float32 x and float32 or bfloat16 weights packed in panels (gemm_tile.h), any number of rows.
// Threads take runs of panels from a common queue, so that a core that is slow or late holds nobody up.
#include "gemm_tile.h"

#include <omp.h>

#include <algorithm>
#include <atomic>

namespace gm {
namespace {

// y; silu(y); y * other; y + other; silu(y) * z, where a panel holds W columns of y's weights and the same W of z's.
enum Finish : int64_t { PLAIN = 0, SILU = 1, MUL = 2, ADD = 3, GATED = 4 };

constexpr int64_t MAX_BLOCK_ROWS = 192;    // rows of x that stay in the L2 cache while panels pass by
constexpr int64_t MAX_PREFETCH_TILES = 8;  // the tiles over which the next panel's prefetches are spread

struct Gemm {
    const float* x;  // [M, K], rows x_stride apart
    int64_t x_stride, M, K, N;
    const void* panels;
    const float* bias;   // [N] or null
    const float* other;  // MUL, ADD: [M, N], rows other_stride apart, may be out; GATED: the second bias, [N], or null
    int64_t other_stride;
    float* out;  // [M, N], rows out_stride apart
    int64_t out_stride;
    Finish finish;
};

GM_INLINE vf load_first(const float* p, int64_t n) {
    if (n >= W) return load(p);
    vf x{};
    for (int64_t i = 0; i < n; i++) x[i] = p[i];
    return x;
}

GM_INLINE void store_first(float* p, vf x, int64_t n) {
    if (n >= W) return store(p, x);
    for (int64_t i = 0; i < n; i++) p[i] = x[i];
}

// Writes num_rows x min(W, N - column) results from a tile's half.
void finish_tile(const Gemm& g, const float* tile, int64_t row, int num_rows, int64_t column) {
    const int64_t n = g.N - column;
    const vf bias = g.bias ? load_first(g.bias + column, n) : vf{};
    const vf up_bias = g.finish == GATED && g.other ? load_first(g.other + column, n) : vf{};
    for (int i = 0; i < num_rows; i++) {
        vf y = load(tile + i * NR) + bias;
        const float* other = g.other + (row + i) * g.other_stride + column;
        if (g.finish == SILU) y = silu(y);
        if (g.finish == MUL) y = y * load_first(other, n);
        if (g.finish == ADD) y = y + load_first(other, n);
        if (g.finish == GATED) y = silu(y) * (load(tile + i * NR + W) + up_bias);
        store_first(g.out + (row + i) * g.out_stride + column, y, n);
    }
}

// Rows first:last of x times the panel; the panel after it is asked for meanwhile, to have come from memory when its
// turn is.
template <class T>
void run_panel(const Gemm& g, int64_t first, int64_t last, int64_t index) {
    alignas(CACHE_LINE) float tile[MAX_ROWS * NR];
    constexpr int64_t PACK = sizeof(float) / sizeof(T);  // k of a panel are padded to a multiple of it
    const int64_t panel_size = (g.K + PACK - 1) / PACK * PACK * NR, panel_bytes = panel_size * sizeof(T);
    const T* panel = (const T*)g.panels + index * panel_size;
    const int64_t num_rows = last - first, num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t num_asking = std::min(num_tiles, MAX_PREFETCH_TILES);
    for (int64_t t = 0; t < num_tiles; t++) {
        // Tiles of even size: one of a single row would take as long as one of four.
        const int64_t row = first + t * num_rows / num_tiles, end = first + (t + 1) * num_rows / num_tiles;
        const float* x = g.x + row * g.x_stride;
        const Prefetch ahead{(const char*)(panel + panel_size) + t * panel_bytes / num_asking,
            CACHE_LINE * (W / 8) / num_asking};
        // The CPU's own prefetcher does better for a few rows of float32, which come as fast as memory is.
        if (t < num_asking && (sizeof(T) == 2 || num_rows > 3))
            run_tile_of<true>(end - row, x, g.x_stride, panel, g.K, tile, ahead);
        else
            run_tile_of<false>(end - row, x, g.x_stride, panel, g.K, tile, ahead);
        if (g.finish == GATED) {
            finish_tile(g, tile, row, end - row, index * W);
        } else {
            finish_tile(g, tile, row, end - row, index * NR);
            if (index * NR + W < g.N) finish_tile(g, tile + W, row, end - row, index * NR + W);
        }
    }
}

template <class T>
void run(const Gemm& g) {
    const int64_t columns = g.finish == GATED ? W : NR, num_panels = (g.N + columns - 1) / columns;
    const int64_t num_threads = omp_get_max_threads();
    int64_t block_rows = MAX_BLOCK_ROWS, num_blocks = (g.M + block_rows - 1) / block_rows;
    while (block_rows > MAX_ROWS && num_blocks * num_panels < 2 * num_threads) {
        block_rows /= 2;
        num_blocks = (g.M + block_rows - 1) / block_rows;
    }
    const int64_t num_items = num_blocks * num_panels;
    std::atomic<int64_t> next{0};
#pragma omp parallel
    for (;;) {
        // Long runs at first, since panels in order stream best; single ones at last, so that all threads end together.
        int64_t begin = next.load(), count = 0;
        do {
            count = begin < num_items ? std::max<int64_t>(1, (num_items - begin) / (2 * num_threads)) : 0;
        } while (count > 0 && !next.compare_exchange_weak(begin, begin + count));
        if (count == 0) break;
        for (int64_t item = begin; item < begin + count; item++) {
            const int64_t first = item / num_panels * block_rows;
            run_panel<T>(g, first, std::min(g.M, first + block_rows), item % num_panels);
        }
    }
}

}  // namespace
}  // namespace gm

GM_API int64_t gm_lanes() { return gm::W; }

// See Gemm for the shapes. weights_are_bf16: 0 or 1; finish: one of Finish.
GM_API void gm_gemm(const float* x, int64_t x_stride, int64_t M, int64_t K, int64_t N, const void* panels,
    int64_t weights_are_bf16, const float* bias, const float* other, int64_t other_stride, float* out,
    int64_t out_stride, int64_t finish) {
    const gm::Gemm g{x, x_stride, M, K, N, panels, bias, other, other_stride, out, out_stride, (gm::Finish)finish};
    weights_are_bf16 ? gm::run<gm::bf16>(g) : gm::run<float>(g);
}
