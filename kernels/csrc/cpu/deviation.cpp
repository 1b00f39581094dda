// kv_deviation: the squared difference per token of K, of V, or of both.
#include "args.h"
#include "difference.h"
#include "parallel.h"

namespace blendkv::BLENDKV_ISA {
namespace {

struct Side {
  int64_t data, stride, head_stride;
};

template <class T> BLENDKV_INLINE float token(Side a, Side b, int64_t t, int64_t heads, int dim) {
  const T* x = reinterpret_cast<const T*>(a.data) + t * a.stride;
  const T* y = reinterpret_cast<const T*>(b.data) + t * b.stride;
  float total = 0;
  for (int64_t head = 0; head < heads; ++head)
    total += difference(x + head * a.head_stride, y + head * b.head_stride, dim);
  return total;
}

template <class T> void run(const DeviationArgs& a) {
  constexpr int64_t chunk = 64;
  auto each = [&](int64_t item) {
    int64_t from = item * chunk, to = least(a.tokens, from + chunk);
    float* out = reinterpret_cast<float*>(a.deviation);
    for (int64_t t = from; t < to; ++t) {
      float total = 0;
      if (a.k_a)
        total += token<T>({a.k_a, a.k_a_stride, a.k_a_head_stride}, {a.k_b, a.k_b_stride, a.k_b_head_stride}, t,
                          a.heads, int(a.k_dim));
      if (a.v_a)
        total += token<T>({a.v_a, a.v_a_stride, a.v_a_head_stride}, {a.v_b, a.v_b_stride, a.v_b_head_stride}, t,
                          a.v_heads, int(a.v_dim));
      out[t] = total;
    }
  };
  int64_t values = a.tokens * (a.heads * a.k_dim + a.v_heads * a.v_dim);
  parallel((a.tokens + chunk - 1) / chunk, most<int64_t>(1, least(a.threads, values >> 17)), each);
}

}  // namespace

void deviation(const DeviationArgs& args) {
  if (args.dtype == FLOAT32) return run<float>(args);
  if (args.dtype == FLOAT16) return run<fp16>(args);
  run<bf16>(args);
}

}  // namespace blendkv::BLENDKV_ISA
