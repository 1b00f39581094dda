// kv_deviation: a warp per token sums the squared differences of its K and V (CacheBlend, arXiv 2405.16444).
#include "values.cuh"

namespace blendkv {

// Mirrored by kernels/deviation/cuda.py. No heads: that side does not count.
struct DeviationArgs {
  const void *k_a, *k_b, *v_a, *v_b;
  float* out;
  i64 tokens, k_heads, k_dim, v_dim, v_heads;
  i64 k_a_row, k_a_head, k_b_row, k_b_head, v_a_row, v_a_head, v_b_row, v_b_head;  // strides in elements
  Type type;
  i64 chunked;  // vectors start at multiples of 16 bytes and are multiples of 8 values
};

DEVICE float difference(const DeviationArgs& args, const void* a, i64 a_at, i64 a_head, const void* b, i64 b_at,
                        i64 b_head, int heads, int dim) {
  const int lane = thread_index() % kWarp;
  float sum = 0.0f;
  if (args.chunked != 0) {
    const int chunks = dim / 8;
    for (int i = lane; i < heads * chunks; i += kWarp) {
      const int head = i / chunks, value = i % chunks * 8;
      float x[8], y[8];
      load_eight(args.type, a, a_at + head * a_head + value, x);
      load_eight(args.type, b, b_at + head * b_head + value, y);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(x[e] - y[e], x[e] - y[e], sum);
    }
    return sum;
  }
  for (int i = lane; i < heads * dim; i += kWarp) {
    const int head = i / dim, value = i % dim;
    const float x = load_one(args.type, a, a_at + head * a_head + value);
    const float y = load_one(args.type, b, b_at + head * b_head + value);
    sum = fmaf(x - y, x - y, sum);
  }
  return sum;
}

KERNEL(128, 4) deviation_kernel(GRID_CONSTANT const DeviationArgs args) {
  const i64 token = static_cast<i64>(block_x()) * 4 + thread_index() / kWarp;
  if (token >= args.tokens) return;
  float sum = difference(args, args.k_a, token * args.k_a_row, args.k_a_head, args.k_b, token * args.k_b_row,
                         args.k_b_head, static_cast<int>(args.k_heads), static_cast<int>(args.k_dim));
  sum += difference(args, args.v_a, token * args.v_a_row, args.v_a_head, args.v_b, token * args.v_b_row,
                    args.v_b_head, static_cast<int>(args.v_heads), static_cast<int>(args.v_dim));
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (thread_index() % kWarp == 0) args.out[token] = sum;
}

}  // namespace blendkv

EXPORT int blendkv_cuda_deviation(const blendkv::DeviationArgs* args, void* stream) {
  return blendkv::launch(blendkv::deviation_kernel, {static_cast<unsigned>((args->tokens + 3) / 4), 1}, 128, 0, stream,
                         *args);
}
