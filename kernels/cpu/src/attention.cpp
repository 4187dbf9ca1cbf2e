// Causal attention over KV blocks, one kernel for prefill, decode and shared prefixes.
//
// A step's query rows are cut into tiles. A work item is a tile, a KV head and, when there are too few items for the
// threads, a share of the keys. Its query vectors are the tile's rows times the query heads of that KV head. The item
// walks the tile's segments (runs of KV blocks with the rows that see them: a prefix group's rows, or one sequence's)
// and for each chunk of keys computes the scores of all those vectors together, weighs them by an online softmax and
// adds the weighted values. So a shared block is read once a tile, and parts need no merging. Threads take items from a
// counter, the costly ones first.

#include <omp.h>

#include <algorithm>
#include <atomic>

#include "attention.h"
#include "attention_amx.h"
#include "attention_buffers.h"
#include "attention_softmax.h"
#include "attention_strips.h"

namespace gm {
namespace {

constexpr int MIN_SPLIT_KEYS = 256;  // fewer are not worth a second pass
constexpr float LOG2_E = 1.44269504f;
static_assert(BLOCK * MAX_DIM >= CHUNK * 16, "both uses of widened_ fit");

// A: type that products read, T: type of keys and values, bf16 or narrower where it isn't A.
template <class A, class T>
class TileWorker {
  public:
    TileWorker(const AttendArgs& args, int64_t max_vectors)
        : a_(args), dim_(args.head_dim), group_((int)(args.num_heads / args.num_kv_heads)), s_(max_vectors, dim_) {}

    void run(const Item& item, Partials& partials) {
        start(item);
        load_queries(item.head);
        const int64_t end = a_.segment_starts[item.tile + 1];
        for (int64_t i = a_.segment_starts[item.tile]; i < end; i++)
            add_segment(a_.segments[i], item, partials.num_splits);
        if (partials.num_splits == 1)
            store_outputs(item.head);
        else
            partials.store(item, num_vectors_, s_.outputs, s_.states.data());
    }

    // Adds up the splits of a tile and head.
    void merge(const Item& item, Partials& partials) {
        start(item);
        for (int m = 0; m < num_vectors_; m++) s_.states[m].sum = partials.merge(item, m, s_.outputs + m * dim_);
        store_outputs(item.head);
    }

  private:
    const AttendArgs& a_;
    const int64_t dim_;
    const int group_;
    Scratch<A> s_;
    int first_row_ = 0, num_vectors_ = 0;
    float score_factor_ = 0, value_factor_ = 0;  // of the item's KV head
    const T* blocks_[2][CHUNK / BLOCK] = {};              // of the chunk: keys, values
    alignas(CACHE_LINE) float widened_[BLOCK * MAX_DIM];  // a block of keys, or 16 columns of a chunk's values

    void start(const Item& item) {
        first_row_ = a_.tile_starts[item.tile];
        num_vectors_ = (a_.tile_starts[item.tile + 1] - first_row_) * group_;
        score_factor_ = a_.scale * LOG2_E, value_factor_ = 1;
        if (std::is_same<T, e4m3>::value) {
            score_factor_ *= a_.key_scales[item.head] * E4M3_UNIT;
            value_factor_ = a_.value_scales[item.head] * E4M3_UNIT;
        }
    }

    void load_queries(int64_t head) {
        for (int m = 0; m < num_vectors_; m++) {
            const int64_t row = first_row_ + m / group_, h = head * group_ + m % group_;
            const int64_t from = row * a_.qkv_stride + h * dim_;
            if (a_.qkv_is_bf16)
                copy((const bf16*)a_.qkv + from, s_.queries + m * QUERY_STRIDE);
            else
                copy((const float*)a_.qkv + from, s_.queries + m * QUERY_STRIDE);
            s_.states[m] = Softmax();
        }
        std::memset(s_.outputs, 0, num_vectors_ * dim_ * sizeof(float));
    }

