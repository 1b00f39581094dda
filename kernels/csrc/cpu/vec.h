// Vectors of one instruction set. GCC's vector extensions do the arithmetic, intrinsics what they cannot express.
//
// The file is compiled once per instruction set with BLENDKV_ISA as its namespace. Nothing of the C++ standard library
// is instantiated in these namespaces' objects: the linker would keep one copy of, say, std::max for all of them, and
// that copy may hold instructions that the running CPU does not have.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of GCC 12's own header: its "undefined" vectors are meant to be so
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define BLENDKV_INLINE inline __attribute__((always_inline))

#if defined(__clang__)
#define BLENDKV_SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define BLENDKV_SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

namespace blendkv::BLENDKV_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;  // float lanes of a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));
typedef uint8_t vub __attribute__((vector_size(W)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

template <class T> BLENDKV_INLINE T least(T a, T b) { return b < a ? b : a; }
template <class T> BLENDKV_INLINE T most(T a, T b) { return a < b ? b : a; }
template <class T> BLENDKV_INLINE T round_up(T a, T b) { return (a + b - 1) / b * b; }

template <class V> BLENDKV_INLINE V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof(V));
  return v;
}
template <class V> BLENDKV_INLINE void store(void* to, V v) { memcpy(to, &v, sizeof(V)); }

// Bytes that are written past the caches, a whole line of 64 at a time; what lies in a line's part goes through them.
// Other threads see such stores in order only after a fence (parallel_items has it).
#if defined(__x86_64__)
constexpr bool STREAMS = true;
BLENDKV_INLINE void stream(void* to, const void* from, int64_t bytes) {
  char* place = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  int64_t before = least<int64_t>(bytes, -reinterpret_cast<intptr_t>(place) & 63);
  memcpy(place, source, before);
  int64_t i = before;
  for (; i + 64 <= bytes; i += 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(place + i), load<__m512i>(source + i));
#else
    for (int part = 0; part < 64; part += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(place + i + part), load<__m128i>(source + i + part));
#endif
  }
  memcpy(place + i, source + i, bytes - i);
}
#else
constexpr bool STREAMS = false;
BLENDKV_INLINE void stream(void* to, const void* from, int64_t bytes) { memcpy(to, from, bytes); }
#endif

BLENDKV_INLINE vf splat(float x) { return x - vf{}; }
BLENDKV_INLINE vi splat(int32_t x) { return x - vi{}; }
BLENDKV_INLINE vu splat(uint32_t x) { return x - vu{}; }

BLENDKV_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

template <class M> BLENDKV_INLINE bool any(M mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < W; ++i) found |= mask[i];
  return found != 0;
#endif
}

// ---- Conversions: every float dtype is computed with as float32. GCC takes most of them apart, lane by lane ----

BLENDKV_INLINE vu widen(vh x) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, vu);
#endif
}
BLENDKV_INLINE vh narrow(vu x) {  // of values below 2^16
#if defined(__AVX512F__)
  return (vh)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
  return (vh)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
#else
  return __builtin_convertvector(x, vh);
#endif
}
BLENDKV_INLINE vi widen(vb x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32((__m128i)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x));
#else
  return __builtin_convertvector(x, vi);
#endif
}
BLENDKV_INLINE vu widen(vub x) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)x));
#else
  return __builtin_convertvector(x, vu);
#endif
}

BLENDKV_INLINE vf get(const float* from) { return load<vf>(from); }
BLENDKV_INLINE vf get(const bf16* from) { return (vf)(widen(load<vh>(from)) << 16); }
BLENDKV_INLINE vf get(const fp16* from) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(load<__m128i>(from));
#else
  vu half = widen(load<vh>(from)), magnitude = (half & 0x7fffu) << 13;
  vu exponent = magnitude & (0x1fu << 23);
  vu normal = magnitude + (112u << 23);
  vf tiny = (vf)(magnitude + (113u << 23)) - (vf)splat(113u << 23);
  vu found = exponent == (0x1fu << 23) ? normal + (112u << 23) : normal;
  found = exponent == 0u ? (vu)tiny : found;
  return (vf)(found | (half & 0x8000u) << 16);
#endif
}

