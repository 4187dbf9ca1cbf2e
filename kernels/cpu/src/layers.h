// What layers.cpp shares with kernels/cpu/layers.py, which mirrors it field by field.
#pragma once

#include "attention.h"

namespace gm {

// Weights of one kind for N of a linear layer's outputs, from output `first` on.
struct PanelArgs {
    const void* codes;   // Weights of gemm_codes.h, with all that follows but `first` and N in it; else null
    const void* panels;  // as gm_gemm takes them
    const float *bias, *up_bias;
    int64_t first, N, is_bf16;
};

struct LinearArgs {
    const PanelArgs* parts;
    int64_t num_parts, K, N;
};

struct LayerArgs {
    const float *input_norm, *mlp_norm;  // [hidden_size]
    const float *q_norm, *k_norm;        // [head_dim] or null
    LinearArgs qkv, output, gated, down;
};

struct LayersArgs {
    const LayerArgs* layers;
    const AppendArgs* append;  // of layer 0, like attend
    const AttendArgs* attend;
    float *x, *normed;       // [num_rows, hidden_size]
    float *qkv, *attended;   // the arguments' qkv and out
    float* inner;            // [num_rows, intermediate_size]
    const int64_t* kept;     // [num_kept], rows in ascending order, or null: all
    int64_t num_layers, num_rows, num_kept, hidden_size, kv_layer_bytes;
    float eps;
};

}  // namespace gm
