// One warp's rows of selected_attention: what it computes between the barriers, in mma's fragments.
#pragma once

#include "layout.cuh"

namespace blendkv {

// Mirrored by kernels/attention/cuda.py.
struct AttentionArgs {
  const uint16_t *q, *k, *v;
  const i64* positions;
  const int* table;    // null: contiguous
  const float* sinks;  // null: none
  uint16_t* out;
  float* lse;                  // null: not wanted
  float *part_out, *part_lse;  // [splits, queries * q_heads, v_dim] and [splits, queries * q_heads]
  i64 queries, q_heads, kv_heads, keys, dim, v_dim;
  i64 q_row, q_head, k_block, k_row, k_head, v_block, v_row, v_head, log_block;
  i64 splits, window;  // window 0: none
  float factor;        // scores, soft-capped where there is a cap, times this are logarithms to base 2
  float inside, softcap;  // capped(score * inside, softcap); softcap 0: none
};

template <int D>
struct AttentionTile {
  static constexpr int kThreads = 128;
  static constexpr int kParts = D <= 128 ? 2 : 1;  // 16-row tiles per warp; registers hold 16 x kParts x D floats
  static constexpr int kWarpRows = 16 * kParts;
  static constexpr int kRows = 4 * kWarpRows;
  static constexpr int kKeys = D <= 128 ? 64 : 32;
  static constexpr uint32_t kKeyBytes = kKeys * SharedTile<D>::kPitch;
  static constexpr uint32_t kQueryBytes = kRows * SharedTile<D>::kPitch;
  static_assert(2 * kKeyBytes >= kQueryBytes, "the output in float32 takes the place of Q, K and V");
  static constexpr uint32_t kSeenAt = kQueryBytes + 2 * kKeyBytes;
  static constexpr uint32_t kStateAt = kSeenAt + kRows * sizeof(Seen);
  static constexpr int kShared = static_cast<int>(kStateAt + kRows * sizeof(float) * 2);
};

// What is left of a row's softmax: log2 of its total, and 1 / total relative to the row's top.
struct RowState {
  float log, share;
};

// One warp's part of a tile: scores, softmax state and output of its rows, in mma's fragments.
template <Type T, int D>
struct WarpRows {
  using Tile = AttentionTile<D>;
  using Place = SharedTile<D>;
  static constexpr int kParts = Tile::kParts, kColumns = Tile::kKeys / 8;

  float out[kParts][D / 8][4];
  float score[kParts][kColumns][4];
  float top[kParts][2], total[kParts][2];  // of rows lane / 4 and lane / 4 + 8 of each part; top in units of log2
  int lane;

  // Of the warp's rows, in shared memory: masks are rare, and no register is free.
  DEVICE Seen* ranges() const {
    return reinterpret_cast<Seen*>(shared_memory() + Tile::kSeenAt) + thread_index() / kWarp * Tile::kWarpRows;
  }

  DEVICE void start(const AttentionArgs& args, int first_row, int rows, int group) {
    lane = thread_index() % kWarp;
    Seen* seen = ranges();
    for (int row = lane; row < Tile::kWarpRows; row += kWarp) {
      // Rows behind the last are computed like it, and not written; a warp without rows sees no key.
      const int own = first_row + row < rows ? first_row + row : rows - 1;
      seen[row] = first_row < rows ? seen_by(args.positions[own / group], args.keys, args.window) : Seen{0, -1};
    }
    warp_sync();
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[p][n][i] = 0.0f;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[p][h] = -infinity();
        total[p][h] = 0.0f;
      }
    }
  }

  // score = Q K^T. `q` is the address of the warp's first row, `k` of the tile of keys.
  DEVICE void multiply_keys(uint32_t q, uint32_t k) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) score[p][n][i] = 0.0f;
      }
    }
    const uint32_t from_q = q + Place::at(row_of_a(lane), chunk_of_a(lane));
    const uint32_t from_k = k + Place::at(row_of_b(lane), chunk_of_b(lane));
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t a[kParts][4];
#pragma unroll
      for (int p = 0; p < kParts; ++p) ldmatrix(a[p], from_q + Place::at(16 * p, 2 * step));
