// selected_attention: FlashAttention (arXiv 2205.14135, 2307.08691) for scattered queries, by mma.sync (sm_80 on).
//
// A block takes a tile of packed rows of one KV head (its query heads x queries in order of position), keeps it in
// shared memory, and walks the keys from the first that its window holds to the tile's last position; both are read
// from `positions` here, so that the host never waits. K and V have a buffer each: the next K streams in under P V, the
// next V under Q K^T. The scores of a warp's rows stay in registers and become the A operand of P V as they are. A warp
// skips key tiles that none of its rows sees, and masks only where some row does not see all. Blocks start with the
// last tile, which has the most keys. With few rows the keys are split over several blocks, whose results `combine`
// joins by their log-sum-exps.
#pragma once

#include "attention_rows.cuh"

namespace blendkv {

// Write a warp's rows from shared memory: the result itself, or a split's share of it in float32.
template <Type T, int D>
DEVICE void write_rows(const AttentionArgs& args, const unsigned char* from, const RowState* states, int first_row,
                       int rows, int group, int kv_head, int split) {
  constexpr int kChunks = D / kChunk;
  const bool whole = args.splits == 1;
#pragma unroll 1
  for (int i = thread_index() % kWarp; i < AttentionTile<D>::kWarpRows * kChunks; i += kWarp) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first_row + row >= rows || chunk * kChunk >= args.v_dim) continue;
    const int head = kv_head * group + (first_row + row) % group;
    const i64 place = static_cast<i64>((first_row + row) / group) * args.q_heads + head;
    RowState state = states[row];
    if (whole && args.sinks != nullptr) {
      const float sink = args.sinks[head] * kLog2E, more = fmaxf(state.log, sink);
      const float joined = more + log2_fast(exp2_fast(state.log - more) + exp2_fast(sink - more));
      state.share *= exp2_fast(state.log - joined);
      state.log = joined;
    }
    const float* value = reinterpret_cast<const float*>(from + row * 2 * SharedTile<D>::kPitch) + chunk * kChunk;
    if (whole) {
      if (chunk == 0 && args.lse != nullptr) args.lse[place] = state.log * kLn2;
      Chunk packed;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        packed.word[w] = pack<T>(value[2 * w] * state.share, value[2 * w + 1] * state.share);
      }
      *reinterpret_cast<Chunk*>(args.out + place * args.v_dim + chunk * kChunk) = packed;
    } else {
      const i64 part = split * args.queries * args.q_heads + place;
      if (chunk == 0) args.part_lse[part] = state.log;
      float* to = args.part_out + part * args.v_dim + chunk * kChunk;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) to[e] = value[e] * state.share;
    }
  }
}

template <Type T, int D>
KERNEL(128, 2) attention_kernel(GRID_CONSTANT const AttentionArgs args) {
  using Tile = AttentionTile<D>;
  const int group = static_cast<int>(args.q_heads / args.kv_heads);
  const int rows = static_cast<int>(args.queries) * group;
  const int kv_heads = static_cast<int>(args.kv_heads), splits = static_cast<int>(args.splits);
  const int kv_head = static_cast<int>(block_x()) % kv_heads;
  const int split = static_cast<int>(block_x()) / kv_heads % splits;
  const int tiles = (rows + Tile::kRows - 1) / Tile::kRows;
  const int first_row = (tiles - 1 - static_cast<int>(block_x()) / kv_heads / splits) * Tile::kRows;
  const int last_row = (first_row + Tile::kRows < rows ? first_row + Tile::kRows : rows) - 1;
  const int low = seen_by(args.positions[first_row / group], args.keys, args.window).low;
  const int end = seen_by(args.positions[last_row / group], args.keys, args.window).high + 1;
  const int key_tiles = end > low ? (end - low + Tile::kKeys - 1) / Tile::kKeys : 0;

  const uint32_t q_at = shared_address(), k_at = q_at + Tile::kQueryBytes, v_at = k_at + Tile::kKeyBytes;
  const Cache k{args.k, args.table, args.k_block, args.k_row, args.k_head, args.log_block};
  const Cache v{args.v, args.table, args.v_block, args.v_row, args.v_head, args.log_block};
  const auto dim = static_cast<int>(args.dim), v_dim = static_cast<int>(args.v_dim);

  const int warp_row = first_row + thread_index() / kWarp * Tile::kWarpRows;
  WarpRows<T, D> warp;
  warp.start(args, warp_row, rows, group);
  int key = low + split_begin(key_tiles, split, splits) * Tile::kKeys;
  const int stop = low + split_begin(key_tiles, split + 1, splits) * Tile::kKeys;
  if (key < stop) {
    fetch_queries<D, Tile::kRows, Tile::kThreads>(q_at, {args.q, args.q_row, args.q_head, group, rows}, kv_head,
                                                  first_row, dim);
    fetch_keys<D, Tile::kKeys, Tile::kThreads>(k_at, k, kv_head, key, end, dim);
    copy_commit();
  }
  const uint32_t own_q = q_at + SharedTile<D>::at(thread_index() / kWarp * Tile::kWarpRows, 0);
  for (; key < stop; key += Tile::kKeys) {
    const bool any = warp.sees(key);
    copy_wait<0>();
    block_sync();  // K is there, and nobody reads V any more
    fetch_keys<D, Tile::kKeys, Tile::kThreads>(v_at, v, kv_head, key, end, v_dim);
    copy_commit();
    if (any) {
      warp.multiply_keys(own_q, k_at);
      if (args.softcap > 0.0f) warp.cap(args.inside, args.softcap);
      if (!warp.sees_all(key)) warp.mask(key);
    }
    copy_wait<0>();
    block_sync();  // V is there, and nobody reads K any more
    if (key + Tile::kKeys < stop) {
      fetch_keys<D, Tile::kKeys, Tile::kThreads>(k_at, k, kv_head, key + Tile::kKeys, end, dim);
    }
    copy_commit();
    if (any) {
      warp.weigh(args.factor);
      warp.multiply_values(v_at);
    }
  }
  block_sync();  // nobody reads Q, K or V any more
  const int own_row = thread_index() / kWarp * Tile::kWarpRows;
  unsigned char* own_out = shared_memory() + own_row * 2 * SharedTile<D>::kPitch;
  RowState* own_state = reinterpret_cast<RowState*>(shared_memory() + Tile::kStateAt) + own_row;
  warp.leave(own_out, own_state);
  warp_sync();
  write_rows<T, D>(args, own_out, own_state, warp_row, rows, group, kv_head, split);
}

