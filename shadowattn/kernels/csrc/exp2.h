// The exponential of every softmax, a vector at a time.
#pragma once
#include "isa.h"

namespace {

// What differences of products are multiplied with: a weight is 2 to the power of that. The difference comes first, so that none is
// above 0, however large products are. Queries have the scale's sign. Neither 0 nor ∞, which would make NaN of −∞ and of 0.
inline vf weight_factor(float scale) {
  return Isa::set1(min_of(max_of((scale < 0 ? -scale : scale) * kLog2e, __FLT_MIN__), __FLT_MAX__));
}

// 2^t for t ≤ 0, to about 2 units in the last place; exactly 0 for t ≤ −150 (−127 without AVX-512), NaN for NaN.
// Base 2 because log2(e) then goes into the scale of the scores once, and the reduction of the range is a subtraction.
template <int DEGREE = 6>
inline vf exp2_nonpositive(vf t) {
  constexpr float c[] = {1.0f,          0.693147181f,   0.240226507f, 0.0555041087f,
                         0.00961812911f, 0.00133335581f, 0.000154035304f};  // (ln 2)^i / i!
  t = Isa::max(Isa::set1(Isa::kLeastExponent), t);
  const vf whole = Isa::whole(t);
  const vf part = t - whole;
  vf p = Isa::set1(c[DEGREE]);
#pragma GCC unroll 8
  for (int i = DEGREE - 1; i >= 0; --i) p = p * part + Isa::set1(c[i]);
  return Isa::scale(p, whole);
}

// The same to 13 bits, for outputs that are rounded to the 8 of a bfloat16; exactly 0 for t ≤ −127, or −126 with AVX-512. 2^0 is 0.999925
// there, which weights and their total share.
template <class I = Isa>
inline vf exp2_coarse(vf t) {
  if constexpr (I::kScalesByFloor) {
    // The cubic whose largest relative error over 0 … 1 is least, 7.5e-5: one degree and three operations fewer than with the nearest
    // whole number.
    const vf part = I::above_floor(t);
    const vf p = (I::set1(0.0780245511f) * part + I::set1(0.226067143f)) * part + I::set1(0.695833528f);
    return I::scale_by_floor(p * part + I::set1(0.999925219f), t);
  } else {
    return exp2_nonpositive<4>(t);
  }
}

}  // namespace
