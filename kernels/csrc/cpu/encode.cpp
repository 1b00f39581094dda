// encode: vectors of K or V to codes and scales (kernels/codes.py has the arithmetic in plain torch). Compiled without
// contraction into fused products, so that every instruction set makes the reference's bytes. Sums fold the upper half
// of what they sum onto the lower, which vectors of any width can do.
#include "args.h"
#include "codecs.h"
#include "parallel.h"

namespace blendkv::BLENDKV_ISA {
namespace {

constexpr uint32_t INFINITE = 0x7f800000u;
constexpr float SAFE_LOW = 1e-15f, SAFE_HIGH = 1e15f;  // magnitudes whose squares float32 holds
constexpr float TINY = 1.17549435e-38f;                // its smallest normal number
constexpr int64_t PACKED = 2048;  // values, of whole tokens, that are encoded at once: all is in the first cache

BLENDKV_INLINE float number(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

BLENDKV_INLINE vub narrow_bytes(vu x) {  // of values below 256
#if defined(__AVX512F__)
  return (vub)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
  __m128i half = (__m128i)narrow(x), bytes = _mm_packus_epi16(half, half);
  return load<vub>(&bytes);
#else
  return __builtin_convertvector(x, vub);
#endif
}
BLENDKV_INLINE void put_bytes(void* to, vu x, int count) {
  vub bytes = narrow_bytes(x);
  memcpy(to, &bytes, count);
}

// Bits of the largest magnitude: as integers they are ordered as the numbers are, and NaN is above them all.
BLENDKV_INLINE uint32_t highest(vi x) {
#if defined(__AVX512F__)
  return uint32_t(_mm512_reduce_max_epi32((__m512i)x));
#else
  int32_t found = 0;
  for (int i = 0; i < W; ++i) found = most(found, x[i]);
  return uint32_t(found);
#endif
}
BLENDKV_INLINE vi larger(vi a, vi b) {
#if defined(__AVX512F__)
  return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}
template <class T> BLENDKV_INLINE uint32_t top_of(const T* row, int dim) {
  vi top = {};
  int i = 0;
  for (; i + W <= dim; i += W) top = larger(top, (vi)get(row + i) & 0x7fffffff);
  if (i < dim) top = larger(top, (vi)get_some(row + i, dim - i) & 0x7fffffff);
  return highest(top);
}

// e4m3, rounded to nearest even, of magnitudes below 464: subnormals by an addition that leaves them in the low bits.
BLENDKV_INLINE vu e4m3(vf x) {
  vu magnitude = (vu)x & 0x7fffffffu;
  vu tiny = (vu)((vf)magnitude + splat(16384.0f)) - (141u << 23);
  vu usual = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  return (magnitude < (121u << 23) ? tiny : usual) | ((vu)x >> 24 & 0x80u);
}
// Of magnitudes that round to 127 at most: adding 1.5 * 2^23 leaves the nearest integer in the low bits.
BLENDKV_INLINE vu nearest_integer(vf x) { return (vu)(x + splat(12582912.0f)) & 0xffu; }

template <bool FLOAT, class T> inline float scaled(const T* row, uint8_t* codes, int dim) {
  uint32_t bits = top_of(row, dim);
  if (bits >= INFINITE) return memset(codes, 0, dim), __builtin_nanf("");
  float scale = number(bits) / (FLOAT ? 448.0f : 127.0f);
  vf divisor = splat(most(scale, TINY));
  auto code = [&](vf x) __attribute__((always_inline)) {
    return FLOAT ? e4m3(x / divisor) : nearest_integer(x / divisor);
  };
  int i = 0;
  for (; i + W <= dim; i += W) put_bytes(codes + i, code(get(row + i)), W);
  if (i < dim) put_bytes(codes + i, code(get_some(row + i, dim - i)), dim - i);
  return scale;
}

// Entry i of eight.
BLENDKV_INLINE vf pick(const float* eight, vu index) {
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps((__m512i)index, _mm512_castps256_ps512(_mm256_loadu_ps(eight)));
#elif defined(__AVX2__)
  return (vf)_mm256_permutevar8x32_ps(_mm256_loadu_ps(eight), (__m256i)index);
#else
  vf found = {};
  for (int i = 0; i < W; ++i) found[i] = eight[index[i]];
  return found;
#endif
}

// The positive half of a codebook, and the bounds between its entries as a binary search asks for them.
template <int BITS> struct Book {
  static constexpr uint32_t half = 1u << (BITS - 1);
  float centroids[8] = {}, first, seconds[8] = {}, thirds[8] = {};

  explicit Book(const float* codebook) {
    float bounds[8] = {};
    for (uint32_t i = 0; i < half; ++i) centroids[i] = codebook[half + i];
    for (uint32_t i = 0; i + 1 < half; ++i) bounds[i] = (centroids[i] + centroids[i + 1]) / 2;
    first = bounds[half / 2 - 1];
    for (uint32_t i = 0; i < half; ++i) {
      if (BITS == 3) seconds[i] = bounds[i];
      if (BITS == 4) seconds[i] = bounds[least(i + 1, half - 2)], thirds[i] = bounds[i];
    }
  }

  BLENDKV_INLINE vu nearest(vf magnitude) const {
    vu place = magnitude > splat(first) ? splat(half / 2) : vu{};
    if constexpr (BITS >= 3) place |= magnitude > pick(seconds, place) ? splat(half / 4) : vu{};
    if constexpr (BITS >= 4) place |= magnitude > pick(thirds, place) ? splat(half / 8) : vu{};
    return place;
  }
};

// Upper lanes are added to lower ones until one is left.
BLENDKV_INLINE float folded(vf x) {
#if defined(__AVX512F__)
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#elif defined(__AVX2__)
  __m256 eight = (__m256)x;
#endif
#if defined(__AVX2__)
  v4 four = (v4)_mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#else
  v4 four = (v4)x;
#endif
  return (four[0] + four[2]) + (four[1] + four[3]);
}
template <int VECTORS> BLENDKV_INLINE float folded(vf* x, int vectors) {
#pragma GCC unroll 4
  for (int n = (VECTORS ? VECTORS : vectors) / 2; n; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) x[i] += x[i + n];
  return folded(x[0]);
}

// A block of LANES lanes of one vector, of VECTORS vectors, or of `vectors` where VECTORS is 0.
template <int VECTORS, int LANES> struct Block {
  static constexpr int ROOM = VECTORS ? VECTORS : MOST_CODED / W;
  int count;

  explicit Block(int block) : count(VECTORS ? VECTORS : block / W) {}
  BLENDKV_INLINE int vectors() const { return VECTORS ? VECTORS : count; }
  BLENDKV_INLINE float size() const { return float(vectors() * LANES); }

  // Its values under the signs and the Hadamard matrix; returns their root mean square. Writes whole vectors.
  template <class T> BLENDKV_INLINE float turn(const T* from, const float* signs, float* to) const {
    const int n = vectors();
    vf x[ROOM];
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
      if constexpr (LANES < W) x[i] = within<1>(get_some(from, LANES) * get_some(signs, LANES), LANES);
      else x[i] = within<1>(get(from + i * W) * get(signs + i * W), W);
    }
#pragma GCC unroll 4
    for (int step = 1; step < n; step *= 2)
#pragma GCC unroll 8
      for (int i = 0; i < n; ++i)
        if (!(i & step)) {
          vf a = x[i], b = x[i + step];
          x[i] = a + b, x[i + step] = a - b;
        }
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) store(to + i * W, x[i]), x[i] *= x[i];
    return __builtin_sqrtf(folded<VECTORS>(x, n) / size());
  }

