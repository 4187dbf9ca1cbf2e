// Softmax of attention over chunks of keys (arXiv 2205.14135, algorithm 1): each query vector keeps the maximum of its
// scores so far and the sum of their exponentials; a chunk with a higher maximum scales down what was summed before.
#pragma once

#include "simd.h"

namespace gm {

// State of one query vector, in units of log2.
struct Softmax {
    float max = -INFINITY, sum = 0;
};

// 2^x for x <= 0, exactly 0 below -126.5; a NaN stays one. Polynomial of Cephes' exp2f.
GM_INLINE vf exp2_nonpositive(vf x) {
    const vf low = broadcast(-127.0f), magic = broadcast(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
    const vf y = low > x ? low : x;
    const vf shifted = y + magic;
    const vf r = y - (shifted - magic);
    vf p = broadcast(1.535336188e-4f);
    p = p * r + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.0f;
    return p * (vf)(((vi)shifted + 127) << 23);  // -127 has the bits of 0
}

// The largest of count scores, count a multiple of 16.
GM_INLINE float max_score(const float* scores, int count) {
    vf a = broadcast(-INFINITY), b = a;
    for (int i = 0; i < count; i += 2 * W) {
        a = max(load(scores + i), a);
        if (i + W < count) b = max(load(scores + i + W), b);
    }
    return horizontal_max(max(a, b));
}

// Turns the scores of a row, of which begin:end are visible, into weights relative to the row's new maximum. Columns of
// the chunk's count (a multiple of 16) outside begin:end get weight 0. Returns the factor for what was summed before.
template <class A>
inline float weigh_scores(
    float* scores, A* weights, int count, int begin, int end, float factor, Softmax& state) {
    const int first = begin / 16 * 16, last = end > begin ? (end + 15) / 16 * 16 : first;
    std::memset(weights, 0, first * sizeof(A));
    std::memset(weights + last, 0, (count - last) * sizeof(A));
    if (first == last) return 1;
    for (int i = first; i < begin; i++) scores[i] = -INFINITY;
    for (int i = end; i < last; i++) scores[i] = -INFINITY;

    const float score = max_score(scores + first, last - first) * factor;
    const float highest = score > state.max ? score : state.max;
    const vf f = broadcast(factor), h = broadcast(highest);
    vf sum{};
    for (int i = first; i < last; i += W) {
        const vf weight = exp2_nonpositive(load(scores + i) * f - h);
        sum += weight;
        store(weights + i, weight);
    }
    const float correction = std::exp2(state.max - highest);
    state.sum = state.sum * correction + horizontal_sum(sum);
    state.max = highest;
    return correction;
}

}  // namespace gm
