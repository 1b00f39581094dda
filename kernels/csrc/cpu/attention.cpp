// selected_attention: online softmax over tiles of keys (FlashAttention, arXiv 2205.14135), blocks of rows inside.
#include "difference.h"
#include "keys.h"
#include "parallel.h"

namespace blendkv::BLENDKV_ISA {
namespace {

constexpr float NOTHING = -1e30f;  // a row's top score before its first key; finite, so that differences are
constexpr float SLACK = 8.0f;      // rows are scaled anew only where their top grows by more than 2^SLACK

struct Row {  // of one block: numerators, tops and denominators of the softmax
  Block block;
  float top[ROWS], total[ROWS];
};

template <class M, class T> struct Attention {
  const AttentionArgs& a;
  int64_t group = a.q_heads / a.kv_heads, threads = 1;
  int dim = int(a.head_dim), v_dim = int(a.v_dim), words = words_of<M>(dim), dims = round_up(v_dim, DIMS_AT_ONCE<1>);
  Queries queries{reinterpret_cast<const char*>(a.q), a.q_stride * int64_t(sizeof(T)),
                  a.q_head_stride * int64_t(sizeof(T)), reinterpret_cast<const int64_t*>(a.positions),
                  a.queries, group, a.keys, a.window};
  int64_t blocks = (queries.rows() + ROWS - 1) / ROWS, per_item = 1, tiles = 0, splits = 1;
  float factor = float((a.softcap ? 1.0 : a.scale) * LOG2E);
  float* moved = nullptr;    // [kv_heads][keys], where the deviation is wanted
  char* partial = nullptr;   // the states of all items, where keys are split
  size_t row_bytes = round_up<size_t>(sizeof(Row), 64);
  size_t q_bytes = size_t(round_up(words, 4)) * ROWS * 4, out_bytes = size_t(dims) * ROWS * 4;
  size_t block_bytes = row_bytes + q_bytes + out_bytes;

  Row& row(char* state, int64_t i) const { return *reinterpret_cast<Row*>(state + i * block_bytes); }
  uint32_t* q_of(char* state, int64_t i) const {
    return reinterpret_cast<uint32_t*>(state + i * block_bytes + row_bytes);
  }
  float* out_of(char* state, int64_t i) const {
    return reinterpret_cast<float*>(state + i * block_bytes + row_bytes + q_bytes);
  }
  int64_t blocks_of(int64_t tile) const { return least(per_item, blocks - tile * per_item); }

  void divide() {
    double work = double(queries.rows()) * a.kv_heads * a.keys * (dim + v_dim);
    threads = most<int64_t>(1, least<int64_t>(a.threads, int64_t(work / 4e6)));
    int64_t all = blocks * a.kv_heads;
    per_item = threads == 1 ? 6 : most<int64_t>(1, least<int64_t>(6, all / (4 * threads)));
    tiles = (blocks + per_item - 1) / per_item;
    int64_t items = most<int64_t>(1, tiles * a.kv_heads);
    if (threads > 1 && items < 2 * threads)
      splits = least((4 * threads + items - 1) / items, (a.keys + 4 * N - 1) / (4 * N));
  }

  // ---- One item: a tile of blocks of one head, over a part of its keys ----

  void prepare(char* state, int64_t head, int64_t tile, int& low, int& high) const {
    low = int(a.keys), high = 0;
    for (int64_t i = 0; i < blocks_of(tile); ++i) {
      Row& own = row(state, i);
      bound(own.block, queries, (tile * per_item + i) * ROWS);
      pack_queries<M, T>(own.block, queries, head, dim, q_of(state, i));
      for (int lane = 0; lane < ROWS; ++lane) own.top[lane] = NOTHING, own.total[lane] = 0;
      memset(out_of(state, i), 0, size_t(dims) * own.block.vectors * W * 4);
      if (own.block.high) low = least(low, own.block.low), high = most(high, own.block.high);
    }
    low = least(low, high);
  }

  void attend(int64_t head, int64_t tile, int64_t split, char* state) const {
    int low, high;
    prepare(state, head, tile, low, high);
    int64_t steps = (high - low + N - 1) / N;
    int from = low + int(steps * split / splits) * N, to = least(high, low + int(steps * (split + 1) / splits) * N);
    Tokens k = Tokens::of<T>(a.k, a.paging, head), v = Tokens::of<T>(a.v, a.paging, head);
    size_t k_bytes = size_t(N) * stride_of(words) * 4, v_bytes = size_t(N) * dims * 4;
    char* memory = static_cast<char*>(scratch(TILES, k_bytes + v_bytes + size_t(N) * ROWS * 4));
    uint32_t *k_copy = reinterpret_cast<uint32_t*>(memory), *v_copy = reinterpret_cast<uint32_t*>(memory + k_bytes);
    float* s = reinterpret_cast<float*>(memory + k_bytes + v_bytes);
    memset(v_copy, 0, v_bytes);
    for (int k0 = from; k0 < to; k0 += N) {
      int count = least(N, to - k0);
      const uint32_t* keys = key_tile<M, T>(k, k0, count, dim, k_copy);
      Values values = value_tile<M, T>(v, k0, count, v_dim, dims, v_copy);
      Ahead ahead = next<T>(k, v, k0 + count, to, blocks_of(tile));
      for (int64_t i = 0; i < blocks_of(tile); ++i) {
        Row& own = row(state, i);
        int seen = least(count, own.block.high - k0);
        if (seen <= 0 || k0 + count <= own.block.low) continue;
        switch (own.block.vectors) {
          case 1: step<1>(own, q_of(state, i), keys, values, k0, seen, s, out_of(state, i), ahead); break;
          case 2: step<2>(own, q_of(state, i), keys, values, k0, seen, s, out_of(state, i), ahead); break;
          default: step<RV>(own, q_of(state, i), keys, values, k0, seen, s, out_of(state, i), ahead);
        }
      }
      if (moved && tile == tiles - 1) measure(head, k0, count);
    }
  }

  // What the tile of keys from .. to - 1 will read, spread over the blocks and steps of the tile before.
  template <class U> Ahead next(const Tokens& k, const Tokens& v, int from, int to, int64_t all) const {
    int64_t count = least(N, to - from), size = sizeof(U);
    if (count <= 0 || k.paging.table || k.stride != dim * size || v.stride != v_dim * size) return {};
    const char *first = k.data + from * k.stride, *other = v.data + from * v.stride;
    int64_t lines = count * most(dim, v_dim) * size / 64, calls = all * (N / KEYS_AT_ONCE<RV> + dims / DIMS_AT_ONCE<RV>);
    return {first, first + count * k.stride, other, other + count * v.stride, int((lines + calls - 1) / calls)};
  }

  template <int R>
  void step(Row& own, const uint32_t* q, const uint32_t* keys, Values values, int k0, int seen, float* s, float* out,
            Ahead& ahead) const {
    int padded = round_up(seen, KEYS_AT_ONCE<R>);
    bool hides = own.block.hides(k0, k0 + padded);
    vf top[R];
    for (int r = 0; r < R; ++r) top[r] = splat(NOTHING);
    scores<M, R>(keys, q, words, padded, [&](int j, int r, vf score) __attribute__((always_inline)) {
      store(s + (j * R + r) * W, score);
      top[r] = vmax(top[r], score);
    }, ahead);
    if (hides || a.softcap) change<R>(own.block, k0, padded, hides, s, top);
    raise<R>(own, top, out);
    weigh<R>(own, padded, hides, s);
    outputs<M, R>(values.data, values.stride, reinterpret_cast<uint32_t*>(s), M::VALUES * R * W,
                  (seen + M::VALUES - 1) / M::VALUES, dims, out, ahead);
  }

  // Soft-cap and mask the scores.
  template <int R> void change(const Block& block, int k0, int count, bool hides, float* s, vf* top) const {
    vf inside = splat(float(a.softcap ? a.scale / a.softcap : 1)), cap = splat(float(a.softcap));
    for (int r = 0; r < R; ++r) top[r] = splat(NOTHING);
    for (int j = 0; j < count; ++j)
      for (int r = 0; r < R; ++r) {
        vf score = load<vf>(s + (j * R + r) * W);
        if (a.softcap) score = tanh(score * inside) * cap;
        if (hides) score = block.hidden(r, k0 + j) ? splat(-__builtin_inff()) : score;
        store(s + (j * R + r) * W, score);
        top[r] = vmax(top[r], score);
      }
  }

  // Take new top scores where they are far above the old ones, and scale what was summed.
  template <int R> void raise(Row& own, const vf* top, float* out) const {
    vi grown = {};
    for (int r = 0; r < R; ++r) grown |= (top[r] - load<vf>(own.top + r * W)) * splat(factor) > splat(SLACK);
    if (!any(grown)) return;
    vf shrink[R];
    for (int r = 0; r < R; ++r) {
      vf before = load<vf>(own.top + r * W), after = vmax(before, top[r]);
      shrink[r] = exp2<6>((before - after) * splat(factor));
      store(own.top + r * W, after);
      store(own.total + r * W, load<vf>(own.total + r * W) * shrink[r]);
    }
    for (int d = 0; d < dims; ++d)
      for (int r = 0; r < R; ++r) store(out + (d * R + r) * W, load<vf>(out + (d * R + r) * W) * shrink[r]);
  }

  // Scores become the words of P, in their place.
  template <int R> void weigh(Row& own, int count, bool hides, float* s) const {
    if (hides) weigh<R, true>(own, count, s);
    else weigh<R, false>(own, count, s);
  }
  template <int R, bool HIDES> void weigh(Row& own, int count, float* s) const {
    vf offset[R], total[R], f = splat(factor);
    for (int r = 0; r < R; ++r) offset[r] = load<vf>(own.top + r * W) * f, total[r] = load<vf>(own.total + r * W);
    auto weight = [&](int j, int r) __attribute__((always_inline)) {
      vf score = load<vf>(s + (j * R + r) * W), p = exp2<M::DEGREE>(score * f - offset[r]);
      if (HIDES) p = score == splat(-__builtin_inff()) ? vf{} : p;
      total[r] += p;
      return p;
    };
    for (int j = 0; j < count; j += M::VALUES)
      for (int r = 0; r < R; ++r) {
        float* place = s + (j * R + r) * W;
        vf p = weight(j, r);
        if constexpr (M::VALUES == 2) store(place, M::join(p, weight(j + 1, r)));
        else store(place, p);
      }
    for (int r = 0; r < R; ++r) store(own.total + r * W, total[r]);
  }

  // ---- Results ----

  void merge(char* into, char* from, int64_t i) const {
    Row &a = row(into, i), &b = row(from, i);
    float *x = out_of(into, i), *y = out_of(from, i);
    int wide = a.block.vectors * W;
    for (int lane = 0; lane < wide; lane += W) {
      vf before = load<vf>(a.top + lane), other = load<vf>(b.top + lane), top = vmax(before, other);
      vf own = exp2<6>((before - top) * splat(factor)), its = exp2<6>((other - top) * splat(factor));
      store(a.top + lane, top);
      store(a.total + lane, load<vf>(a.total + lane) * own + load<vf>(b.total + lane) * its);
      for (int at = lane; at < dims * wide; at += wide) store(x + at, load<vf>(x + at) * own + load<vf>(y + at) * its);
    }
  }

  void finish(char* state, int64_t head, int64_t tile) const {
    for (int64_t i = 0; i < blocks_of(tile); ++i) {
      Row& own = row(state, i);
      const float* out = out_of(state, i);
      int wide = own.block.vectors * W;
      float inverse[ROWS] = {};
      for (int lane = 0; lane < own.block.rows; ++lane) inverse[lane] = close(own, lane, head);
      float lines[4][MOST_DIM];
      for (int lane = 0; lane < own.block.rows; lane += 4) {
        v4 scale = load<v4>(inverse + lane);
        for (int d = 0; d < dims; d += 4) {
          const float* at = out + d * wide + lane;
          v4 w = load<v4>(at) * scale, x = load<v4>(at + wide) * scale, y = load<v4>(at + 2 * wide) * scale,
             z = load<v4>(at + 3 * wide) * scale;
          transpose4(w, x, y, z);
          store(lines[0] + d, w), store(lines[1] + d, x), store(lines[2] + d, y), store(lines[3] + d, z);
        }
        for (int n = 0; n < 4 && lane + n < own.block.rows; ++n) write(lines[n], result(own, lane + n, head));
      }
    }
  }

  int64_t result(const Row& own, int lane, int64_t head) const {
    int64_t at = own.block.first + lane;
    return at / group * a.q_heads + head * group + at % group;
  }

  void write(const float* line, int64_t at) const {
    T* to = reinterpret_cast<T*>(a.out) + at * v_dim;
    int d = 0;
    for (; d + W <= v_dim; d += W) put(to + d, load<vf>(line + d));
    if (d < v_dim) put_some(to + d, get_some(line + d, v_dim - d), v_dim - d);
  }

  // What the numerators are multiplied by. Writes the log-sum-exp.
  float close(Row& own, int lane, int64_t head) const {
    float top = own.top[lane] * factor, total = own.total[lane];  // exponents of 2
    int64_t at = result(own, lane, head);
    float shrink = 1.0f;
    if (a.sinks) {
      float sink = reinterpret_cast<const float*>(a.sinks)[at % a.q_heads] * LOG2E;
      float raised = most(top, sink);
      shrink = __builtin_exp2f(top - raised);
      total = total * shrink + __builtin_exp2f(sink - raised), top = raised;
    }
    if (a.lse)
      reinterpret_cast<float*>(a.lse)[at] = total > 0 ? LN2 * (top + __builtin_log2f(total)) : -__builtin_inff();
    return total > 0 ? shrink / total : 0.0f;
  }

  // ---- The deviation: of the tiles that the last item reads while they are in the cache, of all others after ----

  void measure(int64_t head, int64_t from, int64_t count) const {
    for (int64_t t = from; t < from + count; ++t) {
      auto at = [&](int64_t data, int64_t stride, int64_t head_stride) {
        return reinterpret_cast<const T*>(data) + t * stride + head * head_stride;
      };
      moved[head * a.keys + t] =
          difference(at(a.k.data, a.k.token_stride, a.k.head_stride),
                     at(a.stored_k, a.stored_k_stride, a.stored_k_head_stride), dim) +
          difference(at(a.v.data, a.v.token_stride, a.v.head_stride),
                     at(a.stored_v, a.stored_v_stride, a.stored_v_head_stride), v_dim);
    }
  }

  void sum_deviation() const {
    int low = int(a.keys), high = 0;
    for (int64_t b = (tiles - 1) * per_item; tiles && b < blocks; ++b) {
      Block block;
      bound(block, queries, b * ROWS);
      if (block.high) low = least(low, block.low), high = most(high, block.high);
    }
    low = least(low, high);
    constexpr int64_t chunk = 256;
    auto each = [&](int64_t item) {
      int64_t from = item * chunk, to = least(a.keys, from + chunk);
      float* total = reinterpret_cast<float*>(a.deviation);
      for (int64_t head = 0; head < a.kv_heads; ++head) {
        if (from < low) measure(head, from, least<int64_t>(low, to) - from);
        if (to > high) measure(head, most<int64_t>(high, from), to - most<int64_t>(high, from));
        for (int64_t t = from; t < to; ++t) total[t] = (head ? total[t] : 0) + moved[head * a.keys + t];
      }
    };
    int64_t values = a.keys * a.kv_heads * (dim + v_dim);
    parallel((a.keys + chunk - 1) / chunk, most<int64_t>(1, least(a.threads, values >> 17)), each);
  }

  void run() {
    divide();
    if (a.deviation) moved = static_cast<float*>(scratch(SHARED, a.kv_heads * a.keys * 4));
    size_t item_bytes = per_item * block_bytes;
    if (splits > 1) partial = static_cast<char*>(scratch(PARTIAL, a.kv_heads * tiles * splits * item_bytes));
    auto part = [&](int64_t tile, int64_t head, int64_t split) {
      return partial + ((tile * a.kv_heads + head) * splits + split) * item_bytes;
    };
    auto each = [&](int64_t item) {
      int64_t split = item % splits, head = item / splits % a.kv_heads;
      int64_t tile = tiles - 1 - item / splits / a.kv_heads;  // the longest first
      char* state = partial ? part(tile, head, split) : static_cast<char*>(scratch(STATE, item_bytes));
      attend(head, tile, split, state);
      if (!partial) finish(state, head, tile);
    };
    parallel(tiles * a.kv_heads * splits, threads, each);
    if (partial) {
      auto join = [&](int64_t item) {
        int64_t head = item % a.kv_heads, tile = item / a.kv_heads;
        char* state = part(tile, head, 0);
        for (int64_t split = 1; split < splits; ++split)
          for (int64_t i = 0; i < blocks_of(tile); ++i) merge(state, part(tile, head, split), i);
        finish(state, head, tile);
      };
      parallel(tiles * a.kv_heads, threads, join);
    }
    if (moved) sum_deviation();
  }
};

}  // namespace

void attention(const AttentionArgs& args) {
  if (args.dtype == FLOAT32) return Attention<Single, float>{args}.run();
  if (args.dtype == FLOAT16) return Attention<Single, fp16>{args}.run();
#if defined(__AVX512BF16__)
  Attention<Pairs, bf16>{args}.run();
#else
  Attention<Single, bf16>{args}.run();
#endif
}

}  // namespace blendkv::BLENDKV_ISA
