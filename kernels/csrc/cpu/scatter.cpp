// rope_shift_scatter: rows are decoded, shifted, rotated (RoPE, arXiv 2104.09864) and written at their slots.
#include "args.h"
#include "codecs.h"
#include "parallel.h"

namespace blendkv::BLENDKV_ISA {
namespace {

constexpr int64_t AHEAD = 8192;      // bytes of a source that are prefetched, in whole tokens
constexpr int TABLE_AHEAD = 8;       // tokens whose cos and sin are prefetched
constexpr int64_t OUT_AHEAD = 2048;  // bytes of output, in whole tokens: more than that leaves the first cache again
constexpr int64_t GATHERED = 4096;   // bytes that are written at a time past the caches
constexpr int64_t UNCACHED = 7 << 19;  // bytes of an output from which on it is written past the caches

enum Bias { NONE, CONSTANT, TREND };

// Vectors of a row: two at once, one, or what a row ends with.
struct Double {
  template <class T> BLENDKV_INLINE vf2 read(const T* from) const { return {get(from), get(from + W)}; }
  template <class T> BLENDKV_INLINE void write(T* to, vf2 x) const { put(to, x); }
};
struct Whole {
  template <class T> BLENDKV_INLINE vf read(const T* from) const { return get(from); }
  template <class T> BLENDKV_INLINE void write(T* to, vf x) const { put(to, x); }
};
struct Some {
  int count;
  template <class T> BLENDKV_INLINE vf read(const T* from) const { return get_some(from, count); }
  template <class T> BLENDKV_INLINE void write(T* to, vf x) const { put_some(to, x, count); }
};
template <class Each> BLENDKV_INLINE void vectors(int from, int to, Each&& each) {
  for (; from + 2 * W <= to; from += 2 * W) each(from, Double{});
  for (; from + W <= to; from += W) each(from, Whole{});
  if (from < to) each(from, Some{to - from});
}

BLENDKV_INLINE vf swapped(vf x) { return swap_lanes<1>(x); }
BLENDKV_INLINE vf2 swapped(vf2 x) { return {swapped(x.low), swapped(x.high)}; }

// A token's heads: where they are read and written, and what is added. Where they are rotated, heads are the inner
// loops, so that cos and sin are loaded once. The loops work on a copy: the compiler must take it that what they write
// may be a field of anything whose address is known elsewhere.
template <class S, class D> struct Heads {
  const S* x;
  D* out;
  const float *bias, *slope, *scales;  // a scale per head, for codes
  float along;
  int64_t x_stride, out_stride, dim;
  int count;

  // Value i of a head, whose row begins at `from`. Codes become what a decoded chunk holds before anything is added.
  template <Bias BIAS, class L> BLENDKV_INLINE auto take(const S* from, int head, int64_t i, L lanes) const {
    auto value = lanes.read(from + i);
    if constexpr (sizeof(S) == 1) value *= splat(scales[head]), value = rounded<D>(value);
    if constexpr (BIAS != NONE) value += lanes.read(bias + head * dim + i);
    if constexpr (BIAS == TREND) value += splat(along) * lanes.read(slope + head * dim + i);
    return value;
  }

  // Dims from .. to - 1 as they are.
  template <Bias BIAS> BLENDKV_INLINE void plain(int from, int to) const {
    const Heads own = *this;
    for (int head = 0; head < own.count; ++head) {
      const S* row = own.x + head * own.x_stride;
      D* place = own.out + head * own.out_stride;
      vectors(from, to, [&](int i, auto lanes) __attribute__((always_inline)) {
        lanes.write(place + i, own.template take<BIAS>(row, head, i, lanes));
      });
    }
  }

  // Both members of a pair are read before one is written, so that a row may be rotated in its place.
  template <Bias BIAS> BLENDKV_INLINE void halves(const float* cos, const float* sin, int from, int half) const {
    const Heads own = *this;
    vectors(0, half, [&](int i, auto lanes) __attribute__((always_inline)) {
      auto c = lanes.read(cos + i), s = lanes.read(sin + i);
      const S* row = own.x;
      D* place = own.out + from + i;
      for (int head = 0; head < own.count; ++head, row += own.x_stride, place += own.out_stride) {
        auto a = own.template take<BIAS>(row, head, from + i, lanes);
        auto b = own.template take<BIAS>(row, head, from + half + i, lanes);
        lanes.write(place, a * c - b * s);
        lanes.write(place + half, b * c + a * s);
      }
    });
  }

  template <Bias BIAS> BLENDKV_INLINE void neighbours(const float* cos, const float* sin, int from, int dims) const {
    const Heads own = *this;
    vectors(0, dims, [&](int i, auto lanes) __attribute__((always_inline)) {
      auto c = lanes.read(cos + i), s = lanes.read(sin + i);
      const S* row = own.x;
      D* place = own.out + from + i;
      for (int head = 0; head < own.count; ++head, row += own.x_stride, place += own.out_stride) {
        auto x = own.template take<BIAS>(row, head, from + i, lanes);
        lanes.write(place, x * c + swapped(x) * s);
      }
    });
  }
};

// Rows of some tokens on their way past the caches, which takes whole lines: those of a head lie side by side here as
// they will in the output, or those of a token do.
template <class D> struct Gathered {
  const Moved& m;
  int64_t heads, tokens;
  bool by_head;
  D* rows;

  Gathered(const Moved& moved, int64_t count) : m(moved), heads(count), by_head(moved.out_stride == moved.dim) {
    int64_t run = (by_head ? 1 : heads) * m.dim * int64_t(sizeof(D));  // bytes that a token adds to a run of memory
    int64_t whole = 64 / least<int64_t>(64, run & -run);               // tokens that fill lines
    tokens = round_up(most<int64_t>(1, GATHERED / (heads * m.dim * int64_t(sizeof(D)))), whole);
    rows = static_cast<D*>(scratch(STATE, size_t(tokens * heads * m.dim) * sizeof(D)));
  }

  // Whether an output can be written so, and is worth it: what fits the caches is better found there by attention.
  static bool fits(const Moved& m, const ScatterArgs& a) {
    bool side_by_side = m.out_stride == m.dim || (m.out_head_stride == m.dim && m.out_stride == a.heads * m.dim);
    int64_t bytes = a.places * a.heads * m.dim * int64_t(sizeof(D));
    return STREAMS && !a.slots && !a.block_size && side_by_side && bytes >= UNCACHED;
  }

  template <class S> BLENDKV_INLINE void place(Heads<S, D>& to, int64_t token) const {
    to.out = rows + token * (by_head ? 1 : heads) * m.dim;
    to.out_stride = by_head ? tokens * m.dim : m.dim;
  }

  BLENDKV_INLINE void write(int64_t slot, int64_t count) const {
    D* out = reinterpret_cast<D*>(m.out) + slot * m.out_stride;
    int64_t runs = by_head ? heads : 1, run = count * m.dim * (by_head ? 1 : heads);
    for (int64_t i = 0; i < runs; ++i)
      stream(out + i * m.out_head_stride, rows + i * tokens * m.dim, run * int64_t(sizeof(D)));
  }
};

template <class T> BLENDKV_INLINE void copy(T* to, const T* from, int count) {
  int i = 0, lanes = int(sizeof(vf) / sizeof(T));
  for (; i + lanes <= count; i += lanes) store(to + i, load<vf>(from + i));
  if (i < count) memmove(to + i, from + i, (count - i) * sizeof(T));
}

// Heads of a turbo source, decoded to `to`, dim floats each. `codebook` has CODES entries.
inline void decode(const Moved& m, int64_t token, int64_t heads, const float* codebook, float* to) {
  int dim = int(m.dim), blocks = dim / (dim & -dim);
  uint8_t codes[MOST_CODED / 2 + 16];
  const float* signs = reinterpret_cast<const float*>(m.signs);
  const float* scales = reinterpret_cast<const float*>(m.scale) + token * heads * blocks;
  for (int64_t head = 0; head < heads; ++head, to += round_up(dim, W), scales += blocks) {
    const char* from = reinterpret_cast<const char*>(m.source) + token * m.source_stride + head * m.source_head_stride;
    memcpy(codes, from, dim * (m.codec - 8) / 8);
    if (m.codec == TURBO4) decode_turbo<4>(to, codes, dim, codebook, signs, scales);
    else if (m.codec == TURBO3) decode_turbo<3>(to, codes, dim, codebook, signs, scales);
    else decode_turbo<2>(to, codes, dim, codebook, signs, scales);
  }
}

// K or V, from a source of S (float for turbo's) to an output of D.
template <class S, class D> struct Side {
  const Moved& m;
  const ScatterArgs& a;
  bool rotated;
  int64_t values = most<int64_t>(1, a.heads * m.dim);  // of a token
  int64_t ahead = most<int64_t>(1, AHEAD / (values * int64_t(sizeof(S)))) * m.source_stride;
  int64_t out_ahead = most<int64_t>(1, OUT_AHEAD / (values * int64_t(sizeof(D)))) * m.out_stride;
  bool side_by_side = m.source_head_stride == m.dim;
  float codebook[CODES] = {};

  // There are several streams: more than the hardware's prefetcher follows.
  BLENDKV_INLINE void prefetch(int64_t token) const {
    if (rotated) {
      const float* cos = reinterpret_cast<const float*>(a.cos) + (token + TABLE_AHEAD) * a.cos_stride;
      const float* sin = reinterpret_cast<const float*>(a.sin) + (token + TABLE_AHEAD) * a.sin_stride;
      for (int i = 0, each = int(a.interleaved ? a.rotated : a.rotated / 2); i < each; i += 16)
        __builtin_prefetch(cos + i), __builtin_prefetch(sin + i);
    }
    if (m.codec >= TURBO2) return;
    const S* x = reinterpret_cast<const S*>(m.source) + token * m.source_stride + ahead;
    int64_t runs = side_by_side ? 1 : a.heads, run = side_by_side ? values : m.dim;
    for (; runs > 0; --runs, x += m.source_head_stride)
      for (int64_t i = 0; i < run; i += int64_t(64 / sizeof(S))) __builtin_prefetch(x + i);
  }

  // A store waits until its line was read. Slots that are not in a run are left alone.
  BLENDKV_INLINE void prefetch_out(int64_t slot) const {
    const D* next = reinterpret_cast<const D*>(m.out) + slot * m.out_stride + out_ahead;
    for (int64_t head = 0; head < a.heads; ++head, next += m.out_head_stride)
      for (int i = 0; i < m.dim; i += int(64 / sizeof(D))) __builtin_prefetch(next + i, 1);
  }

  template <Bias BIAS> BLENDKV_INLINE void move(Heads<S, D>& heads, int64_t token) const {
    int dim = int(m.dim), from = int(a.offset), dims = int(a.rotated);
    if constexpr (sizeof(S) == sizeof(D) && BIAS == NONE) {
      if (!rotated && m.source_dtype == m.out_dtype) {
        for (int head = 0; head < heads.count; ++head)
          copy(reinterpret_cast<S*>(heads.out) + head * heads.out_stride, heads.x + head * heads.x_stride, dim);
        return;
      }
    }
    if (!rotated) return heads.template plain<BIAS>(0, dim);
    const float* cos = reinterpret_cast<const float*>(a.cos) + token * a.cos_stride;
    const float* sin = reinterpret_cast<const float*>(a.sin) + token * a.sin_stride;
    if (from) heads.template plain<BIAS>(0, from);
    if (a.interleaved) heads.template neighbours<BIAS>(cos, sin, from, dims);
    else heads.template halves<BIAS>(cos, sin, from, dims / 2);
    if (from + dims < dim) heads.template plain<BIAS>(from + dims, dim);
  }

  // Read a token, and write it to heads.out.
  BLENDKV_INLINE void row(Heads<S, D>& heads, int64_t token, float* decoded) const {
    prefetch(token);
    heads.scales = reinterpret_cast<const float*>(m.scale) + token * a.heads;
    heads.x = reinterpret_cast<const S*>(m.source) + token * m.source_stride;
    if constexpr (sizeof(S) == 4)
      if (decoded) {
        decode(m, token, a.heads, codebook, decoded);
        float* end = decoded + a.heads * heads.x_stride;
        if (rotated || m.bias)  // as in `take`
          for (float* x = decoded; x < end; x += W) store(x, rounded<D>(load<vf>(x)));
        heads.x = decoded;
      }
    if (!m.bias) return move<NONE>(heads, token);
    if (!m.slope) return move<CONSTANT>(heads, token);
    heads.along = reinterpret_cast<const float*>(m.along)[token];
    move<TREND>(heads, token);
  }

  void tokens(int64_t from, int64_t to) const {
    const int64_t* slots = reinterpret_cast<const int64_t*>(a.slots);
    float* decoded = nullptr;
    Heads<S, D> heads{nullptr, nullptr, reinterpret_cast<const float*>(m.bias), reinterpret_cast<const float*>(m.slope),
                      nullptr, 0.0f, m.source_head_stride, m.out_head_stride, m.dim, int(a.heads)};
    if (m.codec >= TURBO2) {
      heads.x_stride = round_up(int(m.dim), W);
      decoded = static_cast<float*>(scratch(TILES, a.heads * heads.x_stride * 4));
    }
    if (Gathered<D>::fits(m, a)) return gather(heads, from, to, decoded);
    for (int64_t token = from; token < to; ++token) {
      int64_t slot = slots ? slots[token] : a.first_slot + token;
      if (slot < 0) continue;
      heads.out = reinterpret_cast<D*>(m.out);
      if (!slots && !a.block_size) prefetch_out(slot);
      if (a.block_size) heads.out += slot / a.block_size * m.out_block_stride + slot % a.block_size * m.out_stride;
      else heads.out += slot * m.out_stride;
      row(heads, token, decoded);
    }
  }

  void gather(Heads<S, D>& heads, int64_t from, int64_t to, float* decoded) const {
    Gathered<D> some(m, a.heads);
    for (int64_t first = from; first < to; first += some.tokens) {
      int64_t count = least(some.tokens, to - first);
      for (int64_t i = 0; i < count; ++i) {
        some.place(heads, i);
        row(heads, first + i, decoded);
      }
      some.write(a.first_slot + first, count);
    }
  }

  void run() {
    if (m.codec >= TURBO2)
      memcpy(codebook, reinterpret_cast<const float*>(m.codebook), sizeof(float) << (m.codec - 8));
    constexpr int64_t chunk = 64;
    auto each = [&](int64_t item) { tokens(item * chunk, least(a.tokens, (item + 1) * chunk)); };
    parallel((a.tokens + chunk - 1) / chunk, most<int64_t>(1, least(a.threads, (a.tokens * values) >> 17)), each);
  }
};

template <class S> void to_output(const Moved& moved, const ScatterArgs& args, bool rotated) {
  if (moved.out_dtype == FLOAT32) return Side<S, float>{moved, args, rotated}.run();
  if (moved.out_dtype == FLOAT16) return Side<S, fp16>{moved, args, rotated}.run();
  Side<S, bf16>{moved, args, rotated}.run();
}

void side(const Moved& moved, const ScatterArgs& args, bool rotated) {
  if (moved.codec == FP8) return to_output<fp8>(moved, args, rotated);
  if (moved.codec == INT8) return to_output<int8_t>(moved, args, rotated);
  if (moved.codec != RAW || moved.source_dtype == FLOAT32) return to_output<float>(moved, args, rotated);
  if (moved.source_dtype == FLOAT16) return to_output<fp16>(moved, args, rotated);
  to_output<bf16>(moved, args, rotated);
}

}  // namespace

void scatter(const ScatterArgs& args) {
  side(args.k, args, args.cos != 0);
  side(args.v, args, false);
}

}  // namespace blendkv::BLENDKV_ISA