  // Indices, a byte each, of what was turned, times `inverse`; returns the factor with which the centroids fit best.
  template <int BITS>
  BLENDKV_INLINE float quantise(const float* from, float inverse, uint8_t* index, const Book<BITS>& book) const {
    const int n = vectors();
    vf sums[ROOM], energies[ROOM];
    vi used = {};
    for (int lane = 0; lane < W; ++lane) used[lane] = lane < LANES ? -1 : 0;
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
      vf normal = get(from + i * W) * splat(inverse), magnitude = (vf)((vu)normal & 0x7fffffffu);
      vu place = book.nearest(magnitude);
      vf centroid = pick(book.centroids, place);
      if constexpr (LANES < W) {  // the other lanes hold the next block, to which this one's scale may be infinite
        centroid = (vf)((vi)centroid & used);
        magnitude = (vf)((vi)magnitude & used);
      }
      sums[i] = centroid * magnitude, energies[i] = centroid * centroid;
      vu negative = (vu)((vi)normal >> 31) & (2 * book.half - 1);
      put_bytes(index + i * W, (place | book.half) ^ negative, LANES);
    }
    return folded<VECTORS>(sums, n) / folded<VECTORS>(energies, n);
  }
};

template <class F> BLENDKV_INLINE void with_block(int block, F&& run) {
  if (W == 16 && block == 8) run(Block<1, W == 16 ? 8 : W>(block));
  else if (block == W) run(Block<1, W>(block));
  else if (block == 2 * W) run(Block<2, W>(block));
  else if (block == 4 * W) run(Block<4, W>(block));
  else if (block == 8 * W) run(Block<8, W>(block));
  else run(Block<0, W>(block));
}

