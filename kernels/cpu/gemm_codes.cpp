// y = f(x W^T + b) for float32 x and weights in codes (gemm_codes.h), any number of rows, with no copy of W in numbers.
// All arithmetic is float32. Each result is summed in the same order whatever the number of rows: they change no bit.
#include "gemm_codes_tile.h"
#include "gemm_panels.h"

#include <cstdlib>
#include <memory>

namespace gm {
namespace {

constexpr int MAX_TILE = 6;        // rows x panels of a tile that reads codes: 12 sums
constexpr int64_t MANY_ROWS = 12;  // for more, a part of a panel is made into numbers once, in the L1 cache
constexpr int64_t PART_K = 256;    // of such a part, if a group isn't larger

struct Free {
    void operator()(float* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float[], Free>;

Floats allocate(int64_t size) {
    const int64_t bytes = (size * sizeof(float) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    return Floats((float*)std::aligned_alloc(CACHE_LINE, bytes));
}

float sum_of(const float* x, int64_t size) {
    vf sums{};
    int64_t k = 0;
    for (; k + W <= size; k += W) sums = sums + load(x + k);
    float sum = horizontal_sum(sums);
    for (; k < size; k++) sum += x[k];
    return sum;
}

template <class Codes>
void prepare_row(const Weights& w, const float* x, const Prepared& to, int64_t row) {
    float* out = to.x + row * to.row_size;
    for (int64_t k = 0; k < w.K; k++) out[k] = x[w.columns ? w.columns[k] : k];
    for (int64_t k = w.K; k < to.row_size; k++) out[k] = 0;
    for (int64_t j = 0; to.sums && j < to.num_sums; j++) {
        const int64_t first = j * w.group_size;
        const float sum = sum_of(out + first, std::min(w.group_size, w.K - first));
        to.sums[row * to.num_sums + j] = to.are_starts ? -Codes::ZERO * sum : sum;
    }
    if (Codes::IS_PADDED) {
        for (int64_t k = 0; k < to.row_size; k += Codes::STEP)
            for (int i = 0; i < Codes::STEP; i++) out[k + i] *= Codes::factor_of_x(i);
    }
}

// Rows first:last of x times PANELS panels from index on; those at `next` are asked for meanwhile, to have come from
// memory when their turn is.
template <class Codes, int PANELS>
void run_panels(const Weights& w, const Prepared& in, const Results& to, int64_t first, int64_t last, int64_t index,
    int64_t next) {
    alignas(CACHE_LINE) float tile[MAX_TILE * NR];
    const int64_t panel_bytes = w.panel_bytes<Codes>();
    for_each_tile(first, last, MAX_TILE / PANELS, [&](int64_t row, int64_t end) {
        const int64_t ahead_bytes = row == first ? (next - index) * panel_bytes : 0;
        std::fill(tile, tile + PANELS * (end - row) * NR, 0.0f);
        run_codes_tile_of<Codes, PANELS, MAX_TILE / PANELS>(
            end - row, w, in, row, w.panels + index * panel_bytes, tile, ahead_bytes);
        for (int p = 0; p < PANELS; p++)
            finish_tile(to, tile + p * (end - row) * NR, row, end - row, index + p);
    });
}

// Writes a group as Numbers reads it: its codes and tables as float32. Returns where the next group is.
template <class Codes>
const char* unpack_group(const Weights& w, const char* codes, int64_t size, int64_t ahead_bytes, float*& out) {
    int64_t k = 0;
    for (; k + (Codes::IS_PADDED ? 1 : Codes::STEP) <= size; k += Codes::STEP, codes += Codes::STEP_BYTES) {
        for (int64_t line = 0; line < Codes::STEP_BYTES; line += CACHE_LINE) prefetch(codes + line + ahead_bytes);
#pragma GCC unroll 8
        for (int i = 0; i < Codes::STEP; i++, out += NR) {
            store(out, Codes::load(codes, 0, i));
            store(out + W, Codes::load(codes, 1, i));
        }
    }
    for (; k < size; k++, codes += Codes::STEP_BYTES / Codes::STEP, out += NR) {
        store(out, Codes::load(codes, 0, 0));
        store(out + W, Codes::load(codes, 1, 0));
    }
    for (int half = 0; half < 2; half++, out += W)
        store(out, load_scales<Codes>(codes, w.scales_are_half, half) * Codes::UNIT);
    for (int half = 0; half < 2 && w.has_offsets; half++, out += W)
        store(out, load_scales<Codes>(codes, w.scales_are_half, half, true));
    return codes + w.tables_bytes();
}

// Groups of a part that is made into numbers.
int64_t part_groups(const Weights& w) { return std::max<int64_t>(1, PART_K / w.group_size); }

// Floats that run_unpacked needs.
template <class Codes>
int64_t buffer_size(const Weights& w) {
    const int64_t group_size = std::min(w.group_size, w.K);
    const int64_t group_floats = codes_bytes<Codes>(group_size) * NR * Codes::STEP / Codes::STEP_BYTES + 2 * NR;
    return MAX_BLOCK_ROWS * NR + part_groups(w) * group_floats;
}

// Rows first:last of x times a panel, part after part of its k.
template <class Codes>
void run_unpacked(const Weights& w, const Prepared& in, const Results& to, int64_t first, int64_t last, int64_t index,
    float* buffer) {
    float *sums = buffer, *const numbers = buffer + MAX_BLOCK_ROWS * NR;
    std::fill(sums, sums + (last - first) * NR, 0.0f);
    const int64_t panel_bytes = w.panel_bytes<Codes>(), num_groups = w.num_groups();
    const char* codes = w.panels + index * panel_bytes;
    Weights part = w;  // in Numbers
    part.scales_are_half = 0;
    Prepared part_in = in;
    const int64_t num_parts = (num_groups + part_groups(w) - 1) / part_groups(w);
    for (int64_t i = 0, j = 0, end; i < num_parts; i++, j = end) {
        end = (i + 1) * num_groups / num_parts;
        float* out = numbers;
        for (int64_t group = j; group < end; group++) {
            const int64_t size = std::min(w.group_size, w.K - group * w.group_size);
            codes = unpack_group<Codes>(w, codes, size, panel_bytes, out);
        }
        part.K = ((out - numbers) - (end - j) * part.tables_bytes() / 4) / NR;
        part.group_size = end - j == 1 ? part.K : w.group_size;
        for_each_tile(first, last, MAX_ROWS, [&](int64_t row, int64_t row_end) {
            run_codes_tile_of<Numbers, 1, MAX_ROWS>(
                row_end - row, part, part_in, row, (const char*)numbers, sums + (row - first) * NR, 0);
        });
        part_in.x += part.K;
        if (in.sums) part_in.sums += end - j;
    }
    finish_tile(to, sums, first, last - first, index);
}

template <class Codes>
void run(const Weights& w, const float* x, int64_t x_stride, int64_t M, const Results& to) {
    const bool are_starts = Codes::ZERO && !w.has_offsets, has_sums = w.has_offsets || are_starts;
    const int64_t row_size = codes_bytes<Codes>(w.K) * Codes::STEP / Codes::STEP_BYTES;
    const int64_t x_size = M * row_size, sums_size = has_sums ? M * w.num_groups() : 0;
    // The threads' buffers come first: their lines are whole.
    const int64_t thread_size = M > MANY_ROWS ? buffer_size<Codes>(w) : 0;
    const int64_t threads_size = omp_get_max_threads() * thread_size;
    const Floats memory = allocate(threads_size + x_size + sums_size);
    float* const rows = memory.get() + threads_size;
    const Prepared in{rows, row_size, has_sums ? rows + x_size : nullptr, w.num_groups(), are_starts};
    const auto prepare = [&](int64_t row) { prepare_row<Codes>(w, x + row * x_stride, in, row); };
    if (M > MANY_ROWS) {
#pragma omp parallel for
        for (int64_t row = 0; row < M; row++) prepare(row);
    } else {
        for (int64_t row = 0; row < M; row++) prepare(row);
    }
    share_out(M, to.num_panels(), M <= 3, [&](int64_t first, int64_t last, int64_t index, int64_t end, int64_t next) {
        const int64_t num_rows = last - first;
        float* buffer = memory.get() + omp_get_thread_num() * thread_size;
        for (; num_rows > MANY_ROWS && index < end; index++) run_unpacked<Codes>(w, in, to, first, last, index, buffer);
        const auto run_some = [&](auto count, int64_t max_rows) {
            constexpr int PANELS = decltype(count)::value;
            for (; num_rows <= max_rows && index + PANELS <= end; index += PANELS)
                run_panels<Codes, PANELS>(w, in, to, first, last, index, index + PANELS < end ? index + PANELS : next);
        };
        // Several panels at once keep more sums going.
        run_some(std::integral_constant<int, 4>{}, 1);
        run_some(std::integral_constant<int, 2>{}, 3);
        run_some(std::integral_constant<int, 1>{}, MANY_ROWS);
    });
}

// out: [num_rows, K], the rows of W of these ids.
template <class Codes>
void take_rows(const Weights& w, const int64_t* ids, int64_t num_rows, float* out) {
    const float zero = w.has_offsets ? 0 : Codes::ZERO;
    for (int64_t row = 0; row < num_rows; row++, out += w.K) {
        const int64_t column = ids[row] % NR, half = column / W;
        const char* codes = w.panels + ids[row] / NR * w.panel_bytes<Codes>();
        for (int64_t first = 0; first < w.K; first += w.group_size) {
            const int64_t size = std::min(w.group_size, w.K - first);
            const char* tables = codes + codes_bytes<Codes>(size);
            const vf scales = load_scales<Codes>(tables, w.scales_are_half, half) * Codes::UNIT;
            const vf offsets = w.has_offsets ? load_scales<Codes>(tables, w.scales_are_half, half, true) : vf{};
            for (int64_t k = 0; k < size; k++) {
                const int64_t place = w.columns ? w.columns[first + k] : first + k;
                out[place] = (Codes::load_one(codes, k, column) - zero) * scales[column % W] + offsets[column % W];
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
    if (w->kind == 0) gm::run<gm::Int4>(*w, x, x_stride, M, to);
    if (w->kind == 1) gm::run<gm::Int8>(*w, x, x_stride, M, to);
    if (w->kind == 2) gm::run<gm::Fp8>(*w, x, x_stride, M, to);
}

// ids: [num_rows], rows of weights that are not gated; out: [num_rows, K].
GM_API void gm_take_codes(const gm::Weights* w, const int64_t* ids, int64_t num_rows, float* out) {
    if (w->kind == 0) gm::take_rows<gm::Int4>(*w, ids, num_rows, out);
    if (w->kind == 1) gm::take_rows<gm::Int8>(*w, ids, num_rows, out);
    if (w->kind == 2) gm::take_rows<gm::Fp8>(*w, ids, num_rows, out);
}