#pragma unroll
      for (int n = 0; n < kColumns / 2; ++n) {
        uint32_t b[4];
        ldmatrix(b, from_k + Place::at(16 * n, 2 * step));
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          mma<T>(score[p][2 * n], a[p], b[0], b[1]);
          mma<T>(score[p][2 * n + 1], a[p], b[2], b[3]);
        }
      }
    }
  }

  // Whether some row sees some of a tile's keys, and whether all rows see all: positions ascend.
  DEVICE bool sees(int key) const {
    return key <= ranges()[Tile::kWarpRows - 1].high && key + Tile::kKeys > ranges()[0].low;
  }
  DEVICE bool sees_all(int key) const {
    return key + Tile::kKeys - 1 <= ranges()[0].high && key >= ranges()[Tile::kWarpRows - 1].low;
  }

  DEVICE void cap(float inside, float outside) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) score[p][n][i] = capped(score[p][n][i] * inside, outside);
      }
    }
  }

  DEVICE void mask(int first_key) {
    const int key = first_key + 2 * (lane % 4);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Seen range = ranges()[16 * p + 8 * h + lane / 4];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int own = key + 8 * n + i;
            if (own < range.low || own > range.high) score[p][n][2 * h + i] = -infinity();
          }
        }
      }
    }
  }

  // Scores become weights 2^(factor score - top); what was summed under a lower top is scaled down.
  DEVICE void weigh(float factor) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float highest = -infinity();
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          highest = fmaxf(highest, fmaxf(score[p][n][2 * h], score[p][n][2 * h + 1]));
        }
        highest = fmaxf(highest, shuffle_xor(highest, 1));
        highest = fmaxf(highest, shuffle_xor(highest, 2));
        highest = fmaxf(top[p][h], highest * factor);
        const float base = highest == -infinity() ? 0.0f : highest;  // nothing seen yet: all weights are 0
        const float kept = exp2_fast(top[p][h] - base);
        top[p][h] = highest;
        float sum = total[p][h] * kept;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            score[p][n][i] = exp2_fast(fmaf(score[p][n][i], factor, -base));
            sum += score[p][n][i];
          }
        }
        total[p][h] = sum;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
          out[p][n][2 * h] *= kept;
          out[p][n][2 * h + 1] *= kept;
        }
      }
    }
  }

  // out += P V: a pair of score fragments is one A operand.
  DEVICE void multiply_values(uint32_t v) {
    const uint32_t from = v + Place::at(row_of_a(lane), chunk_of_a(lane));
#pragma unroll
    for (int step = 0; step < Tile::kKeys / 16; ++step) {
      uint32_t a[kParts][4];
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&s)[4] = score[p][2 * step + i / 2];
          a[p][i] = pack<T>(s[2 * (i % 2)], s[2 * (i % 2) + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        ldmatrix_transposed(b, from + Place::at(16 * step, 2 * n));
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          mma<T>(out[p][2 * n], a[p], b[0], b[1]);
          mma<T>(out[p][2 * n + 1], a[p], b[2], b[3]);
        }
      }
    }
  }

  // Leave the output, not yet divided by its total, and log and 1 / total of every row in shared memory.
  DEVICE void leave(unsigned char* to, RowState* state) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * p + 8 * h + lane / 4;
        float sum = total[p][h];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (lane % 4 == 0) {
          state[row].log = sum > 0.0f ? top[p][h] + log2_fast(sum) : -infinity();
          state[row].share = sum > 0.0f ? divide_fast(1.0f, sum) : 0.0f;
        }
        float* own = reinterpret_cast<float*>(to + row * 2 * Place::kPitch) + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
          own[8 * n] = out[p][n][2 * h];
          own[8 * n + 1] = out[p][n][2 * h + 1];
        }
      }
    }
  }
};

}  // namespace blendkv
