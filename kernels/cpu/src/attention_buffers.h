// Memory of attention: a thread's buffers for one work item, and the partial results of items that share query vectors.
#pragma once

#include <vector>

#include "attention_softmax.h"
#include "attention_strips.h"

namespace gm {

struct Item {
    int64_t tile, head, split;
};

// A thread's buffers. Rows are vectors of a tile; A is the type that products read, float or bf16.
template <class A>
class Scratch {
  public:
    A *queries, *weights;       // [vectors, QUERY_STRIDE], [vectors, CHUNK]
    float *outputs, *scores;    // [vectors, head_dim], [vectors, CHUNK]
    std::vector<Softmax> states;

    Scratch(int64_t max_vectors, int64_t head_dim) : states(max_vectors) {
        // Tiles of AMX touch up to 15 vectors behind the last.
        const int64_t vectors = max_vectors + 15;
        constexpr bool apart = !std::is_same<A, float>::value;
        const int64_t floats = vectors * (QUERY_STRIDE + head_dim + CHUNK * (apart ? 2 : 1));
        memory_.resize(floats + CACHE_LINE / 4);
        float* p = memory_.data() + (-(uintptr_t)memory_.data() % CACHE_LINE) / 4;
        queries = (A*)p;
        outputs = p + vectors * QUERY_STRIDE;
        scores = outputs + vectors * head_dim;
        weights = (A*)(apart ? scores + vectors * CHUNK : scores);
    }

  private:
    std::vector<float> memory_;
};

// Results of the items that each see a share of a tile's keys: sums of weighted values, then their maximum and sum.
class Partials {
  public:
    const int64_t num_splits;

    Partials(int64_t splits, int64_t num_items, int64_t num_tiles, int64_t max_vectors, int64_t head_dim)
        : num_splits(splits), num_tiles_(num_tiles), max_vectors_(max_vectors), dim_(head_dim) {
        if (splits > 1) memory_.resize(num_items * splits * max_vectors * (head_dim + 2));
    }

    void store(const Item& item, int num_vectors, const float* outputs, const Softmax* states) {
        for (int m = 0; m < num_vectors; m++) {
            float* to = at(item, m);
            std::memcpy(to, outputs + m * dim_, dim_ * sizeof(float));
            to[dim_] = states[m].max;
            to[dim_ + 1] = states[m].sum;
        }
    }

    // Adds up a vector's splits, each weighted by 2^(its maximum - the highest); returns the sum of the weights.
    float merge(Item item, int vector, float* output) {
        float highest = -INFINITY, sum = 0;
        for (item.split = 0; item.split < num_splits; item.split++)
            highest = std::fmax(highest, at(item, vector)[dim_]);
        std::memset(output, 0, dim_ * sizeof(float));
        for (item.split = 0; item.split < num_splits; item.split++) {
            const float* part = at(item, vector);
            const float weight = std::exp2(part[dim_] - highest);
            sum += weight * part[dim_ + 1];
            for (int64_t d = 0; d < dim_; d += W) store_sum(output + d, weight, part + d);
        }
        return sum;
    }

  private:
    const int64_t num_tiles_, max_vectors_, dim_;
    std::vector<float> memory_;

    static void store_sum(float* to, float weight, const float* part) { gm::store(to, load(to) + weight * load(part)); }

    float* at(const Item& item, int64_t vector) {
        const int64_t item_id = (item.head * num_tiles_ + item.tile) * num_splits + item.split;
        return memory_.data() + (item_id * max_vectors_ + vector) * (dim_ + 2);
    }
};

}  // namespace gm
