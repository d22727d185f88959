// The softmax of a row of products: all of them at once, or some at a time.
#pragma once
#include "exp2.h"

namespace {

// Weights 2^((s − top) · factor) of n products, in place, in whole vectors; the padding becomes 0. Returns 1 / Σ of what stood in its
// stead.
inline float softmax_row(float* s, int64_t n, vf factor) {
  const int64_t padded = round_up(n, VL);
  for (int64_t j = n; j < padded; ++j) s[j] = -__builtin_inff();
  vf top = Isa::set1(kLowest);
  for (int64_t j = 0; j < padded; j += VL) top = Isa::max(Isa::load(s + j), top);
  const vf largest = Isa::set1(Isa::lanes_max(top));
  vf total = Isa::set1(0);
  for (int64_t j = 0; j < padded; j += VL) {
    const vf weights = exp2_nonpositive((Isa::load(s + j) - largest) * factor);
    total += weights;
    Isa::store(s + j, weights);
  }
  return 1 / Isa::lanes_sum(total);
}

// What a row made of the products so far: the largest, and the totals of weights 2^((s − top) · factor).
struct RowSoftmax {
  float top = kLowest;
  float totals[VL] = {};
};

// Weights of n products more, in place and padded with zeros to whole vectors; where the largest grows, `output` and the totals shrink.
inline void weigh(float* s, int64_t n, vf factor, RowSoftmax* row, float* output, int64_t padded_dim) {
  const int64_t padded = round_up(n, VL);
  for (int64_t j = n; j < padded; ++j) s[j] = -__builtin_inff();
  vf tops = Isa::set1(row->top);
  for (int64_t j = 0; j < padded; j += VL) tops = Isa::max(Isa::load(s + j), tops);
  const float top = Isa::lanes_max(tops);
  vf totals = Isa::load(row->totals);
  if (top > row->top) {
    const vf shrink = exp2_nonpositive(Isa::set1(row->top - top) * factor);
    for (int64_t d = 0; d < padded_dim; d += VL) Isa::store(output + d, Isa::load(output + d) * shrink);
    totals = totals * shrink;
    row->top = top;
  }
  const vf largest = Isa::set1(row->top);
  for (int64_t j = 0; j < padded; j += VL) {
    const vf weights = exp2_nonpositive((Isa::load(s + j) - largest) * factor);
    totals += weights;
    Isa::store(s + j, weights);
  }
  Isa::store(row->totals, totals);
}

}  // namespace
