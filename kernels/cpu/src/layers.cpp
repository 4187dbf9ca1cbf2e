// All decoder layers of a step in one call: the kernels in the order of engine/model.py, without the interpreter between
// them. At one row that is a third of a step's time. Activations are float32.

#include "layers.h"

#include <cstring>

#include "simd.h"

extern "C" {
void gm_gemm(const float* x, int64_t x_stride, int64_t M, int64_t K, int64_t N, const void* panels,
    int64_t weights_are_bf16, const float* bias, const float* other, int64_t other_stride, float* out,
    int64_t out_stride, int64_t finish);
void gm_gemm_codes(const void* weights, const float* x, int64_t x_stride, int64_t M, const float* other,
    int64_t other_stride, float* out, int64_t out_stride, int64_t finish);
void gm_rms_norm(const void* x, int64_t x_stride, const void* weight, void* out, int64_t num_rows, int64_t size, float eps,
    int64_t x_is_bf16, int64_t weight_is_bf16);
void gristmill_append(const gm::AppendArgs* args);
void gristmill_attend(const gm::AttendArgs* args);
}

namespace gm {
namespace {

enum Finish : int64_t { PLAIN = 0, ADD = 3, GATED = 4 };  // of gemm.cpp

// out[M, N] = finish(x W^T + b); ADD: plus what is in out. Rows of x and out are dense.
void run_linear(const LinearArgs& linear, const float* x, int64_t M, float* out, Finish finish) {
    for (int64_t i = 0; i < linear.num_parts; i++) {
        const PanelArgs& part = linear.parts[i];
        float* to = out + part.first;
        const float* other = finish == ADD ? to : finish == GATED ? part.up_bias : nullptr;
        if (part.codes) {
            gm_gemm_codes(part.codes, x, linear.K, M, other, linear.N, to, linear.N, finish);
            continue;
        }
        gm_gemm(x, linear.K, M, linear.K, part.N, part.panels, part.is_bf16, part.bias, other, linear.N, to, linear.N,
            finish);
    }
}

// What of the arguments is another in every layer.
template <class Args>
void go_to_layer(Args& args, const LayersArgs& a, int64_t layer) {
    args.keys = (char*)a.append->keys + layer * a.kv_layer_bytes;
    args.values = (char*)a.append->values + layer * a.kv_layer_bytes;
    if (!a.append->key_scales) return;
    args.key_scales = a.append->key_scales + layer * a.append->num_kv_heads;
    args.value_scales = a.append->value_scales + layer * a.append->num_kv_heads;
}

// Moves the rows that are kept to the front.
void keep_rows(const LayersArgs& a, float* rows, int64_t size) {
    for (int64_t i = 0; i < a.num_kept; i++)
        if (a.kept[i] != i) std::memcpy(rows + i * size, rows + a.kept[i] * size, size * sizeof(float));
}

}  // namespace
}  // namespace gm

// Adds every layer's contribution to x: [num_rows, hidden_size], dense. With `kept` only these rows get the last layer's
// output and MLP, and are x's first ones.
GM_API void gristmill_layers(const gm::LayersArgs* args) {
    using namespace gm;
    const LayersArgs& a = *args;
    AppendArgs append = *a.append;
    AttendArgs attend = *a.attend;
    int64_t num_rows = a.num_rows;
    const auto norm = [&](const float* weight) {
        gm_rms_norm(a.x, a.hidden_size, weight, a.normed, num_rows, a.hidden_size, a.eps, 0, 0);
    };
    for (int64_t i = 0; i < a.num_layers; i++) {
        const LayerArgs& layer = a.layers[i];
        go_to_layer(append, a, i);
        go_to_layer(attend, a, i);
        append.q_norm = layer.q_norm;
        append.k_norm = layer.k_norm;
        norm(layer.input_norm);
        run_linear(layer.qkv, a.normed, num_rows, a.qkv, PLAIN);
        gristmill_append(&append);
        gristmill_attend(&attend);
        if (a.kept && i == a.num_layers - 1) {
            keep_rows(a, a.attended, layer.output.K);
            keep_rows(a, a.x, a.hidden_size);
            num_rows = a.num_kept;
            if (num_rows == 0) return;
        }
        run_linear(layer.output, a.attended, num_rows, a.x, ADD);
        norm(layer.mlp_norm);
        run_linear(layer.gated, a.normed, num_rows, a.inner, GATED);
        run_linear(layer.down, a.inner, num_rows, a.x, ADD);
    }
}
