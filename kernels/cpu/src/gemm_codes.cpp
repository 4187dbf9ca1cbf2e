// y = f(x W^T + b) for float32 x and weights in codes (gemm_codes.h), any number of rows, with no copy of W in numbers.
// All arithmetic is float32. Each result is summed in the same order whatever the number of rows: they change no bit.
#include "gemm_codes_tile.h"
#include "gemm_panels.h"

#include <cstdlib>
#include <memory>

namespace gm {
namespace {

constexpr int MAX_TILE = 6;       // rows x panels of a tile that reads codes: 12 sums
constexpr int64_t MANY_ROWS = 6;  // for more, a panel is made into numbers once, in the L2 cache

// Memory of the calling thread that stays from call to call: fresh pages would cost more than they hold.
float* scratch(int64_t size) {
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    static thread_local std::unique_ptr<float, Free> memory;
    static thread_local int64_t memory_size = 0;
    if (size > memory_size) {
        const int64_t bytes = (size * sizeof(float) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
        memory.reset((float*)std::aligned_alloc(CACHE_LINE, bytes));
        memory_size = size;
    }
    return memory.get();
}

// Rows of x: [M, K], rows `stride` apart.
struct Rows {
    const float* x;
    int64_t stride;

    const float* operator[](int64_t row) const { return x + row * stride; }
};

// Rows first:last of x times PANELS panels from index on; those at `next` are asked for meanwhile, to have come from
// memory when their turn is.
template <class Codes, int PANELS>
void run_panels(
    const Weights& w, Rows rows, const Results& to, int64_t first, int64_t last, int64_t index, int64_t next) {
    alignas(CACHE_LINE) float tile[MAX_TILE * NR];
    const int64_t panel_bytes = w.panel_bytes<Codes>();
    for_each_tile(first, last, MAX_TILE / PANELS, [&](int64_t row, int64_t end) {
        const int64_t ahead_bytes = row == first ? (next - index) * panel_bytes : 0;
        run_codes_tile_of<Codes, PANELS, MAX_TILE / PANELS>(
            end - row, w, rows[row], rows.stride, w.panels + index * panel_bytes, tile, ahead_bytes);
        for (int p = 0; p < PANELS; p++)
            finish_tile(to, tile + p * (end - row) * NR, row, end - row, index + p);
    });
}

// out: [K][NR], the panel's weights. Meanwhile the panel after it is asked for.
template <class Codes>
void unpack_panel(const Weights& w, const char* panel, float* __restrict out) {
    const int64_t panel_bytes = w.panel_bytes<Codes>();
    for (int64_t rest = w.K, size; rest > 0; rest -= size) {
        size = std::min(w.group_size, rest);
        const char *codes = panel, *tables = panel + codes_bytes<Codes>(size);
        Scaling<Codes> scaling;
        scaling.load(w, tables);
        const auto unpack_one = [&](int i) {
            store(out, scaling.weights(codes, 0, i));
            store(out + W, scaling.weights(codes, 1, i));
            out += NR;
        };
        int64_t k = 0;
        for (; k + Codes::STEP <= size; k += Codes::STEP, codes += Codes::STEP_BYTES) {
            for (int64_t line = 0; line < Codes::STEP_BYTES; line += CACHE_LINE) prefetch(codes + line + panel_bytes);
#pragma GCC unroll 8
            for (int i = 0; i < Codes::STEP; i++) unpack_one(i);
        }
        for (int i = 0; k + i < size; i++) unpack_one(i);
        panel = tables + w.tables_bytes();
    }
}

// Rows first:last of x times a panel. numbers: a thread's own, [K][NR].
template <class Codes>
void run_unpacked(const Weights& w, Rows rows, const Results& to, int64_t first, int64_t last, int64_t index,
    float* numbers) {
    alignas(CACHE_LINE) float tile[MAX_ROWS * NR];
    unpack_panel<Codes>(w, w.panels + index * w.panel_bytes<Codes>(), numbers);
    for_each_tile(first, last, MAX_ROWS, [&](int64_t row, int64_t end) {
        run_tile_of<false>(end - row, rows[row], rows.stride, numbers, w.K, tile, Prefetch{});
        finish_tile(to, tile, row, end - row, index);
    });
}

// Rows whose columns are in the order of the weights' k.
Rows gather(const Weights& w, Rows rows, int64_t M, float* out) {
#pragma omp parallel for if (M > MANY_ROWS)
    for (int64_t row = 0; row < M; row++)
        for (int64_t k = 0; k < w.K; k++) out[row * w.K + k] = rows[row][w.columns[k]];
    return {out, w.K};
}

template <class Codes>
void run(const Weights& w, Rows rows, int64_t M, const Results& to) {
    // The threads' buffers come first: their lines are whole.
    const int64_t thread_size = M > MANY_ROWS ? w.K * NR : 0, threads_size = omp_get_max_threads() * thread_size;
    float* const memory = scratch(threads_size + (w.columns ? M * w.K : 0));
    if (w.columns) rows = gather(w, rows, M, memory + threads_size);
    share_out(M, to.num_panels(), M <= 3, [&](int64_t first, int64_t last, int64_t index, int64_t end, int64_t next) {
        const int64_t num_rows = last - first;
        float* numbers = memory + omp_get_thread_num() * thread_size;
        for (; num_rows > MANY_ROWS && index < end; index++)
            run_unpacked<Codes>(w, rows, to, first, last, index, numbers);
        const auto run_some = [&](auto count, int64_t max_rows) {
            constexpr int PANELS = decltype(count)::value;
            for (; num_rows <= max_rows && index + PANELS <= end; index += PANELS)
                run_panels<Codes, PANELS>(w, rows, to, first, last, index, index + PANELS < end ? index + PANELS : next);
        };
        // Several panels at once keep more sums going.
        run_some(std::integral_constant<int, 2>{}, 3);
        run_some(std::integral_constant<int, 1>{}, MANY_ROWS);
    });
}

// out: [num_rows, K], the rows of W of these ids.
template <class Codes>
void take_rows(const Weights& w, const int64_t* ids, int64_t num_rows, float* out) {
    for (int64_t row = 0; row < num_rows; row++, out += w.K) {
        const int64_t column = ids[row] % NR;
        const char* codes = w.panels + ids[row] / NR * w.panel_bytes<Codes>();
        for (int64_t first = 0; first < w.K; first += w.group_size) {
            const int64_t size = std::min(w.group_size, w.K - first);
            const char* tables = codes + codes_bytes<Codes>(size);
            Scaling<Codes> scaling;
            scaling.load(w, tables);
            const float scale = scaling.scales[column / W][column % W];
            const float offset = scaling.offsets[column / W][column % W];
            for (int64_t k = 0; k < size; k++) {
                const int64_t place = w.columns ? w.columns[first + k] : first + k;
                out[place] = Codes::load_one(codes, k, column) * scale + offset;
            }
            codes = tables + w.tables_bytes();
        }
    }
}

}  // namespace
}  // namespace gm

// x: [M, K], rows x_stride apart; other, out: see Results; other is not read where weights are gated.
GM_API void gm_gemm_codes(const gm::Weights* w, const float* x, int64_t x_stride, int64_t M, const float* other,
    int64_t other_stride, float* out, int64_t out_stride, int64_t finish) {
    const gm::Results to{
        w->N, w->bias, w->is_gated ? w->up_bias : other, other_stride, out, out_stride, (gm::Finish)finish};
    const gm::Rows rows{x, x_stride};
    if (w->kind == 0) gm::run<gm::Int4>(*w, rows, M, to);
    if (w->kind == 1) gm::run<gm::Int8>(*w, rows, M, to);
    if (w->kind == 2) gm::run<gm::Fp8>(*w, rows, M, to);
}

// ids: [num_rows], rows of weights that are not gated; out: [num_rows, K].
GM_API void gm_take_codes(const gm::Weights* w, const int64_t* ids, int64_t num_rows, float* out) {
    if (w->kind == 0) gm::take_rows<gm::Int4>(*w, ids, num_rows, out);
    if (w->kind == 1) gm::take_rows<gm::Int8>(*w, ids, num_rows, out);
    if (w->kind == 2) gm::take_rows<gm::Fp8>(*w, ids, num_rows, out);
}
