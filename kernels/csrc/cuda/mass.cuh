// attention_mass: the max or the sum over (queries, heads) of every key's probability, by mma.sync (sm_80 on).
//
// A block takes a tile of keys of one KV head, which is the A operand and stays in registers, and walks the packed rows
// that can see it, two tiles of them in flight. A key's probabilities lie in one row of mma's result: the statistic is
// taken in registers, and nothing of the size queries x keys is kept.
#pragma once

#include "layout.cuh"

namespace blendkv {

// Mirrored by kernels/mass/cuda.py.
struct MassArgs {
  const uint16_t *q, *k;
  const i64* positions;
  const int* table;      // null: contiguous
  const float* lse;      // [queries, q_heads]
  const float* weights;  // [keys, kv_heads]; null: all 1
  float* out;            // [kv_heads, keys]
  i64 queries, q_heads, kv_heads, keys, dim;
  i64 q_row, q_head, k_block, k_row, k_head, log_block;
  i64 window, sum;  // sum: the sum and not the max
  float factor, inside, softcap;  // as for attention
};

template <int D>
struct MassTile {
  static constexpr int kThreads = 128;
  static constexpr int kParts = D <= 128 ? 2 : 1;
  static constexpr int kWarpKeys = 16 * kParts;
  static constexpr int kKeys = 4 * kWarpKeys;
  static constexpr int kRows = D <= 128 ? 64 : 32;
  static constexpr uint32_t kKeyBytes = kKeys * SharedTile<D>::kPitch;
  static constexpr uint32_t kRowBytes = kRows * SharedTile<D>::kPitch;
  static_assert(2 * kRowBytes <= kKeyBytes, "rows take the place of the keys");
  static constexpr uint32_t kRowsAt = kKeyBytes;  // what is known of the rows
  static constexpr int kShared = static_cast<int>(kRowsAt + 2 * kRows * 12);
};

// What is known of the rows of a tile: log2 of the denominator, and the keys that they see.
struct RowFacts {
  float* log;
  Seen* seen;
};

template <int D>
DEVICE RowFacts row_facts(int stage) {
  using Tile = MassTile<D>;
  unsigned char* at = shared_memory() + Tile::kRowsAt;
  return {reinterpret_cast<float*>(at) + stage * Tile::kRows,
          reinterpret_cast<Seen*>(at + 2 * Tile::kRows * 4) + stage * Tile::kRows};
}

// First query at or beyond a position.
DEVICE int first_query(const i64* positions, i64 queries, i64 position) {
  i64 low = 0, high = queries;
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (positions[middle] < position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return static_cast<int>(low);
}

template <int D>
DEVICE void fetch_rows(const MassArgs& args, int kv_head, int first, int rows, int group, int stage) {
  using Tile = MassTile<D>;
  const Queries queries{args.q, args.q_row, args.q_head, group, rows};
  fetch_queries<D, Tile::kRows, Tile::kThreads>(shared_address() + static_cast<uint32_t>(stage) * Tile::kRowBytes,
                                                queries, kv_head, first, static_cast<int>(args.dim));
  const RowFacts facts = row_facts<D>(stage);
  for (int i = thread_index(); i < Tile::kRows; i += Tile::kThreads) {
    const int row = first + i;
    facts.log[i] = 0.0f;
    facts.seen[i] = Seen{0, -1};
    if (row < rows) {
      const i64 head = kv_head * group + row % group;
      facts.log[i] = args.lse[row / group * args.q_heads + head] * kLog2E;
      facts.seen[i] = seen_by(args.positions[row / group], args.keys, args.window);
    }
  }
}

template <Type T, int D>
KERNEL(128, 2) mass_kernel(GRID_CONSTANT const MassArgs args) {
  using Tile = MassTile<D>;
  using Place = SharedTile<D>;
  constexpr int kParts = Tile::kParts;
  const int lane = thread_index() % kWarp, kv_head = static_cast<int>(block_y());
  const int group = static_cast<int>(args.q_heads / args.kv_heads), keys = static_cast<int>(args.keys);
  const int first_key = static_cast<int>(block_x()) * Tile::kKeys;
  const int end = first_key + Tile::kKeys < keys ? first_key + Tile::kKeys : keys;
  const Cache cache{args.k, args.table, args.k_block, args.k_row, args.k_head, args.log_block};
  fetch_keys<D, Tile::kKeys, Tile::kThreads>(shared_address(), cache, kv_head, first_key, end,
                                             static_cast<int>(args.dim));
  copy_commit();
  int row = first_query(args.positions, args.queries, first_key) * group;
  int rows = static_cast<int>(args.queries) * group;
  if (args.window > 0) rows = first_query(args.positions, args.queries, end - 1 + args.window) * group;

  const int warp_key = thread_index() / kWarp * Tile::kWarpKeys;
  uint32_t key[kParts][D / 16][4];
  copy_wait<0>();
  block_sync();
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const uint32_t own = Place::at(warp_key + 16 * p + row_of_a(lane), 2 * step + chunk_of_a(lane));
      ldmatrix(key[p][step], shared_address() + own);
    }
  }
  block_sync();  // every warp has its keys

