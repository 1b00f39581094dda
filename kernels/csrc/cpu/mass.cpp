// attention_mass: per key the largest or the summed probability, exp(score - log-sum-exp), over all rows that see it.
#include "keys.h"
#include "parallel.h"

namespace blendkv::BLENDKV_ISA {
namespace {

struct Row {
  Block block;
  float offset[ROWS];  // log-sum-exp, as an exponent of 2; lanes without a row have infinity
};

template <class M, class T> struct Mass {
  const MassArgs& a;
  int64_t group = a.q_heads / a.kv_heads;
  int dim = int(a.head_dim), words = words_of<M>(dim);
  Queries queries{reinterpret_cast<const char*>(a.q), a.q_stride * int64_t(sizeof(T)),
                  a.q_head_stride * int64_t(sizeof(T)), reinterpret_cast<const int64_t*>(a.positions),
                  a.queries, group, a.keys, a.window};
  int64_t blocks = (queries.rows() + ROWS - 1) / ROWS;
  float factor = float((a.softcap ? 1.0 : a.scale) * LOG2E);
  size_t row_bytes = round_up<size_t>(sizeof(Row), 64), q_bytes = size_t(round_up(words, 4)) * ROWS * 4;
  char* rows = nullptr;  // of all heads and blocks
  const float* lse = reinterpret_cast<const float*>(a.lse);
  const float* weights = reinterpret_cast<const float*>(a.weights);
  float* mass = reinterpret_cast<float*>(a.mass);

  const Row& row(int64_t head, int64_t block) const {
    return *reinterpret_cast<Row*>(rows + (head * blocks + block) * (row_bytes + q_bytes));
  }
  uint32_t* q_of(int64_t head, int64_t block) const {
    return reinterpret_cast<uint32_t*>(rows + (head * blocks + block) * (row_bytes + q_bytes) + row_bytes);
  }

  void prepare(int64_t head, int64_t index) const {
    Row& own = const_cast<Row&>(row(head, index));
    bound(own.block, queries, index * ROWS);
    pack_queries<M, T>(own.block, queries, head, dim, q_of(head, index));
    for (int lane = 0; lane < ROWS; ++lane) {
      int64_t at = own.block.first + lane;
      own.offset[lane] = lane < own.block.rows
                             ? lse[at / group * a.q_heads + head * group + at % group] * LOG2E
                             : __builtin_inff();
    }
  }

  // A tile of keys: their statistic over all heads.
  void tile(int from, int count) const {
    size_t k_bytes = size_t(N) * stride_of(words) * 4;
    char* memory = static_cast<char*>(scratch(TILES, k_bytes + size_t(N) * (ROWS + W) * 4));
    float* s = reinterpret_cast<float*>(memory + k_bytes);
    float* found = s + N * ROWS;  // [key][W], a statistic per lane
    float all[N] = {};
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      Tokens k = Tokens::of<T>(a.k, a.paging, head);
      const uint32_t* keys = nullptr;
      vf nothing = a.mean ? vf{} : splat(-__builtin_inff());
      for (int j = 0; j < N; ++j) store(found + j * W, nothing);
      for (int64_t index = 0; index < blocks; ++index) {
        const Row& own = row(head, index);
        int seen = least(count, own.block.high - from);
        if (seen <= 0 || from + count <= own.block.low) continue;
        if (!keys) keys = key_tile<M, T>(k, from, count, dim, reinterpret_cast<uint32_t*>(memory));
        const uint32_t* q = q_of(head, index);
        switch (own.block.vectors) {
          case 1: score<1>(own, q, keys, from, seen, s, found); break;
          case 2: score<2>(own, q, keys, from, seen, s, found); break;
          default: score<RV>(own, q, keys, from, seen, s, found);
        }
      }
      if (keys) join(head, from, count, found, all);
    }
    float share = a.mean ? 1.0f / float(most<int64_t>(1, a.queries * a.q_heads)) : 1.0f;
    for (int j = 0; j < count; ++j) mass[from + j] = all[j] * share;
  }

  // Adds a block's rows to the keys' statistic: the largest exponent, or the sum of probabilities.
  template <int R>
  void score(const Row& own, const uint32_t* q, const uint32_t* keys, int from, int seen, float* s,
             float* found) const {
    int padded = round_up(seen, KEYS_AT_ONCE<R>);
    bool hides = own.block.hides(from, from + padded);
    vf inside = splat(float(a.softcap ? a.scale / a.softcap : 1)), cap = splat(float(a.softcap));
    scores<M, R>(keys, q, words, padded, [&](int j, int r, vf score) __attribute__((always_inline)) {
      store(s + (j * R + r) * W, score);
    }, [] {});
    for (int j = 0; j < padded; ++j)
      for (int r = 0; r < R; ++r) {
        vf score = load<vf>(s + (j * R + r) * W), before = load<vf>(found + j * W);
        if (a.softcap) score = tanh(score * inside) * cap;
        vf exponent = score * splat(factor) - load<vf>(own.offset + r * W);
        if (hides) exponent = own.block.hidden(r, from + j) ? splat(-__builtin_inff()) : exponent;
        store(found + j * W, a.mean ? before + probability(exponent) : vmax(before, exponent));
      }
  }

  static BLENDKV_INLINE vf probability(vf exponent) {
    vf p = exp2<M::DEGREE>(exponent);
    return exponent == splat(-__builtin_inff()) ? vf{} : p;
  }

  // One number per key from its W lanes; weighed, and joined with the other heads'.
  void join(int64_t head, int from, int count, const float* found, float* all) const {
    float lanes[N];
    for (int j = 0; j < N; j += 4) {
      v4 four[4];
      for (int i = 0; i < 4; ++i) {
        four[i] = load<v4>(found + (j + i) * W);
        for (int part = 4; part < W; part += 4) four[i] = both(four[i], load<v4>(found + (j + i) * W + part));
      }
      transpose4(four[0], four[1], four[2], four[3]);
      store(lanes + j, both(both(four[0], four[1]), both(four[2], four[3])));
    }
    if (!a.mean)
      for (int j = 0; j < N; j += W) store(lanes + j, probability(load<vf>(lanes + j)));
    for (int j = 0; j < count; ++j) {
      float p = weights ? lanes[j] * weights[(from + j) * a.kv_heads + head] : lanes[j];
      all[j] = a.mean ? all[j] + p : most(all[j], p);
    }
  }

  v4 both(v4 x, v4 y) const { return a.mean ? x + y : (x > y ? x : y); }

  void run() {
    double work = double(queries.rows()) * a.kv_heads * a.keys * dim;
    int64_t threads = most<int64_t>(1, least<int64_t>(a.threads, int64_t(work / 2e6)));
    rows = static_cast<char*>(scratch(SHARED, a.kv_heads * blocks * (row_bytes + q_bytes)));
    auto packed = [&](int64_t item) { prepare(item / blocks, item % blocks); };
    parallel(a.kv_heads * blocks, threads, packed);
    int64_t tiles = (a.keys + N - 1) / N;
    auto each = [&](int64_t item) { tile(int(item * N), int(least<int64_t>(N, a.keys - item * N))); };
    parallel(tiles, threads, each);
  }
};

}  // namespace

void mass(const MassArgs& args) {
  if (args.dtype == FLOAT32) return Mass<Single, float>{args}.run();
  if (args.dtype == FLOAT16) return Mass<Single, fp16>{args}.run();
#if defined(__AVX512BF16__)
  Mass<Pairs, bf16>{args}.run();
#else
  Mass<Single, bf16>{args}.run();
#endif
}

}  // namespace blendkv::BLENDKV_ISA
