// Rows of K or V as codecs store them, to float32 (kernels/codes.py has the arithmetic in plain torch).
#pragma once

#include "vec.h"

namespace blendkv::BLENDKV_ISA {

constexpr int CODES = 16;          // entries of the largest codebook
constexpr int MOST_CODED = 1024;  // head dim of turbo codes

struct fp8 { uint8_t bits; };

template <class V, class T> BLENDKV_INLINE V load_some(const T* from, int count) {
  V codes = {};
#if defined(__AVX512F__)
  store(&codes, _mm_maskz_loadu_epi8(__mmask16((1u << count) - 1), from));
#else
  memcpy(&codes, from, count);
#endif
  return codes;
}

BLENDKV_INLINE vf value(vb codes) { return __builtin_convertvector(widen(codes), vf); }
BLENDKV_INLINE vf get(const int8_t* from) { return value(load<vb>(from)); }
BLENDKV_INLINE vf get_some(const int8_t* from, int count) { return value(load_some<vb>(from, count)); }

// e4m3: the exponent is moved to float32's place and raised by 127 - 7; subnormals are taken from the next binade.
BLENDKV_INLINE vf value(vub codes) {
  vu code = widen(codes), magnitude = (code & 0x7fu) << 20;
  vf tiny = (vf)(magnitude + (121u << 23)) - splat(0.015625f);
  vu found = (code & 0x78u) == 0u ? (vu)tiny : magnitude + (120u << 23);
  found = (code & 0x7fu) == 0x7fu ? splat(uint32_t(0x7fc00000)) : found;
  return (vf)(found | (code & 0x80u) << 24);
}
BLENDKV_INLINE vf get(const fp8* from) { return value(load<vub>(from)); }
BLENDKV_INLINE vf get_some(const fp8* from, int count) { return value(load_some<vub>(from, count)); }

BLENDKV_INLINE vf look_up(const float* codebook, vu index) {
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(codebook));
#elif defined(__AVX2__)
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(codebook), (__m256i)index);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(codebook + 8), (__m256i)index);
  return (vf)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#else
  vf found = {};
  for (int i = 0; i < W; ++i) found[i] = codebook[index[i]];
  return found;
#endif
}

// W indices from `bits` bits each, the first of them a multiple of 4: 8 indices fill `bits` bytes.
template <int BITS> BLENDKV_INLINE vu unpack(const uint8_t* from, int first) {
  vu words = {}, shifts = {};
  constexpr uint32_t mask = (1u << BITS) - 1;
  for (int lane = 0; lane < W; ++lane) shifts[lane] = uint32_t(lane % 8 * BITS);
#if defined(__AVX512F__)
  uint32_t low, high;
  memcpy(&low, from + first / 8 * BITS, 4), memcpy(&high, from + (first / 8 + 1) * BITS, 4);
  words = (vu)_mm512_inserti64x4(_mm512_set1_epi32(int(low)), _mm256_set1_epi32(int(high)), 1);
#else
  uint32_t word;
  memcpy(&word, from + first / 8 * BITS, 4);
  words = splat(word >> first % 8 * BITS);
#endif
  return (words >> shifts) & mask;
}

// Lane i of the result is x[i xor STEP].
template <int STEP> BLENDKV_INLINE vf swap_lanes(vf x) {
#if defined(__AVX512F__)
  if constexpr (STEP == 1) return (vf)_mm512_permute_ps((__m512)x, 0xb1);
  else if constexpr (STEP == 2) return (vf)_mm512_permute_ps((__m512)x, 0x4e);
  else if constexpr (STEP == 4) return (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xb1);
  else return (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4e);
#elif defined(__AVX2__)
  if constexpr (STEP == 1) return (vf)_mm256_permute_ps((__m256)x, 0xb1);
  else if constexpr (STEP == 2) return (vf)_mm256_permute_ps((__m256)x, 0x4e);
  else return (vf)_mm256_permute2f128_ps((__m256)x, (__m256)x, 1);
#else
  if constexpr (STEP == 1) return BLENDKV_SHUFFLE(i4, x, x, 1, 0, 3, 2);
  else return BLENDKV_SHUFFLE(i4, x, x, 2, 3, 0, 1);
#endif
}

// Butterflies between lanes STEP apart: a, b become a + b, a - b.
template <int STEP> BLENDKV_INLINE vf butterfly(vf x) {
  vf sign = {};
  for (int lane = 0; lane < W; ++lane) sign[lane] = lane & STEP ? -1.0f : 1.0f;
  return x * sign + swap_lanes<STEP>(x);
}
template <int STEP> BLENDKV_INLINE vf within(vf x, int block) {
  if constexpr (STEP < W) return block > STEP ? within<2 * STEP>(butterfly<STEP>(x), block) : x;
  else return x;
}

// One block of VECTORS vectors, in registers; Hadamard transforms are not normalised.
template <int BITS, int VECTORS>
BLENDKV_INLINE void turbo_block(float* to, const uint8_t* codes, int first, const float* codebook, const float* signs,
                                float scale) {
  vf x[VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < VECTORS; ++i) x[i] = within<1>(look_up(codebook, unpack<BITS>(codes, first + i * W)), W);
#pragma GCC unroll 8
  for (int step = 1; step < VECTORS; step *= 2)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i)
      if (!(i & step)) {
        vf a = x[i], b = x[i + step];
        x[i] = a + b, x[i + step] = a - b;
      }
#pragma GCC unroll 8
  for (int i = 0; i < VECTORS; ++i) store(to + first + i * W, x[i] * splat(scale) * load<vf>(signs + first + i * W));
}

// Blocks narrower than a vector, several side by side, or wider than the registers hold.
template <int BITS>
inline void turbo_other(float* to, const uint8_t* codes, int dim, const float* codebook, const float* signs,
                        const float* scales, int block) {
  for (int i = 0; i < dim; i += W) store(to + i, within<1>(look_up(codebook, unpack<BITS>(codes, i)), block));
  for (int first = 0; first < dim; first += block)
    for (int step = W; step < block; step *= 2)
      for (int i = first; i < first + block; i += W)
        if (!((i - first) & step)) {
          vf a = load<vf>(to + i), b = load<vf>(to + i + step);
          store(to + i, a + b), store(to + i + step, a - b);
        }
  float norm = 1.0f / __builtin_sqrtf(float(block));
  for (int i = 0; i < dim; ++i) to[i] *= scales[i / block] * norm * signs[i];
}

// A row of turbo codes. `codes` can be read 16 bytes beyond its end, `codebook` has CODES entries.
template <int BITS>
inline void decode_turbo(float* to, const uint8_t* codes, int dim, const float* codebook, const float* signs,
                         const float* scales) {
  int block = dim & -dim;
  float norm = 1.0f / __builtin_sqrtf(float(block));
  if (block != W && block != 2 * W && block != 4 * W && block != 8 * W)
    return turbo_other<BITS>(to, codes, dim, codebook, signs, scales, block);
  for (int first = 0, i = 0; first < dim; first += block, ++i) {
    float scale = scales[i] * norm;
    if (block == W) turbo_block<BITS, 1>(to, codes, first, codebook, signs, scale);
    else if (block == 2 * W) turbo_block<BITS, 2>(to, codes, first, codebook, signs, scale);
    else if (block == 4 * W) turbo_block<BITS, 4>(to, codes, first, codebook, signs, scale);
    else turbo_block<BITS, 8>(to, codes, first, codebook, signs, scale);
  }
}

}  // namespace blendkv::BLENDKV_ISA
