// Blocks of rows: which queries and heads they hold, which keys they see, and their Q with one lane per row.
#pragma once

#include "product.h"

namespace blendkv::BLENDKV_ISA {

// Rows of one KV head are numbered query by query, its query heads side by side.
struct Queries {
  const char* data;
  int64_t stride, head_stride;  // bytes
  const int64_t* positions;
  int64_t count, group, keys, window;

  int64_t rows() const { return count * group; }
};

struct Block {
  int64_t first;       // row
  int rows, vectors;   // vectors of W rows that are in use
  int low, high;       // keys that some row sees
  int all_low, all_high;  // keys that every row sees
  int32_t lows[ROWS], highs[ROWS];  // keys of a row, the last one included

  bool hides(int from, int to) const { return from < all_low || to > all_high; }
  vi hidden(int vector, int key) const {
    return (load<vi>(lows + vector * W) > key) | (load<vi>(highs + vector * W) < key);
  }
};

inline void bound(Block& block, const Queries& q, int64_t first) {
  block.first = first;
  block.rows = int(least<int64_t>(ROWS, q.rows() - first));
  block.vectors = (block.rows + W - 1) / W;
  block.low = block.all_high = int(q.keys);
  block.high = block.all_low = 0;
  for (int i = 0; i < ROWS; ++i) {
    int64_t low = 0, high = -1;  // a lane beyond the rows sees nothing, and is not asked
    if (i < block.rows) {
      int64_t position = q.positions[(first + i) / q.group];
      high = least(position, q.keys - 1);
      low = q.window ? most<int64_t>(0, position - q.window + 1) : 0;
      if (low > high) low = 0, high = -1;
      if (high >= 0) block.low = least(block.low, int(low));
      block.high = most(block.high, int(high + 1));
      block.all_low = most(block.all_low, int(low));
      block.all_high = least(block.all_high, int(high + 1));
    }
    block.lows[i] = int32_t(low), block.highs[i] = int32_t(high);
  }
  block.low = least(block.low, block.high);
}

constexpr int MOST_DIM = 256;
template <class M> BLENDKV_INLINE int words_of(int64_t dim) { return int((dim + M::VALUES - 1) / M::VALUES); }

// A row of K or Q in words; what the last word has too many is zero.
BLENDKV_INLINE void to_words(float* to, const float* from, int dim) { memcpy(to, from, dim * sizeof(float)); }
template <class T> BLENDKV_INLINE void to_words(float* to, const T* from, int dim) {
  int i = 0;
  for (; i + W <= dim; i += W) store(to + i, get(from + i));
  if (i < dim) {
    vf rest = get_some(from + i, dim - i);
    memcpy(to + i, &rest, (dim - i) * sizeof(float));
  }
}
template <class M, class T> BLENDKV_INLINE void copy_row(uint32_t* to, const T* from, int dim) {
  if constexpr (M::VALUES == 2) {
    if (dim % 2) to[dim / 2] = 0;
    memcpy(to, from, dim * sizeof(T));
  } else {
    to_words(reinterpret_cast<float*>(to), from, dim);
  }
}

// Q of a block as `to[word][vector][W]`, words rounded up to 4.
template <class M, class T>
inline void pack_queries(const Block& block, const Queries& q, int64_t head, int dim, uint32_t* to) {
  uint32_t lines[4][MOST_DIM + 4];
  int words = words_of<M>(dim), wide = block.vectors * W;
  memset(lines, 0, sizeof(lines));
  for (int row = 0; row < wide; row += 4) {
    for (int i = 0; i < 4; ++i) {
      if (row + i < block.rows) {
        int64_t own = block.first + row + i;
        const char* from = q.data + own / q.group * q.stride + (head * q.group + own % q.group) * q.head_stride;
        copy_row<M>(lines[i], reinterpret_cast<const T*>(from), dim);
      } else {
        memset(lines[i], 0, words * sizeof(uint32_t));
      }
    }
    for (int word = 0; word < words; word += 4) {
      v4 a = load<v4>(lines[0] + word), b = load<v4>(lines[1] + word), c = load<v4>(lines[2] + word),
         d = load<v4>(lines[3] + word);
      transpose4(a, b, c, d);
      uint32_t* at = to + word * wide + row;
      store(at, a), store(at + wide, b), store(at + 2 * wide, c), store(at + 3 * wide, d);
    }
  }
}

}  // namespace blendkv::BLENDKV_ISA