// What vectors are divided by before they are turned: 1, the largest magnitude where squares would leave float32, NaN
// for a vector that is not finite.
BLENDKV_INLINE float unit_of(uint32_t top) {
  float magnitude = number(top);
  if (top >= INFINITE) return __builtin_nanf("");
  return magnitude > SAFE_HIGH || (magnitude < SAFE_LOW && top) ? magnitude : 1.0f;
}

// Rows that are turned first and quantised afterwards: the sums and roots of one are computed beside the next one's
// butterflies.
template <int BITS> struct Rows {
  const float* signs;
  Book<BITS> book;
  int dim, width, blocks, count = 0;
  float *turned, *norms, *units;

  Rows(const float* of, const float* codebook, int size, int64_t most_rows)
      : signs(of), book(codebook), dim(size), width(size & -size), blocks(size / width) {
    turned = static_cast<float*>(scratch(STATE, size_t(most_rows * (dim + blocks + 1) + W) * sizeof(float)));
    norms = turned + most_rows * dim + W, units = norms + most_rows * blocks;
  }

  template <class B, class T> BLENDKV_INLINE void add(const B& block, const T* row) {
    float* to = turned + count * dim;
    float unit = units[count] = unit_of(top_of(row, dim));
    if (unit == 1.0f) {
      for (int i = 0; i < blocks; ++i)
        norms[count * blocks + i] = block.turn(row + i * width, signs + i * width, to + i * width);
    } else {
      float divided[MOST_CODED];
      for (int i = 0; i < dim; ++i) divided[i] = unit == unit ? get_some(row + i, 1)[0] / unit : 0.0f;
      for (int i = 0; i < blocks; ++i)
        norms[count * blocks + i] = block.turn(divided + i * width, signs + i * width, to + i * width);
    }
    ++count;
  }

  template <class B> BLENDKV_INLINE void finish(const B& block, uint8_t* index, float* scales) {
    const float root = float(1.0 / __builtin_sqrt(double(block.size())));
    for (int row = 0, i = 0; row < count; ++row) {
      for (int own = 0; own < blocks; ++own, ++i) {
        float fit = block.quantise(turned + i * width, 1.0f / most(norms[i], TINY), index + i * width, book);
        scales[i] = norms[i] * (units[row] * root) * fit;
      }
      if (units[row] != units[row]) memset(index + row * dim, 0, dim);
    }
    count = 0;
  }
};

