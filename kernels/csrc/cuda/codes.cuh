// The codecs of stored K and V (kernels/codes.py), eight values of a vector at a time, one lane each.
#pragma once

#include "values.cuh"

namespace blendkv {

enum class Codec : i64 { kRaw = 0, kFp8 = 1, kInt8 = 2, kTurbo2 = 12, kTurbo3 = 13, kTurbo4 = 14 };

SHARED_CODE bool is_turbo(Codec codec) { return codec >= Codec::kTurbo2; }
SHARED_CODE int turbo_bits(Codec codec) { return static_cast<int>(codec) - 10; }

// e4m3: its exponent and mantissa as a float's, which are then 2^120 too small; exact for subnormals too.
DEVICE float from_e4m3(uint32_t byte) {
  if ((byte & 0x7fu) == 0x7fu) return bits_as_float(0x7fc00000u);
  const float magnitude = bits_as_float((byte & 0x7fu) << 20) * bits_as_float(0x7b800000u);  // 2^120
  return (byte & 0x80u) != 0 ? -magnitude : magnitude;
}

DEVICE float from_int8(uint32_t byte) { return static_cast<float>(static_cast<int8_t>(byte)); }

// Index `i` of eight that are packed from the lowest bit on.
SHARED_CODE uint32_t packed_index(uint32_t word, int i, int bits) { return (word >> (i * bits)) & ((1u << bits) - 1u); }

// Eight bytes of a vector, each a value before its scale.
DEVICE void load_bytes(Codec codec, const uint8_t* from, float (&x)[8]) {
  const HalfChunk bytes = load_once(reinterpret_cast<const HalfChunk*>(from));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t byte = (bytes.word[i / 4] >> (8 * (i % 4))) & 0xffu;
    x[i] = codec == Codec::kFp8 ? from_e4m3(byte) : from_int8(byte);
  }
}

// Eight values of the codebook; they lie in `bits` bytes.
DEVICE void load_indices(int bits, const uint8_t* from, const float* codebook, float (&x)[8]) {
  uint32_t word = 0;
  for (int b = 0; b < bits; ++b) word |= static_cast<uint32_t>(load_once(from + b)) << (8 * b);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = load_once(codebook + packed_index(word, i, bits));
}

// Multiply blocks of `width` values, spread over neighbouring lanes, by the Hadamard matrix: steps below 8 between a
// lane's own values, the others between lanes. All lanes of the warp take part.
DEVICE void hadamard(float (&x)[8], int width, int lane) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & step) != 0) continue;
      const float a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
  for (int mask = 1; 8 * mask < width; mask *= 2) {
    const bool second = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = shuffle_xor(x[i], mask);
      x[i] = second ? other - x[i] : x[i] + other;
    }
  }
}

}  // namespace blendkv
