// rope_shift_scatter: rows are decoded, shifted, rotated (RoPE, arXiv 2104.09864) and written at their slots.
#include "args.h"
#include "codecs.h"
#include "parallel.h"

namespace blendkv::BLENDKV_ISA {
namespace {

constexpr int MOST_CODED = 1024;  // head dim of turbo sources
constexpr int AHEAD = 8;          // tokens that are prefetched
constexpr int64_t OUT_AHEAD = 2048;  // bytes of output, in whole tokens: more than that leaves the first cache again

enum Coding : int64_t { RAW = 0, FP8 = 1, INT8 = 2, TURBO2 = 10, TURBO3 = 11, TURBO4 = 12 };

// Vectors of a row: all W lanes, or what a row ends with.
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
  for (; from + W <= to; from += W) each(from, Whole{});
  if (from < to) each(from, Some{to - from});
}

// A token's heads: where they are read and written, and what is added. Where they are rotated, heads are the inner
// loops, so that cos and sin are loaded once.
template <class S, class D> struct Heads {
  const S* x;
  D* out;
  const float *bias, *scales;  // a scale per head, for codes
  int64_t x_stride, out_stride, bias_stride;
  int count;

  template <bool BIAS, class L> BLENDKV_INLINE vf take(const S* from, const float* shift, int head, L lanes) const {
    vf value = lanes.read(from);
    if constexpr (sizeof(S) == 1) value *= splat(scales[head]);
    if constexpr (BIAS) value += lanes.read(shift);
    return value;
  }

  // Dims from .. to - 1 as they are.
  template <bool BIAS> BLENDKV_INLINE void plain(int from, int to) const {
    for (int head = 0; head < count; ++head) {
      const S* row = x + head * x_stride;
      const float* shift = BIAS ? bias + head * bias_stride : nullptr;
      D* place = out + head * out_stride;
      vectors(from, to, [&](int i, auto lanes) __attribute__((always_inline)) {
        lanes.write(place + i, take<BIAS>(row + i, shift + i, head, lanes));
      });
    }
  }

  // Both members of a pair are read before one is written, so that a row may be rotated in its place.
  template <bool BIAS> BLENDKV_INLINE void halves(const float* cos, const float* sin, int from, int half) const {
    vectors(0, half, [&](int i, auto lanes) __attribute__((always_inline)) {
      vf c = lanes.read(cos + half + i), s = lanes.read(sin + half + i);  // those of i are the same angles'
      const S* row = x + from + i;
      const float* shift = BIAS ? bias + from + i : nullptr;
      D* place = out + from + i;
      for (int head = 0; head < count; ++head, row += x_stride, shift += bias_stride, place += out_stride) {
        vf a = take<BIAS>(row, shift, head, lanes), b = take<BIAS>(row + half, shift + half, head, lanes);
        lanes.write(place, a * c - b * s);
        lanes.write(place + half, b * c + a * s);
      }
    });
  }

  template <bool BIAS> BLENDKV_INLINE void neighbours(const float* cos, const float* sin, int from, int dims) const {
    vectors(0, dims, [&](int i, auto lanes) __attribute__((always_inline)) {
      vf c = lanes.read(cos + i), s = lanes.read(sin + i);
      const S* row = x + from + i;
      const float* shift = BIAS ? bias + from + i : nullptr;
      D* place = out + from + i;
      for (int head = 0; head < count; ++head, row += x_stride, shift += bias_stride, place += out_stride) {
        vf own = take<BIAS>(row, shift, head, lanes);
        lanes.write(place, own * c + swap_lanes<1>(own) * s);
      }
    });
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
  float codebook[CODES] = {};

  // Half of each table row is skipped, and there are several streams: more than the hardware's prefetcher follows.
  BLENDKV_INLINE void prefetch(const S* x, const Heads<S, D>& heads, const float* cos, const float* sin) const {
    for (int i = int(a.rotated) / 2; i < a.rotated; i += 16)
      __builtin_prefetch(cos + AHEAD * a.cos_stride + i), __builtin_prefetch(sin + AHEAD * a.sin_stride + i);
    if (m.codec >= TURBO2) return;
    for (int head = 0; head < heads.count; ++head, x += heads.x_stride)
      for (int i = 0; i < m.dim; i += int(64 / sizeof(S))) __builtin_prefetch(x + AHEAD * m.source_stride + i);
  }

  // A store waits until its line was read. Slots that are not in a run are left alone.
  BLENDKV_INLINE void prefetch_out(int64_t slot) const {
    int64_t ahead = most<int64_t>(1, OUT_AHEAD / (a.heads * m.dim * int64_t(sizeof(D))));
    const D* next = reinterpret_cast<const D*>(m.out) + (slot + ahead) * m.out_stride;
    for (int64_t head = 0; head < a.heads; ++head, next += m.out_head_stride)
      for (int i = 0; i < m.dim; i += int(64 / sizeof(D))) __builtin_prefetch(next + i, 1);
  }

  template <bool BIAS> BLENDKV_INLINE void move(Heads<S, D>& heads, int64_t token) const {
    int dim = int(m.dim), from = int(a.offset), dims = int(a.rotated);
    if constexpr (sizeof(S) == sizeof(D) && !BIAS) {
      if (!rotated && m.source_dtype == m.out_dtype) {
        for (int head = 0; head < heads.count; ++head)
          copy(reinterpret_cast<S*>(heads.out) + head * heads.out_stride, heads.x + head * heads.x_stride, dim);
        return;
      }
    }
    if (!rotated) return heads.template plain<BIAS>(0, dim);
    const float* cos = reinterpret_cast<const float*>(a.cos) + token * a.cos_stride;
    const float* sin = reinterpret_cast<const float*>(a.sin) + token * a.sin_stride;
    prefetch(heads.x, heads, cos, sin);
    if (from) heads.template plain<BIAS>(0, from);
    if (a.interleaved) heads.template neighbours<BIAS>(cos, sin, from, dims);
    else heads.template halves<BIAS>(cos, sin, from, dims / 2);
    if (from + dims < dim) heads.template plain<BIAS>(from + dims, dim);
  }

  void tokens(int64_t from, int64_t to) const {
    const int64_t* slots = reinterpret_cast<const int64_t*>(a.slots);
    float* decoded = nullptr;
    Heads<S, D> heads{nullptr, nullptr, nullptr, nullptr, m.source_head_stride, m.out_head_stride, m.bias_head_stride,
                      int(a.heads)};
    if (m.codec >= TURBO2) {
      heads.x_stride = round_up(int(m.dim), W);
      decoded = static_cast<float*>(scratch(TILES, a.heads * heads.x_stride * 4));
    }
    for (int64_t token = from; token < to; ++token) {
      int64_t slot = slots ? slots[token] : a.first_slot + token;
      if (slot < 0) continue;
      heads.out = reinterpret_cast<D*>(m.out);
      if (!slots && !a.block_size) prefetch_out(slot);
      if (a.block_size) heads.out += slot / a.block_size * m.out_block_stride + slot % a.block_size * m.out_stride;
      else heads.out += slot * m.out_stride;
      heads.scales = reinterpret_cast<const float*>(m.scale) + token * a.heads;
      heads.x = reinterpret_cast<const S*>(m.source) + token * m.source_stride;
      if constexpr (sizeof(S) == 4)
        if (decoded) {
          decode(m, token, a.heads, codebook, decoded);
          heads.x = decoded;
        }
      if (!m.bias) {
        move<false>(heads, token);
        continue;
      }
      heads.bias = reinterpret_cast<const float*>(m.bias) + token * m.bias_stride;
      move<true>(heads, token);
    }
  }

  void run() {
    if (m.codec >= TURBO2)
      memcpy(codebook, reinterpret_cast<const float*>(m.codebook), sizeof(float) << (m.codec - 8));
    constexpr int64_t chunk = 64;
    auto each = [&](int64_t item) { tokens(item * chunk, least(a.tokens, (item + 1) * chunk)); };
    int64_t values = a.tokens * a.heads * m.dim;
    parallel((a.tokens + chunk - 1) / chunk, most<int64_t>(1, least(a.threads, values >> 17)), each);
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
