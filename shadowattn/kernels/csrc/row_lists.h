// By which scale each head is quantised, how many keys each row keeps, and where its list begins, made of Q and of a share of the keys
// for each head: tensors of them that a caller makes and the checks that they need take longer than some of the kernels.
#pragma once
#include <cstdlib>

#include "abi.h"
#include "largest.h"
#include "numbers.h"

namespace {

// The least integer that is not below x ≥ 0.
template <class F>
inline int64_t least_above(F x) {
  const int64_t whole = static_cast<int64_t>(x);
  return whole + (static_cast<F>(whole) < x);
}

// `choose` of rows at `positions`, with `candidates` and `indptr` of their lists, and the heads' scales. `failed`: what a kernel returns
// where there was no memory for them (1), or no scale (2).
class RowLists {
 public:
  SaEstimate choose;
  int failed = 1;

  RowLists(const SaEstimate& of, const int64_t* positions, const SaBudgets& budgets) : choose(of) {
    const int64_t rows = of.rows, lists = of.heads * rows;
    int64_t* candidates = static_cast<int64_t*>(malloc(static_cast<size_t>(rows + lists + 1 + of.heads) * sizeof(int64_t)));
    choose.to.candidates = candidates;
    if (!candidates) return;
    int64_t* ends = candidates + rows;
    for (int64_t r = 0; r < rows; ++r) candidates[r] = positions[r] + 1;
    ends[0] = 0;
    for (int64_t head = 0, list = 0; head < of.heads; ++head)
      for (int64_t r = 0; r < rows; ++r, ++list) {
        const int64_t share = least_above(budgets.retention[head] * static_cast<double>(candidates[r]));
        ends[list + 1] = ends[list] + min_of(max_of(share, budgets.least), candidates[r]);
      }
    *budgets.kept = ends[lists];
    choose.to.indptr = ends;
    failed = 0;
    if (of.q_scales) return;
    float* scales = reinterpret_cast<float*>(ends + lists + 1);
    failed = measure_scales(of, scales);
    choose.q_scales = scales;
  }
  ~RowLists() { free(const_cast<int64_t*>(choose.to.candidates)); }
  RowLists(const RowLists&) = delete;
  RowLists& operator=(const RowLists&) = delete;
};

}  // namespace