    void add_segment(const Segment& segment, const Item& item, int64_t num_splits) {
        const int begin_row = std::max(segment.row_begin, first_row_);
        const int end_row = std::min(segment.row_end, first_row_ + num_vectors_ / group_);
        const auto [low, high] = std::minmax_element(a_.positions + begin_row, a_.positions + end_row);
        const int64_t seen_from = a_.window > 0 ? *low - a_.window + 1 : 0;
        const int64_t begin = std::max<int64_t>(segment.first_key, seen_from) / BLOCK * BLOCK;
        const int64_t end = std::min<int64_t>(segment.first_key + segment.num_keys, *high + 1);
        const int64_t blocks = std::max<int64_t>(end - begin + BLOCK - 1, 0) / BLOCK;
        const int64_t from = begin + blocks * item.split / num_splits * BLOCK;
        const int64_t to = std::min(end, begin + blocks * (item.split + 1) / num_splits * BLOCK);
        const int32_t* table = a_.block_tables + segment.sequence * a_.table_stride;
        for (int64_t key = from; key < to; key += CHUNK)
            add_chunk(table, item.head, key, std::min<int64_t>(CHUNK, to - key), begin_row, end_row);
    }

    void add_chunk(const int32_t* table, int64_t head, int64_t key, int num_keys, int begin_row, int end_row) {
        const int num_blocks = (num_keys + BLOCK - 1) / BLOCK;
        for (int b = 0; b < num_blocks; b++) {
            const int64_t at = table[key / BLOCK + b] * a_.block_stride + head * BLOCK * dim_;
            blocks_[0][b] = (const T*)a_.keys + at;
            blocks_[1][b] = (const T*)a_.values + at;
        }
        const int first = (begin_row - first_row_) * group_, count = (end_row - begin_row) * group_;
        compute_scores(first, count, num_blocks);
        weigh(begin_row, end_row, key, num_keys, num_blocks * BLOCK);
        add_values(first, count, num_keys);
    }

    void compute_scores(int first, int count, int num_blocks) {
        const A* queries = s_.queries + first * QUERY_STRIDE;
        float* scores = s_.scores + first * CHUNK;
#ifdef GRISTMILL_AMX
        if constexpr (std::is_same<A, bf16>::value)
            if (count >= MIN_AMX_VECTORS)
                return amx_scores(queries, QUERY_STRIDE, count, dim_, blocks_[0], num_blocks, scores, CHUNK);
#endif
        for (int b = 0; b < num_blocks; b++) {
            // With few vectors reading is what takes time.
            const Ahead<T> ahead{blocks_[0][std::min(b + 1, num_blocks - 1)], blocks_[1][b]};
            const auto score = [&](const auto* keys) {
                for_each_strip(count, [&](int at, auto size) {
                    score_strip<size>(
                        queries + at * QUERY_STRIDE, keys, dim_ / 2, scores + at * CHUNK + b * BLOCK,
                        at == 0 ? ahead : Ahead<T>{});
                });
            };
            if constexpr (CAN_WIDEN)
                if (count > MAX_NARROW) {
                    widen_panel(blocks_[0][b], BLOCK, dim_ / 2, widened_);
                    score((const float*)widened_);
                    continue;
                }
            score(blocks_[0][b]);
        }
    }

    void weigh(int begin_row, int end_row, int64_t key, int num_keys, int num_columns) {
        for (int row = begin_row; row < end_row; row++) {
            const int64_t position = a_.positions[row];
            const int end = (int)std::clamp<int64_t>(position + 1 - key, 0, num_keys);
            const int begin = a_.window > 0 ? (int)std::clamp<int64_t>(position + 1 - a_.window - key, 0, end) : 0;
            for (int g = 0; g < group_; g++) {
                const int m = (row - first_row_) * group_ + g;
                const float correction = weigh_scores(
                    s_.scores + m * CHUNK, s_.weights + m * CHUNK, num_columns, begin, end, score_factor_, s_.states[m]);
                float* output = s_.outputs + m * dim_;
                if (correction != 1)
                    for (int64_t d = 0; d < dim_; d += W) store(output + d, load(output + d) * correction);
            }
        }
    }

    void add_values(int first, int count, int num_keys) {
        const A* weights = s_.weights + first * CHUNK;
        float* outputs = s_.outputs + first * dim_;
#ifdef GRISTMILL_AMX
        if constexpr (std::is_same<A, bf16>::value)
            if (count >= MIN_AMX_VECTORS)
                return amx_add_values(weights, CHUNK, count, blocks_[1], num_keys, outputs, dim_);
#endif
        const int num_blocks = (num_keys + BLOCK - 1) / BLOCK;
        for (int64_t d = 0; d < dim_; d += 16) {
            const auto add = [&](const auto* const* panels, int64_t width) {
                for_each_strip(count, [&](int at, auto size) {
                    float* to = outputs + at * dim_ + d;
                    add_value_strip<size>(weights + at * CHUNK, panels, width, num_keys, to, dim_);
                });
            };
            const T* panels[CHUNK / BLOCK];
            for (int b = 0; b < num_blocks; b++) panels[b] = blocks_[1][b] + d * ROWS_A_PAIR;
            if constexpr (CAN_WIDEN)
                if (count > MAX_NARROW) {
                    const float* wide[CHUNK / BLOCK];
                    for (int b = 0; b < num_blocks; b++) {
                        widen_panel(panels[b], dim_, BLOCK / 2, widened_ + b * BLOCK * 16);
                        wide[b] = widened_ + b * BLOCK * 16;
                    }
                    add(wide, 16);
                    continue;
                }
            add(panels, dim_);
        }
    }