BLENDKV_INLINE void put(float* to, vf x) { store(to, x); }
BLENDKV_INLINE void put(bf16* to, vf x) {
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtneps_pbh((__m512)x));
#else
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  store(to, narrow(x == x ? rounded : splat(uint32_t(0x7fc0))));
#endif
}
BLENDKV_INLINE void put(fp16* to, vf x) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  store(to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  vu bits = (vu)x & 0x7fffffffu;
  vf magnitude = (vf)bits;
  vu tiny = (vu)(magnitude + splat(0.5f)) - (vu)splat(0.5f);
  vu found = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  found = magnitude < splat(6.103515625e-5f) ? tiny : found;
  found = magnitude >= splat(65520.0f) ? splat(uint32_t(0x7c00)) : found;
  found = magnitude == magnitude ? found : splat(uint32_t(0x7e00));
  store(to, narrow(found | ((vu)x & 0x80000000u) >> 16));
#endif
}

// Two vectors that lie side by side: of 16-bit values they fill the bytes that one store writes.
struct vf2 {
  vf low, high;
  BLENDKV_INLINE vf2& operator+=(vf2 x) { return low += x.low, high += x.high, *this; }
  BLENDKV_INLINE vf2& operator*=(vf x) { return low *= x, high *= x, *this; }
};
BLENDKV_INLINE vf2 operator+(vf2 a, vf2 b) { return {a.low + b.low, a.high + b.high}; }
BLENDKV_INLINE vf2 operator-(vf2 a, vf2 b) { return {a.low - b.low, a.high - b.high}; }
BLENDKV_INLINE vf2 operator*(vf2 a, vf2 b) { return {a.low * b.low, a.high * b.high}; }
BLENDKV_INLINE vf2 operator*(vf a, vf2 b) { return {a * b.low, a * b.high}; }
template <class T> BLENDKV_INLINE void put(T* to, vf2 x) { put(to, x.low), put(to + W, x.high); }
#if defined(__AVX512BF16__)
BLENDKV_INLINE void put(bf16* to, vf2 x) { store(to, _mm512_cvtne2ps_pbh((__m512)x.high, (__m512)x.low)); }
#endif

// What is left of it in a T.
template <class T> BLENDKV_INLINE vf rounded(vf x) {
  if constexpr (sizeof(T) == 4) return x;
  T row[W];
  put(row, x);
  return get(row);
}
template <class T> BLENDKV_INLINE vf2 rounded(vf2 x) { return {rounded<T>(x.low), rounded<T>(x.high)}; }

// What is left of a row that is no multiple of W long; the other lanes are zero.
template <class T> BLENDKV_INLINE vf get_some(const T* from, int count) {
  T row[W] = {};
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (vf)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
  else store(row, _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), from));
#else
  memcpy(row, from, count * sizeof(T));
#endif
  return get(row);
}
template <class T> BLENDKV_INLINE void put_some(T* to, vf x, int count) {
  T row[W];
  put(row, x);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)x);
  else _mm256_mask_storeu_epi16(to, __mmask16((1u << count) - 1), load<__m256i>(row));
#else
  memcpy(to, row, count * sizeof(T));
#endif
}

// Four rows of four lanes, turned.
BLENDKV_INLINE void transpose4(v4& a, v4& b, v4& c, v4& d) {
  v4 ab0 = BLENDKV_SHUFFLE(i4, a, b, 0, 4, 1, 5), ab1 = BLENDKV_SHUFFLE(i4, a, b, 2, 6, 3, 7);
  v4 cd0 = BLENDKV_SHUFFLE(i4, c, d, 0, 4, 1, 5), cd1 = BLENDKV_SHUFFLE(i4, c, d, 2, 6, 3, 7);
  a = BLENDKV_SHUFFLE(i4, ab0, cd0, 0, 1, 4, 5), b = BLENDKV_SHUFFLE(i4, ab0, cd0, 2, 3, 6, 7);
  c = BLENDKV_SHUFFLE(i4, ab1, cd1, 0, 1, 4, 5), d = BLENDKV_SHUFFLE(i4, ab1, cd1, 2, 3, 6, 7);
}

}  // namespace blendkv::BLENDKV_ISA
