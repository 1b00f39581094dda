// Where things lie: tiles in shared memory, fragments in lanes, keys in a cache's blocks, and which keys a row sees.
#pragma once

#include "device.cuh"

namespace blendkv {

constexpr int kChunk = 8;  // 16-bit values in 16 bytes

// A tile of rows of `D` 16-bit values in shared memory. The pitch is an odd number of 16-byte chunks, so that the same
// chunk of 8 consecutive rows lies in 8 different groups of banks: ldmatrix then has no conflicts, for any D.
template <int D>
struct SharedTile {
  static constexpr int kChunks = D / kChunk;
  static constexpr int kPitch = (kChunks | 1) * 16;

  SHARED_CODE static uint32_t at(int row, int chunk) {
    return static_cast<uint32_t>(row * kPitch + chunk * 16);
  }
};

// What a lane gives ldmatrix to read a 16 x 16 tile as the A operand of mma, or 16 x 16 values stored [k][n] as two B
// operands (transposed): matrices in the order (rows 0-7, 8-15) x (columns 0-7, 8-15).
SHARED_CODE int row_of_a(int lane) { return lane & 15; }
SHARED_CODE int chunk_of_a(int lane) { return lane >> 4; }

// The same to read values stored [n][k] as two B operands: both halves of k of the first 8 n, then of the next 8.
SHARED_CODE int row_of_b(int lane) { return (lane & 7) + ((lane >> 4) << 3); }
SHARED_CODE int chunk_of_b(int lane) { return (lane >> 3) & 1; }

// Keys or values in device memory: contiguous where there is no table.
struct Cache {
  const uint16_t* data;
  const int* table;
  i64 block, row, head;  // strides in elements; `block` of a paged cache alone
  i64 log_size;  // of a block: a power of 2, as division takes registers

  DEVICE i64 offset(int position, int kv_head) const {
    i64 found = static_cast<i64>(kv_head) * head;
    if (table == nullptr) return found + static_cast<i64>(position) * row;
    const int within = position & ((1 << static_cast<int>(log_size)) - 1);
    const i64 index = table[position >> static_cast<int>(log_size)];
    return found + index * block + within * row;
  }
};

// Keys low .. high that a query sees; high < low where it sees none.
struct Seen {
  int low, high;
};

SHARED_CODE Seen seen_by(i64 position, i64 keys, i64 window) {
  const i64 high = position < keys ? position : keys - 1;
  i64 low = window > 0 ? position - window + 1 : 0;
  if (low < 0) low = 0;
  if (low > keys) low = keys;
  return {static_cast<int>(low), static_cast<int>(high)};
}

// Tiles first .. last - 1 of `tiles` that one of `splits` blocks takes.
SHARED_CODE int split_begin(int tiles, int split, int splits) {
  return static_cast<int>(static_cast<i64>(tiles) * split / splits);
}

// How the threads of a block share the chunks of a tile: each keeps to one column of chunks.
template <int D, int Threads>
struct Share {
  static constexpr int kChunks = D / kChunk;
  static constexpr int kFit = Threads / kChunks;
  static constexpr int kStep = kFit >= 16 ? 16 : kFit >= 8 ? 8 : 4;  // rows per turn; divides every tile's

  SHARED_CODE static int row(int thread) { return thread / kChunks; }
  SHARED_CODE static int chunk(int thread) { return thread % kChunks; }
  SHARED_CODE static bool idle(int thread) { return thread >= kStep * kChunks; }
};

// Copy `Rows` rows of a cache from `first` on into shared memory; zeros at and beyond `end`, and beyond `dim`.
template <int D, int Rows, int Threads>
DEVICE void fetch_keys(uint32_t to, const Cache& cache, int kv_head, int first, int end, int dim) {
  using Own = Share<D, Threads>;
  static_assert(Rows % Own::kStep == 0, "every thread copies as many chunks");
  if (Own::idle(thread_index())) return;
  const int row = Own::row(thread_index()), chunk = Own::chunk(thread_index());
  const int left = chunk * kChunk < dim ? end - first : 0;
  to += SharedTile<D>::at(row, chunk);
  if (cache.table == nullptr) {
    const uint16_t* from = cache.data + cache.offset(first + row, kv_head) + chunk * kChunk;
#pragma unroll
    for (int i = 0; i < Rows; i += Own::kStep) {
      copy_async(to + SharedTile<D>::at(i, 0), from, i + row < left);
      from += Own::kStep * cache.row;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < Rows; i += Own::kStep) {
      const bool valid = i + row < left;
      const i64 offset = valid ? cache.offset(first + row + i, kv_head) + chunk * kChunk : 0;
      copy_async(to + SharedTile<D>::at(i, 0), cache.data + offset, valid);
    }
  }
}

// Queries, packed: row r is query head r % group of the KV head at query r / group.
struct Queries {
  const uint16_t* data;
  i64 row, head;  // strides in elements
  int group, rows;
};

template <int D, int Rows, int Threads>
DEVICE void fetch_queries(uint32_t to, const Queries& queries, int kv_head, int first, int dim) {
  using Own = Share<D, Threads>;
  static_assert(Rows % Own::kStep == 0, "every thread copies as many chunks");
  if (Own::idle(thread_index())) return;
  const int chunk = Own::chunk(thread_index());
#pragma unroll 1
  for (int row = Own::row(thread_index()); row < Rows; row += Own::kStep) {
    const bool valid = first + row < queries.rows && chunk * kChunk < dim;
    i64 offset = 0;
    if (valid) {
      const int query = (first + row) / queries.group, member = (first + row) % queries.group;
      offset = query * queries.row + static_cast<i64>(kv_head * queries.group + member) * queries.head;
      offset += chunk * kChunk;
    }
    copy_async(to + SharedTile<D>::at(row, chunk), queries.data + offset, valid);
  }
}

// cap * tanh(x / cap) by exp2, for x given as 2 log2(e) x / cap: to 1e-7 of the cap.
DEVICE float capped(float doubled, float cap) {
  return cap - divide_fast(2.0f * cap, exp2_fast(fminf(doubled, 126.0f)) + 1.0f);
}

}  // namespace blendkv
