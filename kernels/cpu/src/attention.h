// What attention.cpp and append.cpp share with kernels/cpu/paged.py: the layout of the KV storage and the arguments of
// a call. The Python file mirrors the arguments field by field.
#pragma once

#include <cstdint>

namespace gm {

constexpr int BLOCK = 16;     // tokens in a KV block
constexpr int MAX_DIM = 256;  // of a head

// Types of keys and values in the storage.
enum KvType : int64_t { KV_FLOAT32, KV_BFLOAT16, KV_E4M3 };

// Keys of a block lie transposed, [head_dim][16], values as [16][head_dim]: both are then panels of a matrix product's
// right side, read in rows of 16 columns. In bfloat16 two neighbouring rows are interleaved, [head_dim / 2][16][2] and
// [8][head_dim][2], which is what the dot-product instructions take. Storage is [num_blocks][num_layers][kv_heads] of such
// blocks: a block's parts lie together, so memory is taken in the measure in which blocks are used. An e4m3 code times the
// scale of its layer and KV head is a key or value.

// Rows row_begin:row_end of the step see num_keys keys from token first_key on, in blocks of sequence `sequence`.
struct Segment {
    int32_t row_begin, row_end, sequence, first_key, num_keys;
};

struct AttendArgs {
    const void* qkv;  // [num_rows, qkv_stride] in the type of activations; the heads' queries come first
    void* out;        // [num_rows, num_heads * head_dim]
    const void *keys, *values;  // of the layer in block 0; block_stride elements lie between blocks
    const int32_t* block_tables;  // [num_sequences, table_stride]
    const int32_t* positions;     // [num_rows], of each row's token in its sequence
    const int32_t* tile_starts;   // [num_tiles + 1], the rows of each tile
    const int32_t* tile_order;    // [num_tiles], the costly ones first
    const int32_t* segment_starts;  // [num_tiles + 1], into segments
    const Segment* segments;
    const float *key_scales, *value_scales;  // of the layer, [num_kv_heads]; for KV_E4M3 only
    int64_t num_tiles, table_stride, qkv_stride, block_stride, num_heads, num_kv_heads, head_dim;
    int64_t window;  // keys a row sees up to its own; 0: all
    int64_t qkv_is_bf16, kv_type;
    float scale;
};

struct AppendArgs {
    void* qkv;  // [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], in place
    void *keys, *values;
    const float *cos, *sin;   // [num_positions, head_dim / 2]
    const int64_t* positions;  // [num_tokens]
    const int64_t* slots;      // [num_tokens], block * BLOCK + offset
    const float *q_norm, *k_norm;  // [head_dim] or null
    const float *key_scales, *value_scales;  // of the layer, [num_kv_heads]; for KV_E4M3 only
    int64_t num_tokens, block_stride, num_heads, num_kv_heads, head_dim;
    int64_t qkv_is_bf16, kv_type;
    float eps;
};

}  // namespace gm
