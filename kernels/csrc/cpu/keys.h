// Tiles of one head's keys and values, from contiguous or paged memory, in the words that the products read.
#pragma once

#include "args.h"
#include "rows.h"

namespace blendkv::BLENDKV_ISA {

struct Tokens {
  const char* data;
  int64_t block_stride, stride;  // bytes
  Paging paging;

  template <class T> static Tokens of(const Cache& cache, const Paging& paging, int64_t head) {
    constexpr int64_t size = sizeof(T);
    const char* data = reinterpret_cast<const char*>(cache.data) + head * cache.head_stride * size;
    return {data, cache.block_stride * size, cache.token_stride * size, paging};
  }

  int64_t block(int64_t index) const {
    return paging.table_bytes == 4 ? reinterpret_cast<const int32_t*>(paging.table)[index]
                                   : reinterpret_cast<const int64_t*>(paging.table)[index];
  }

  // Calls `each(i, row)` for tokens from .. from + count - 1.
  template <class T, class Each> BLENDKV_INLINE void rows(int64_t from, int count, Each&& each) const {
    if (!paging.table) {
      const char* row = data + from * stride;
      for (int i = 0; i < count; ++i, row += stride) each(i, reinterpret_cast<const T*>(row));
      return;
    }
    int64_t index = from / paging.block_size, place = from % paging.block_size;
    for (int i = 0; i < count; ++index, place = 0) {
      const char* row = data + block(index) * block_stride + place * stride;
      int end = int(least<int64_t>(count, i + paging.block_size - place));
      for (; i < end; ++i, row += stride) each(i, reinterpret_cast<const T*>(row));
    }
  }
};

// The lines of the tile that follows, asked for a few at a time between the products: at once they would have to wait
// for each other, and the products for them. Only memory in a row; of other forms little is known before it is read.
struct Ahead {
  const char *k = nullptr, *k_end = nullptr, *v = nullptr, *v_end = nullptr;
  int lines = 0;

  BLENDKV_INLINE void operator()() {
    for (int i = 0; i < lines && k < k_end; ++i, k += 64) __builtin_prefetch(k);
    for (int i = 0; i < lines && v < v_end; ++i, v += 64) __builtin_prefetch(v);
  }
};

// K of `count` keys, N at most: the memory itself where its rows lie as score_block wants them, else a copy in `to`
// whose rows up to the next multiple of KEYS_AT_ONCE are zero.
template <class M, class T>
inline const uint32_t* key_tile(const Tokens& k, int64_t from, int count, int dim, uint32_t* to) {
  int words = words_of<M>(dim), stride = stride_of(words);
  if (sizeof(T) * M::VALUES == 4 && !k.paging.table && k.stride == stride * 4 && count == N)
    return reinterpret_cast<const uint32_t*>(k.data + from * k.stride);
  k.rows<T>(from, count, [&](int i, const T* row) { copy_row<M>(to + i * stride, row, dim); });
  memset(to + count * stride, 0, (round_up(count, KEYS_AT_ONCE<1>) - count) * stride * 4);
  return to;
}

struct Values {
  const uint32_t* data;
  int64_t stride;  // words
};

// Two rows of bfloat16, word by word (first, second).
template <class T> BLENDKV_INLINE void pair_rows(uint32_t* to, const T* first, const T* second, int dim) {
  int i = 0;
  for (; i + W <= dim; i += W) {
    vu low = widen(load<vh>(first + i)), high = widen(load<vh>(second + i));
    store(to + i, low | high << 16);
  }
  for (; i < dim; ++i) to[i] = first[i].bits | uint32_t(second[i].bits) << 16;
}

// V of `count` keys for `outputs`, `dims` wide. Dims beyond `dim` are filled once by the caller, with zeros.
template <class M, class T>
inline Values value_tile(const Tokens& v, int64_t from, int count, int dim, int dims, uint32_t* to) {
  if constexpr (M::VALUES == 2) {
    static const T zeros[MOST_DIM] = {};
    const T* first = zeros;
    v.rows<T>(from, count, [&](int i, const T* row) {
      if (i % 2) pair_rows(to + i / 2 * dims, first, row, dim);
      first = row;
    });
    if (count % 2) pair_rows(to + count / 2 * dims, first, zeros, dim);
  } else {
    if (sizeof(T) == 4 && !v.paging.table && v.stride % 4 == 0 && dim == dims)
      return {reinterpret_cast<const uint32_t*>(v.data + from * v.stride), v.stride / 4};
    v.rows<T>(from, count, [&](int i, const T* row) { copy_row<M>(to + i * dims, row, dim); });
  }
  return {to, dims};
}

}  // namespace blendkv::BLENDKV_ISA