// Join the splits: a warp per query and head.
template <Type T>
KERNEL(128, 1) combine_kernel(GRID_CONSTANT const AttentionArgs args) {
  const i64 all = args.queries * args.q_heads;
  const i64 place = static_cast<i64>(block_x()) * 4 + thread_index() / kWarp;
  if (place >= all) return;
  const int lane = thread_index() % kWarp;
  float top = -infinity();
  for (i64 s = 0; s < args.splits; ++s) top = fmaxf(top, args.part_lse[s * all + place]);
  float sink = -infinity();
  if (args.sinks != nullptr) sink = args.sinks[place % args.q_heads] * kLog2E;
  top = fmaxf(top, sink);
  const float base = top == -infinity() ? 0.0f : top;
  float total = exp2_fast(sink - base);
  for (i64 s = 0; s < args.splits; ++s) total += exp2_fast(args.part_lse[s * all + place] - base);
  const float log = base + log2_fast(total);
  if (args.lse != nullptr && lane == 0) args.lse[place] = log * kLn2;
  for (i64 d = 2 * lane; d < args.v_dim; d += 2 * kWarp) {
    float first = 0.0f, second = 0.0f;
    for (i64 s = 0; s < args.splits; ++s) {
      const float own = args.part_lse[s * all + place];
      if (own == -infinity()) continue;
      const float weight = exp2_fast(own - log);
      const float* from = args.part_out + (s * all + place) * args.v_dim + d;
      first = fmaf(weight, from[0], first);
      second = fmaf(weight, from[1], second);
    }
    *reinterpret_cast<uint32_t*>(args.out + place * args.v_dim + d) = pack<T>(first, second);
  }
}

template <Type T, int D>
int launch_attention(const AttentionArgs& args, void* stream) {
  using Tile = AttentionTile<D>;
  const i64 rows = args.queries * (args.q_heads / args.kv_heads);
  const i64 blocks = (rows + Tile::kRows - 1) / Tile::kRows * args.kv_heads * args.splits;
  const int status = launch(attention_kernel<T, D>, {static_cast<unsigned>(blocks), 1}, Tile::kThreads, Tile::kShared,
                            stream, args);
  if (status != 0 || args.splits == 1) return status;
  const auto places = static_cast<unsigned>((args.queries * args.q_heads + 3) / 4);
  return launch(combine_kernel<T>, {places, 1}, 128, 0, stream, args);
}

// The smallest head dim that holds both K's and V's.
template <Type T>
int launch_by_width(const AttentionArgs& args, void* stream) {
  const i64 dim = args.dim > args.v_dim ? args.dim : args.v_dim;
  if (dim <= 64) return launch_attention<T, 64>(args, stream);
  if (dim <= 80) return launch_attention<T, 80>(args, stream);
  if (dim <= 96) return launch_attention<T, 96>(args, stream);
  if (dim <= 128) return launch_attention<T, 128>(args, stream);
  return launch_attention<T, 256>(args, stream);
}

}  // namespace blendkv
