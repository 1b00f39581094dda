// exp2 and tanh of vectors. The coefficients are minimax fits of 2^x on [-0.5, 0.5], by relative error.
#pragma once

#include "vec.h"

namespace blendkv::BLENDKV_ISA {

constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;

// 2^x for x <= 126. What is below -125 gives 2^-125, so that no subnormal number arises: callers blank hidden keys.
// Degree 3 is off by 7.5e-5, a thirtieth of bfloat16's rounding; degree 6 by float32's own.
template <int DEGREE> BLENDKV_INLINE vf exp2(vf x) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  x = vmax(x, splat(-125.0f));
  vf shifted = x + splat(magic), rest = x - (shifted - splat(magic)), power;
  if constexpr (DEGREE == 3) {
    power = splat(5.517166936e-02f);
    power = power * rest + splat(2.426111314e-01f);
    power = power * rest + splat(6.932609862e-01f);
    power = power * rest + splat(9.999280730e-01f);
  } else {
    static_assert(DEGREE == 6);
    power = splat(1.534581205e-04f);
    power = power * rest + splat(1.339993136e-03f);
    power = power * rest + splat(9.618488958e-03f);
    power = power * rest + splat(5.550328777e-02f);
    power = power * rest + splat(2.402264689e-01f);
    power = power * rest + splat(6.931472057e-01f);
    power = power * rest + splat(1.0f);
  }
  return (vf)((vu)power + ((vu)shifted << 23));
}

// 1 - 2 / (e^2x + 1), and an odd series near zero, where that difference would lose its digits.
BLENDKV_INLINE vf tanh(vf x) {
  vf magnitude = (vf)((vu)x & 0x7fffffffu);
  vf capped = magnitude > splat(10.0f) ? splat(10.0f) : magnitude;
  vf far = splat(1.0f) - splat(2.0f) / (exp2<6>(capped * splat(2.0f * LOG2E)) + splat(1.0f));
  vf square = x * x, near = splat(-5.70498872745e-3f);
  near = near * square + splat(2.06390887954e-2f);
  near = near * square + splat(-5.37397155531e-2f);
  near = near * square + splat(1.33314422036e-1f);
  near = near * square + splat(-3.33332819422e-1f);
  near = near * square * magnitude + magnitude;
  vf found = magnitude < splat(0.625f) ? near : far;
  return (vf)((vu)found | ((vu)x & 0x80000000u));
}

}  // namespace blendkv::BLENDKV_ISA
