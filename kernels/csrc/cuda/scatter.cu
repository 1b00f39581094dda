// rope_shift_scatter: decode stored K and V, add the shift, rotate K (RoFormer, arXiv 2104.09864), write both in place.
//
// A lane holds eight values of one token and head from the load to the store, 16 bytes of 16-bit values each way; what
// a value's partner in the rotation or in the Hadamard matrix holds comes from another lane by shuffles. Shapes that do
// not go by eights take a kernel with a thread per value, which reads a rotated value's partner again.
#include "codes.cuh"

namespace blendkv {

// K or V, mirrored by kernels/scatter/cuda.py. Strides in elements; `row`, `head` and `value` of raw sources alone.
struct Side {
  const void* data;
  const float *scale, *signs, *codebook;
  const float *bias, *slope, *along;  // [heads, dim] twice, [tokens]; slope null: bias alone
  void* out;
  i64 dim, row, head, value, width, out_block, out_row, out_head, out_value;  // width: of the Hadamard matrix
  Codec codec;
  Type type, out_type;
};

struct ScatterArgs {
  Side k, v;
  const float *cos, *sin;  // [tokens, rotated]; null: no rotation
  const i64* slots;        // null: first, first + 1, ...
  i64 first, tokens, heads, block_size;  // block_size 0: contiguous output
  i64 rotated, offset, interleaved;
};

DEVICE i64 place_of(const ScatterArgs& args, const Side& side, i64 slot, int head) {
  i64 found = head * side.out_head;
  if (args.block_size == 0) return found + slot * side.out_row;
  const auto own = static_cast<unsigned>(slot), size = static_cast<unsigned>(args.block_size);
  return found + static_cast<i64>(own / size) * side.out_block + static_cast<i64>(own % size) * side.out_row;
}

DEVICE void load_floats(const float* from, float (&x)[8]) { load_eight(Type::kF32, from, 0, x); }

// Rotate: the partners lie in another lane, or beside each other in this one.
DEVICE void rotate(const ScatterArgs& args, bool active, int token, int value, int lane, float (&x)[8]) {
  const int rotated = static_cast<int>(args.rotated), own = value - static_cast<int>(args.offset);
  const bool turned = active && own >= 0 && own < rotated;
  int from = lane;
  if (turned && args.interleaved == 0) from = own < rotated / 2 ? lane + rotated / 16 : lane - rotated / 16;
  float partner[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) partner[i] = args.interleaved != 0 ? x[i ^ 1] : shuffle_from(x[i], from);
  if (!turned) return;
  float cos[8], sin[8];
  load_floats(args.cos + static_cast<i64>(token) * rotated + own, cos);
  load_floats(args.sin + static_cast<i64>(token) * rotated + own, sin);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = fmaf(partner[i], sin[i], x[i] * cos[i]);
}

KERNEL(128, 10) scatter_chunks(GRID_CONSTANT const ScatterArgs args) {
  const bool is_k = block_y() == 0;
  const Side& side = is_k ? args.k : args.v;
  const int lane = thread_index() % kWarp, heads = static_cast<int>(args.heads);
  const int chunks = static_cast<int>(side.dim) / 8, vectors = kWarp / chunks;  // of a vector; of a warp
  const int vector = (static_cast<int>(block_x()) * 4 + thread_index() / kWarp) * vectors + lane / chunks;
  const bool active = lane < vectors * chunks && vector < static_cast<int>(args.tokens) * heads;
  const int token = active ? vector / heads : 0, head = active ? vector % heads : 0;
  const int value = lane % chunks * 8;
  const i64 slot = !active ? -1 : args.slots != nullptr ? args.slots[token] : args.first + token;

  float x[8] = {};
  const i64 index = static_cast<i64>(token) * heads + head;
  if (side.codec == Codec::kRaw) {
    if (slot >= 0) load_eight(side.type, side.data, token * side.row + head * side.head + value, x);
  } else {
    const auto* bytes = static_cast<const uint8_t*>(side.data);
    float scale = 0.0f;
    if (is_turbo(side.codec)) {
      const int bits = turbo_bits(side.codec), width = static_cast<int>(side.width);
      if (slot >= 0) {
        load_indices(bits, bytes + index * side.dim * bits / 8 + value / 8 * bits, side.codebook, x);
        scale = load_once(side.scale + index * (static_cast<int>(side.dim) / width) + value / width);
      }
      hadamard(x, width, lane);
      float signs[8];
      load_floats(side.signs + value, signs);
      scale = divide_fast(scale, sqrtf(static_cast<float>(width)));
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= signs[i] * scale;
    } else if (slot >= 0) {
      load_bytes(side.codec, bytes + index * side.dim + value, x);
      scale = load_once(side.scale + index);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= scale;
    }
  }
  if (side.bias != nullptr && slot >= 0) {
    float bias[8];
    load_floats(side.bias + head * side.dim + value, bias);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += bias[i];
    if (side.slope != nullptr) {
      load_floats(side.slope + head * side.dim + value, bias);
      const float along = load_once(side.along + token);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = fmaf(along, bias[i], x[i]);
    }
  }
  if (is_k && args.cos != nullptr) rotate(args, slot >= 0, token, value, lane, x);
  if (slot >= 0) store_eight(side.out_type, side.out, place_of(args, side, slot, head) + value, x);
}

// A value with its shift; not for turbo.
DEVICE float decode_one(const ScatterArgs& args, const Side& side, int token, int head, int value) {
  const i64 index = static_cast<i64>(token) * args.heads + head;
  float x;
  if (side.codec == Codec::kRaw) {
    x = load_one(side.type, side.data, token * side.row + head * side.head + value * side.value);
  } else {
    const uint32_t byte = load_once(static_cast<const uint8_t*>(side.data) + index * side.dim + value);
    x = (side.codec == Codec::kFp8 ? from_e4m3(byte) : from_int8(byte)) * side.scale[index];
  }
  if (side.bias == nullptr) return x;
  x += side.bias[head * side.dim + value];
  return side.slope == nullptr ? x : fmaf(side.along[token], side.slope[head * side.dim + value], x);
}

SHARED_CODE int partner_of(int own, int rotated, bool interleaved) {
  if (interleaved) return own ^ 1;
  return own < rotated / 2 ? own + rotated / 2 : own - rotated / 2;
}

KERNEL(128, 8) scatter_values(GRID_CONSTANT const ScatterArgs args) {
  const bool is_k = block_y() == 0;
  const Side& side = is_k ? args.k : args.v;
  const i64 index = static_cast<i64>(block_x()) * 128 + thread_index();
  if (index >= args.tokens * args.heads * side.dim) return;
  const int value = static_cast<int>(index % side.dim);
  const int head = static_cast<int>(index / side.dim % args.heads);
  const int token = static_cast<int>(index / side.dim / args.heads);
  const i64 slot = args.slots != nullptr ? args.slots[token] : args.first + token;
  if (slot < 0) return;
  float x = decode_one(args, side, token, head, value);
  const int rotated = static_cast<int>(args.rotated), offset = static_cast<int>(args.offset), own = value - offset;
  if (is_k && args.cos != nullptr && own >= 0 && own < rotated) {
    const float other = decode_one(args, side, token, head, offset + partner_of(own, rotated, args.interleaved != 0));
    const i64 at = static_cast<i64>(token) * rotated + own;
    x = fmaf(other, args.sin[at], x * args.cos[at]);
  }
  store_one(side.out_type, side.out, place_of(args, side, slot, head) + value * side.out_value, x);
}

}  // namespace blendkv

EXPORT int blendkv_cuda_scatter_chunks(const blendkv::ScatterArgs* args, void* stream) {
  const auto blocks = [&](blendkv::i64 dim) {
    const blendkv::i64 vectors = 4 * (blendkv::kWarp / (dim / 8));
    return (args->tokens * args->heads + vectors - 1) / vectors;
  };
  const blendkv::i64 k = blocks(args->k.dim), v = blocks(args->v.dim);
  return blendkv::launch(blendkv::scatter_chunks, {static_cast<unsigned>(k > v ? k : v), 2}, 128, 0, stream, *args);
}

EXPORT int blendkv_cuda_scatter_values(const blendkv::ScatterArgs* args, void* stream) {
  const blendkv::i64 dim = args->k.dim > args->v.dim ? args->k.dim : args->v.dim;
  const blendkv::i64 values = args->tokens * args->heads * dim;
  return blendkv::launch(blendkv::scatter_values, {static_cast<unsigned>((values + 127) / 128), 2}, 128, 0, stream,
                         *args);
}
