// y = f(x W^T + b) for float32 x and float32 or bfloat16 weights packed in panels (gemm_tile.h), any number of rows.
#include "gemm_panels.h"

namespace gm {
namespace {

constexpr int64_t MAX_PREFETCH_TILES = 8;  // the tiles over which the next panel's prefetches are spread

struct Gemm {
    const float* x;  // [M, K], rows x_stride apart
    int64_t x_stride, M, K;
    const void* panels;
    Results to;
};

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
        finish_tile(g.to, tile, row, end - row, index);
    }
}

template <class T>
void run(const Gemm& g) {
    share_out(g.M, g.to.num_panels(), false, [&](int64_t first, int64_t last, int64_t begin, int64_t end, int64_t) {
        for (int64_t index = begin; index < end; index++) run_panel<T>(g, first, last, index);
    });
}

}  // namespace
}  // namespace gm

GM_API int64_t gm_lanes() { return gm::W; }

// See Gemm and Results for the shapes. weights_are_bf16: 0 or 1; finish: one of Finish.
GM_API void gm_gemm(const float* x, int64_t x_stride, int64_t M, int64_t K, int64_t N, const void* panels,
    int64_t weights_are_bf16, const float* bias, const float* other, int64_t other_stride, float* out,
    int64_t out_stride, int64_t finish) {
    const gm::Results to{N, bias, other, other_stride, out, out_stride, (gm::Finish)finish};
    const gm::Gemm g{x, x_stride, M, K, panels, to};
    weights_are_bf16 ? gm::run<gm::bf16>(g) : gm::run<float>(g);
}
