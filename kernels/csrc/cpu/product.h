// The two matrix products of attention, with one lane per row: a row is a query of one head.
//
// A word is what one lane multiplies in one instruction: a float32, or a pair of bfloat16. Scores are
// S[key][row] += K[key][word] * Q[word][row], outputs O[dim][row] += V[key word][dim] * P[key word][row]. K and V are
// broadcast from memory as they lie there, and the softmax needs no sums across lanes.
#pragma once

#include "functions.h"

namespace blendkv::BLENDKV_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int RV = 3, KB = 8, DB = 8;  // of 32 registers: RV x KB accumulators, RV rows, a broadcast value
#elif defined(__AVX2__)
constexpr int RV = 3, KB = 4, DB = 4;
#else
constexpr int RV = 2, KB = 4, DB = 4;
#endif
constexpr int N = 64;         // keys of a tile
constexpr int ROWS = RV * W;  // rows of a block

// Keys and dims that one call of a product takes: with few rows, more of them keep as many sums in flight.
template <int R> constexpr int KEYS_AT_ONCE = R == 1 ? 2 * KB : KB;
template <int R> constexpr int DIMS_AT_ONCE = R == 1 ? 2 * DB : DB;

struct Single {
  static constexpr int VALUES = 1, DEGREE = 6, CHAIN = 32;
  static BLENDKV_INLINE vf multiply(vf sum, vu a, vu b) { return sum + (vf)a * (vf)b; }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int VALUES = 2, DEGREE = 3, CHAIN = 1 << 20;
  static BLENDKV_INLINE vf multiply(vf sum, vu a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static BLENDKV_INLINE vu join(vf first, vf second) {
    alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (vu)_mm512_permutexvar_epi16(_mm512_load_si512(order), both);
  }
};
#endif

// Scores of KEYS keys and R x W rows; `each(key, vector of rows, scores)` takes them. At most M::CHAIN words are summed
// at a time, because rounding errors grow with the length of a chain of additions.
template <class M, int KEYS, int R, int STRIDE, class Each>
BLENDKV_INLINE void score_block(const uint32_t* k, const uint32_t* q, int words, Each&& each) {
  vf whole[KEYS][R] = {}, sum[KEYS][R] = {};
  for (int from = 0; from < words; from += M::CHAIN) {
    int to = least(words, from + M::CHAIN);
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; ++j)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[j][r] = vf{};
    for (int word = from; word < to; ++word) {
      vu rows[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) rows[r] = load<vu>(q + (word * R + r) * W);
#pragma GCC unroll 16
      for (int j = 0; j < KEYS; ++j) {
        vu key = splat(k[j * STRIDE + word]);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[j][r] = M::multiply(sum[j][r], key, rows[r]);
      }
    }
    if (words <= M::CHAIN) break;
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; ++j)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[j][r] = whole[j][r] += sum[j][r];
  }
#pragma GCC unroll 16
  for (int j = 0; j < KEYS; ++j)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) each(j, r, sum[j][r]);
}

// Scores of `keys` keys, rounded up to KEYS_AT_ONCE; the rows of K are STRIDE words apart. `between` is called between
// the groups of keys.
template <class M, int R, int STRIDE, class Each, class Between>
BLENDKV_INLINE void scores_strided(const uint32_t* k, const uint32_t* q, int words, int keys, Each&& each,
                                   Between&& between) {
  constexpr int keys_at_once = KEYS_AT_ONCE<R>;
  for (int j0 = 0; j0 < keys; j0 += keys_at_once) {
    between();
    score_block<M, keys_at_once, R, STRIDE>(k + j0 * STRIDE, q, words,
                                            [&](int j, int r, vf sum) { each(j0 + j, r, sum); });
  }
}

// Rows of K lie as far apart as the least of these strides that holds a row, so that offsets are known when compiling.
inline int stride_of(int words) { return words <= 32 ? 32 : words <= 64 ? 64 : words <= 128 ? 128 : 256; }

template <class M, int R, class Each, class Between>
BLENDKV_INLINE void scores(const uint32_t* k, const uint32_t* q, int words, int keys, Each&& each, Between&& between) {
  switch (stride_of(words)) {
    case 32: return scores_strided<M, R, 32>(k, q, words, keys, each, between);
    case 64: return scores_strided<M, R, 64>(k, q, words, keys, each, between);
    case 128: return scores_strided<M, R, 128>(k, q, words, keys, each, between);
    default: return scores_strided<M, R, 256>(k, q, words, keys, each, between);
  }
}

// Adds to outputs `out[dim][R x W]` of `dims` dims, a multiple of DIMS_AT_ONCE, what `words` words of keys give; the
// rows of `p` are p_stride apart.
template <class M, int R, class Between>
inline void outputs(const uint32_t* v, int64_t v_stride, const uint32_t* p, int p_stride, int words, int dims,
                    float* out, Between&& between) {
  constexpr int at_once = DIMS_AT_ONCE<R>;
  for (int d0 = 0; d0 < dims; d0 += at_once) {
    between();
    vf sum[at_once][R];
#pragma GCC unroll 16
    for (int i = 0; i < at_once; ++i)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[i][r] = vf{};
    const uint32_t* column = v + d0;
    const uint32_t* weights = p;
    for (int word = 0; word < words; ++word, column += v_stride, weights += p_stride) {
      vu rows[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) rows[r] = load<vu>(weights + r * W);
#pragma GCC unroll 16
      for (int i = 0; i < at_once; ++i) {
        vu value = splat(column[i]);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[i][r] = M::multiply(sum[i][r], value, rows[r]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < at_once; ++i)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        float* at = out + ((d0 + i) * R + r) * W;
        store(at, load<vf>(at) + sum[i][r]);
      }
  }
}

}  // namespace blendkv::BLENDKV_ISA