  float found[kParts][2] = {};
  if (row < rows) fetch_rows<D>(args, kv_head, row, rows, group, 0);
  copy_commit();
  for (int stage = 0; row < rows; row += Tile::kRows, stage ^= 1) {
    if (row + Tile::kRows < rows) fetch_rows<D>(args, kv_head, row + Tile::kRows, rows, group, stage ^ 1);
    copy_commit();
    copy_wait<1>();
    block_sync();
    const RowFacts facts = row_facts<D>(stage);
    const uint32_t from = shared_address() + static_cast<uint32_t>(stage) * Tile::kRowBytes +
                          Place::at(row_of_b(lane), chunk_of_b(lane));
#pragma unroll 1
    for (int n = 0; n < Tile::kRows; n += 16) {
      float score[kParts][2][4] = {};
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        uint32_t b[4];
        ldmatrix(b, from + Place::at(n, 2 * step));
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          mma<T>(score[p][0], key[p][step], b[0], b[1]);
          mma<T>(score[p][1], key[p][step], b[2], b[3]);
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {  // the lane's four rows of these 16
        const int own = n + 8 * (c / 2) + 2 * (lane % 4) + c % 2;
        const float log = facts.log[own];
        const Seen seen = facts.seen[own];
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int at = first_key + warp_key + 16 * p + 8 * h + lane / 4;
            float s = score[p][c / 2][2 * h + c % 2];
            if (args.softcap > 0.0f) s = capped(s * args.inside, args.softcap);
            const float probability =
                at >= seen.low && at <= seen.high ? exp2_fast(fmaf(s, args.factor, -log)) : 0.0f;
            found[p][h] = args.sum != 0 ? found[p][h] + probability : fmaxf(found[p][h], probability);
          }
        }
      }
    }
    block_sync();  // the stage is free
  }
  copy_wait<0>();
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float mine = found[p][h];
#pragma unroll
      for (int mask = 1; mask <= 2; mask *= 2) {
        const float other = shuffle_xor(mine, mask);
        mine = args.sum != 0 ? mine + other : fmaxf(mine, other);
      }
      const int at = first_key + warp_key + 16 * p + 8 * h + lane / 4;
      if (lane % 4 != 0 || at >= keys) continue;
      if (args.weights != nullptr) mine *= args.weights[static_cast<i64>(at) * args.kv_heads + kv_head];
      args.out[static_cast<i64>(kv_head) * args.keys + at] = mine;
    }
  }
}

template <Type T, int D>
int launch_mass(const MassArgs& args, void* stream) {
  using Tile = MassTile<D>;
  const auto tiles = static_cast<unsigned>((args.keys + Tile::kKeys - 1) / Tile::kKeys);
  return launch(mass_kernel<T, D>, {tiles, static_cast<unsigned>(args.kv_heads)}, Tile::kThreads, Tile::kShared, stream,
                args);
}

template <Type T>
int launch_mass_by_width(const MassArgs& args, void* stream) {
  if (args.dim <= 64) return launch_mass<T, 64>(args, stream);
  if (args.dim <= 80) return launch_mass<T, 80>(args, stream);
  if (args.dim <= 96) return launch_mass<T, 96>(args, stream);
  if (args.dim <= 128) return launch_mass<T, 128>(args, stream);
  return launch_mass<T, 256>(args, stream);
}

}  // namespace blendkv
