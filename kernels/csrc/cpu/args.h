// What Python hands over: one packed struct per op (the formats in kernels/native.py). Addresses are integers, 0 for
// what is absent; strides and sizes count elements; the last dimension of every tensor is contiguous.
#pragma once

#include <cstdint>

namespace blendkv {

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Coding : int64_t { RAW = 0, FP8 = 1, INT8 = 2, TURBO2 = 10, TURBO3 = 11, TURBO4 = 12 };  // turbo: bits + 8

// Keys or values: token t lies at data + block(t) * block_stride + (t % block_size) * token_stride, where block(t) is
// table[t / block_size]; without a table all tokens are of one block.
struct Cache {
  int64_t data, block_stride, token_stride, head_stride;
};

struct Paging {
  int64_t table, table_bytes, block_size;
};

struct AttentionArgs {
  int64_t q, q_stride, q_head_stride, positions, out, lse, sinks;
  Cache k, v;
  Paging paging;
  int64_t deviation, stored_k, stored_k_stride, stored_k_head_stride, stored_v, stored_v_stride, stored_v_head_stride;
  int64_t queries, q_heads, kv_heads, head_dim, v_dim, keys, window, dtype, threads;
  double scale, softcap;
};

struct MassArgs {
  int64_t q, q_stride, q_head_stride, positions, lse, weights, mass, mean;
  Cache k;
  Paging paging;
  int64_t queries, q_heads, kv_heads, head_dim, keys, window, dtype, threads;
  double scale, softcap;
};

// One of K and V. codec: 0 raw, 1 fp8, 2 int8, and the bits per value of turbo codecs plus 8. bias and slope are
// [heads, dim], along is [tokens]: what is added is bias, or bias + along * slope.
struct Moved {
  int64_t source, source_stride, source_head_stride, source_dtype, codec, scale, signs, codebook;
  int64_t out, out_block_stride, out_stride, out_head_stride, out_dtype;
  int64_t bias, slope, along, dim;
};

// cos and sin are one value per rotated dim where pairs are interleaved, else one per pair.
struct ScatterArgs {
  Moved k, v;
  int64_t cos, sin, cos_stride, sin_stride, rotated, offset, interleaved;
  int64_t slots, first_slot, places, block_size, tokens, heads, threads;
};

struct DeviationArgs {
  int64_t k_a, k_a_stride, k_a_head_stride, k_b, k_b_stride, k_b_head_stride;
  int64_t v_a, v_a_stride, v_a_head_stride, v_b, v_b_stride, v_b_head_stride;
  int64_t deviation, tokens, heads, v_heads, k_dim, v_dim, dtype, threads;
};

// x is K or V; data and scale are contiguous. codec as in Moved, raw excepted; signs and codebook of turbo alone.
struct EncodeArgs {
  int64_t x, x_stride, x_head_stride, dtype, codec, data, scale, signs, codebook, tokens, heads, dim, threads;
};

}  // namespace blendkv
