// Squared difference of two rows.
#pragma once

#include "vec.h"

namespace blendkv::BLENDKV_ISA {

template <class T> BLENDKV_INLINE float difference(const T* a, const T* b, int dim) {
  vf sum = {}, other = {};
  int i = 0;
  for (; i + 2 * W <= dim; i += 2 * W) {
    vf x = get(a + i) - get(b + i), y = get(a + i + W) - get(b + i + W);
    sum += x * x, other += y * y;
  }
  for (; i < dim; i += W) {
    int count = least(W, dim - i);
    vf x = get_some(a + i, count) - get_some(b + i, count);
    sum += x * x;
  }
  sum += other;
  float lanes[W], total = 0;
  store(lanes, sum);
  for (int i = 0; i < W; ++i) total += lanes[i];
  return total;
}

}  // namespace blendkv::BLENDKV_ISA