// Groups of 8 indices to BITS bytes each: fields are joined pairwise until one of 8 * BITS bits is left.
template <int BITS> BLENDKV_INLINE uint64_t joined(uint64_t x) {
  constexpr uint64_t pairs = ((1ull << 2 * BITS) - 1) * 0x0001000100010001ull;
  constexpr uint64_t fours = ((1ull << 4 * BITS) - 1) * 0x0000000100000001ull;
  x = (x | x >> (8 - BITS)) & pairs;
  x = (x | x >> (16 - 2 * BITS)) & fours;
  return x | x >> (32 - 4 * BITS);
}
template <int BITS> inline void pack(uint8_t* to, const uint8_t* index, int64_t groups) {
  for (int64_t i = 0; i < groups; ++i) {
    uint64_t group;
    memcpy(&group, index + 8 * i, 8);
    group = joined<BITS>(group);
    memcpy(to + BITS * i, &group, BITS);
  }
}

template <int BITS, class T> void run_turbo(const EncodeArgs& a) {
  const int dim = int(a.dim), blocks = dim / (dim & -dim);
  const int64_t values = a.heads * dim, some = most<int64_t>(1, PACKED / most<int64_t>(1, values));
  auto each = [&](int64_t item) {
    int64_t from = item * some, to = least(a.tokens, from + some);
    uint8_t* indices = static_cast<uint8_t*>(scratch(TILES, size_t(some * values)));
    Rows<BITS> rows(reinterpret_cast<const float*>(a.signs), reinterpret_cast<const float*>(a.codebook), dim,
                    some * a.heads);
    with_block(dim & -dim, [&](const auto& block) __attribute__((always_inline)) {
      for (int64_t token = from; token < to; ++token)
        for (int64_t head = 0; head < a.heads; ++head)
          rows.add(block, reinterpret_cast<const T*>(a.x) + token * a.x_stride + head * a.x_head_stride);
      rows.finish(block, indices, reinterpret_cast<float*>(a.scale) + from * a.heads * blocks);
    });
    pack<BITS>(reinterpret_cast<uint8_t*>(a.data) + from * values / 8 * BITS, indices, (to - from) * values / 8);
  };
  parallel((a.tokens + some - 1) / some, most<int64_t>(1, least(a.threads, (a.tokens * values) >> 17)), each);
}

template <bool FLOAT, class T> void run_scaled(const EncodeArgs& a) {
  constexpr int64_t chunk = 64;
  auto each = [&](int64_t item) {
    for (int64_t token = item * chunk; token < least(a.tokens, (item + 1) * chunk); ++token)
      for (int64_t head = 0; head < a.heads; ++head)
        reinterpret_cast<float*>(a.scale)[token * a.heads + head] =
            scaled<FLOAT>(reinterpret_cast<const T*>(a.x) + token * a.x_stride + head * a.x_head_stride,
                          reinterpret_cast<uint8_t*>(a.data) + (token * a.heads + head) * a.dim, int(a.dim));
  };
  int64_t values = a.tokens * a.heads * a.dim;
  parallel((a.tokens + chunk - 1) / chunk, most<int64_t>(1, least(a.threads, values >> 17)), each);
}

template <class T> void run(const EncodeArgs& a) {
  if (a.codec == FP8) return run_scaled<true, T>(a);
  if (a.codec == INT8) return run_scaled<false, T>(a);
  if (a.codec == TURBO4) return run_turbo<4, T>(a);
  if (a.codec == TURBO3) return run_turbo<3, T>(a);
  run_turbo<2, T>(a);
}

}  // namespace

void encode(const EncodeArgs& args) {
  if (args.dtype == FLOAT32) return run<float>(args);
  if (args.dtype == FLOAT16) return run<fp16>(args);
  run<bf16>(args);
}

}  // namespace blendkv::BLENDKV_ISA