    // With more vectors than these, keys and values are better turned into float32 once than in every strip.
    static constexpr int MAX_NARROW = (std::is_same<T, e4m3>::value ? 1 : 2) * MAX_STRIP;
    static constexpr bool CAN_WIDEN = !std::is_same<T, A>::value;
    static constexpr int ROWS_A_PAIR = std::is_same<T, bf16>::value ? 2 : 1;  // in neighbouring elements

    void store_outputs(int64_t head) {
        for (int m = 0; m < num_vectors_; m++)
            store_output(first_row_ + m / group_, head * group_ + m % group_, s_.outputs + m * dim_, s_.states[m].sum);
    }

    void store_output(int64_t row, int64_t head, const float* output, float sum) {
        const int64_t to = (row * a_.num_heads + head) * dim_;
        if (a_.qkv_is_bf16)
            copy(output, (bf16*)a_.out + to, value_factor_ / sum);
        else
            copy(output, (float*)a_.out + to, value_factor_ / sum);
    }

    template <class From, class To>
    void copy(const From* from, To* to, float factor = 1) const {
        for (int64_t d = 0; d < dim_; d += W) store(to + d, load(from + d) * factor);
    }
};

// How many ways the keys of every tile are split so that all threads have work.
int64_t count_splits(const AttendArgs& a, int64_t num_items) {
    const int64_t wanted = (2 * omp_get_max_threads() + num_items - 1) / num_items;
    if (wanted == 1 || omp_get_max_threads() == 1) return 1;
    int64_t keys = 0;
    for (int64_t i = a.segment_starts[0]; i < a.segment_starts[a.num_tiles]; i++) {
        const int64_t seen = a.segments[i].num_keys;
        keys += a.window > 0 ? std::min(seen, a.window) : seen;
    }
    return std::clamp<int64_t>(keys / a.num_tiles / MIN_SPLIT_KEYS, 1, wanted);
}

template <class A, class T>
void attend(const AttendArgs& a) {
    int64_t max_rows = 0;
    for (int64_t t = 0; t < a.num_tiles; t++)
        max_rows = std::max<int64_t>(max_rows, a.tile_starts[t + 1] - a.tile_starts[t]);
    const int64_t max_vectors = max_rows * (a.num_heads / a.num_kv_heads);
    const int64_t num_items = a.num_tiles * a.num_kv_heads;
    Partials partials(count_splits(a, num_items), num_items, a.num_tiles, max_vectors, a.head_dim);

    std::atomic<int64_t> next{0}, next_merge{0};
#pragma omp parallel
    {
        TileWorker<A, T> worker(a, max_vectors);
        [[maybe_unused]] const AmxSession amx;
        for (int64_t i; (i = next++) < num_items * partials.num_splits;) {
            const int64_t of_head = i / partials.num_splits;
            worker.run({a.tile_order[of_head % a.num_tiles], of_head / a.num_tiles, i % partials.num_splits}, partials);
        }
        if (partials.num_splits > 1) {
#pragma omp barrier
            for (int64_t i; (i = next_merge++) < num_items;)
                worker.merge({i % a.num_tiles, i / a.num_tiles, 0}, partials);
        }
    }
}

}  // namespace
}  // namespace gm

// The caller zeroes rows of `out` that no tile covers.
GM_API void gristmill_attend(const gm::AttendArgs* args) {
    using gm::attend, gm::bf16;
    if (args->num_tiles == 0) return;
    if (args->kv_type == gm::KV_FLOAT32) return attend<float, float>(*args);
    if (args->kv_type == gm::KV_E4M3) return attend<float, gm::e4m3>(*args);
#ifdef GRISTMILL_BF16
    if (args->qkv_is_bf16) return attend<bf16, bf16>(*args);
#endif
    attend<float, bf16>(*args);
}
