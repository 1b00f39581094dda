// Values of any float type in device memory, as float32: one by one, or the eight of a chunk.
#pragma once

#include "device.cuh"

namespace blendkv {

SHARED_CODE int bytes_of(Type type) { return type == Type::kF32 ? 4 : 2; }

DEVICE float widen(Type type, uint32_t bits) {
  return type == Type::kBf16 ? bits_as_float(bits << 16) : widen_f16(static_cast<uint16_t>(bits));
}

DEVICE float load_one(Type type, const void* data, i64 index) {
  if (type == Type::kF32) return load_once(static_cast<const float*>(data) + index);
  return widen(type, load_once(static_cast<const uint16_t*>(data) + index));
}

// Values index .. index + 7, which start at a multiple of 16 bytes.
DEVICE void load_eight(Type type, const void* data, i64 index, float (&x)[8]) {
  if (type == Type::kF32) {
    const auto* from = reinterpret_cast<const Chunk*>(static_cast<const float*>(data) + index);
    const Chunk low = load_once(from), high = load_once(from + 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = bits_as_float(low.word[i]);
      x[4 + i] = bits_as_float(high.word[i]);
    }
    return;
  }
  const Chunk both = load_once(reinterpret_cast<const Chunk*>(static_cast<const uint16_t*>(data) + index));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = widen(type, both.word[i] & 0xffffu);
    x[2 * i + 1] = widen(type, both.word[i] >> 16);
  }
}

DEVICE void store_one(Type type, void* data, i64 index, float x) {
  if (type == Type::kF32) {
    static_cast<float*>(data)[index] = x;
    return;
  }
  const uint32_t both = type == Type::kBf16 ? pack<Type::kBf16>(x, 0.0f) : pack<Type::kF16>(x, 0.0f);
  static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(both);
}

DEVICE void store_eight(Type type, void* data, i64 index, const float (&x)[8]) {
  if (type == Type::kF32) {
    auto* to = reinterpret_cast<Chunk*>(static_cast<float*>(data) + index);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Chunk chunk;
#pragma unroll
      for (int i = 0; i < 4; ++i) chunk.word[i] = float_as_bits(x[4 * half + i]);
      to[half] = chunk;
    }
    return;
  }
  Chunk chunk;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    chunk.word[i] = type == Type::kBf16 ? pack<Type::kBf16>(x[2 * i], x[2 * i + 1])
                                        : pack<Type::kF16>(x[2 * i], x[2 * i + 1]);
  }
  *reinterpret_cast<Chunk*>(static_cast<uint16_t*>(data) + index) = chunk;
}

}  // namespace blendkv
