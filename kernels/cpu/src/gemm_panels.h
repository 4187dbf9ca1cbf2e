// What both products of gemm*.cpp share: how results leave a tile, and how threads share out panels and rows: runs of
// panels come from a common queue, so that a core that is slow or late holds nobody up.
#pragma once

#include "gemm_tile.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <tuple>
#include <utility>

namespace gm {

// y; silu(y); y * other; y + other; silu(y) * z, where a panel holds W columns of y's weights and the same W of z's.
enum Finish : int64_t { PLAIN = 0, SILU = 1, MUL = 2, ADD = 3, GATED = 4 };

constexpr int64_t MAX_BLOCK_ROWS = 192;  // rows of x that stay in the L2 cache while panels pass by

// Where the results of a product [M, N] go, and through what.
struct Results {
    int64_t N;
    const float* bias;   // [N] or null
    const float* other;  // MUL, ADD: [M, N], rows other_stride apart, may be out; GATED: the second bias, [N], or null
    int64_t other_stride;
    float* out;  // [M, N], rows out_stride apart
    int64_t out_stride;
    Finish finish;

    int64_t num_panels() const {
        const int64_t columns = finish == GATED ? W : NR;
        return (N + columns - 1) / columns;
    }
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
static void finish_half(const Results& to, const float* tile, int64_t row, int num_rows, int64_t column) {
    const int64_t n = to.N - column;
    const vf bias = to.bias ? load_first(to.bias + column, n) : vf{};
    const vf up_bias = to.finish == GATED && to.other ? load_first(to.other + column, n) : vf{};
    for (int i = 0; i < num_rows; i++) {
        vf y = load(tile + i * NR) + bias;
        const float* other = to.other + (row + i) * to.other_stride + column;
        if (to.finish == SILU) y = silu(y);
        if (to.finish == MUL) y = y * load_first(other, n);
        if (to.finish == ADD) y = y + load_first(other, n);
        if (to.finish == GATED) y = silu(y) * (load(tile + i * NR + W) + up_bias);
        store_first(to.out + (row + i) * to.out_stride + column, y, n);
    }
}

// Writes a tile of the panel: num_rows rows of NR sums, of x's rows from `row` on.
static void finish_tile(const Results& to, const float* tile, int64_t row, int num_rows, int64_t panel) {
    if (to.finish == GATED) return finish_half(to, tile, row, num_rows, panel * W);
    finish_half(to, tile, row, num_rows, panel * NR);
    if (panel * NR + W < to.N) finish_half(to, tile + W, row, num_rows, panel * NR + W);
}

// Items that threads take in runs: long ones at first, since panels in order stream best, single ones at last, so that
// all threads end together.
class Queue {
public:
    Queue(int64_t num_items, double first_part) : num_items_(num_items), part_(first_part / omp_get_max_threads()) {}

    // The next run: [first, second), empty at the end.
    std::pair<int64_t, int64_t> take() {
        int64_t item = next_.load(), count = 0;
        do {
            count = item < num_items_ ? std::max<int64_t>(1, (num_items_ - item) * part_) : 0;
        } while (count > 0 && !next_.compare_exchange_weak(item, item + count));
        return {item, item + count};
    }

private:
    const int64_t num_items_;
    const double part_;  // of what is left
    std::atomic<int64_t> next_{0};
};

// On all threads: run(first, last, begin, end, next) for rows first:last and panels begin:end, until each of M rows has
// met each panel; the thread's next panels begin at `next`. A few rows wait for memory at the start of each run: theirs
// are longer, of pairs of panels, and a thread takes its next one before it ends one, to ask for it early.
template <class Run>
void share_out(int64_t M, int64_t num_panels, bool are_few, const Run& run) {
    const int64_t unit = are_few ? 2 : 1, num_units = (num_panels + unit - 1) / unit;
    int64_t block_rows = MAX_BLOCK_ROWS, num_blocks = (M + block_rows - 1) / block_rows;
    while (block_rows > MAX_ROWS && num_blocks * num_units < 2 * omp_get_max_threads()) {
        block_rows /= 2;
        num_blocks = (M + block_rows - 1) / block_rows;
    }
    const auto run_items = [&](int64_t item, int64_t end, int64_t next) {
        while (item < end) {
            const int64_t first = item / num_units * block_rows, begin = item % num_units;
            const int64_t size = std::min(num_units - begin, end - item);
            item += size;
            run(first, std::min(M, first + block_rows), begin * unit, std::min(num_panels, (begin + size) * unit),
                (item < end ? item : next) % num_units * unit);
        }
    };
    Queue queue(num_blocks * num_units, are_few ? 0.75 : 0.5);
#pragma omp parallel
    for (auto [item, end] = queue.take(); item < end;) {
        const int64_t rest = are_few ? std::max(item, end - 2) : end;
        run_items(item, rest, rest);
        const auto next = queue.take();
        run_items(rest, end, next.first);
        std::tie(item, end) = next;
    }
}

}  // namespace gm
