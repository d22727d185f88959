// Exact attention where every row has a list of its own.
//
// A row alone would fetch each of its keys from a far cache. So up to 64 rows go through K together, in windows of keys that stay
// in a near cache from row to row; then, their softmax done, through V. Scores are dot products, D in the lanes, VL keys at a
// time and one sum over lanes for all of them.
#pragma once
#include "abi.h"
#include "parallel.h"
#include "row_math.h"
#include "softmax.h"

namespace {

constexpr int64_t kRowsPerTask = 64;
constexpr int64_t kWindowBytes = 32 << 10;   // of K, then of V: what the first-level cache holds beside the rest
constexpr int64_t kWeightBytes = 384 << 10;  // scores of all rows of a task, in the second-level cache
constexpr int kListAhead = 6;                // cache lines of a row's list that are fetched for its next window

// First place in [from, to) whose key is ≥ limit, in an ascending list.
inline const int32_t* first_from(const int32_t* from, const int32_t* to, int64_t limit) {
  while (from < to) {
    const int32_t* middle = from + (to - from) / 2;
    if (*middle < limit) from = middle + 1;
    else to = middle;
  }
  return from;
}

// s[j] = dot(q, k[keys[j]]) for n ≤ VL keys, where the last one stands in for those that are missing.
template <class T, int DIM>
inline void score_keys(const void* q, const T* k, int64_t stride, const int32_t* keys, int64_t n, int64_t dim, float* s) {
  vf sums[VL];
  const T* rows[VL];
  if (n >= VL) {
#pragma GCC unroll 16
    for (int u = 0; u < VL; ++u) rows[u] = k + keys[u] * stride;
  } else {
    for (int u = 0; u < VL; ++u) rows[u] = k + keys[min_of<int64_t>(u, n - 1)] * stride;
  }
#pragma GCC unroll 2
  for (int u = 0; u < VL; u += kKeysAtOnce) RowMath<T>::template add_dots<DIM>(sums + u, q, rows + u, dim);
  Isa::store(s, Isa::sums_of(sums));
}

struct RowState {
  const int32_t *begin, *end, *next;
  float inverse_total;
};

// The end of the groups of VL keys, counted from `from`, that begin before `limit`.
inline const int32_t* window_end(const int32_t* from, const int32_t* end, int64_t limit) {
  while (from < end && *from < limit) from += VL;
  return from < end ? from : end;
}

template <class T, int DIM>
void attend_rows_task(const SaAttend& a, int64_t head, int64_t from, int64_t to, int64_t longest, char* scratch) {
  const int64_t dim = DIM ? DIM : a.dim, padded = round_up(dim, 32), lists = ceil_div(a.rows, a.query_block), rows = to - from;
  const int64_t k_stride = DIM ? DIM : a.k.row_stride, v_stride = DIM ? DIM : a.v.row_stride;
  const int64_t window = max_of<int64_t>(kWindowBytes / (dim * static_cast<int64_t>(sizeof(T))), 4 * VL);
  const int64_t group = a.kv_head[head];
  const T* q = static_cast<const T*>(a.q.data) + head * a.q.head_stride;
  const T* k = static_cast<const T*>(a.k.data) + group * a.k.head_stride;
  const T* v = static_cast<const T*>(a.v.data) + group * a.v.head_stride;
  float* outputs = reinterpret_cast<float*>(scratch);
  float* queries = outputs + rows * padded;
  float* weights = queries + rows * padded;
  RowState state[kRowsPerTask];
  int64_t last_key = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t list = head * lists + (from + r) / a.query_block;
    const int32_t *begin = a.indices + a.indptr[list], *end = a.indices + a.indptr[list + 1];
    if (end[-1] > a.positions[from + r]) end = first_from(begin, end, a.positions[from + r] + 1);
    state[r] = {begin, end, begin, 0};
    last_key = max_of<int64_t>(last_key, end[-1]);
    RowMath<T>::load_query(q + (from + r) * a.q.row_stride, dim, queries + r * padded, a.scale < 0);
    memset(outputs + r * padded, 0, static_cast<size_t>(padded) * 4);
  }
  const vf factor = weight_factor(a.scale);
  for (int64_t limit = window; limit - window <= last_key; limit += window) {
    for (int64_t r = 0; r < rows; ++r) {
      RowState& row = state[r];
      const int32_t* stop = window_end(row.next, row.end, limit);
      for (const int32_t* keys = row.next; keys < stop; keys += VL)
        score_keys<T, DIM>(queries + r * padded, k, k_stride, keys, stop - keys, dim, weights + r * longest + (keys - row.begin));
      for (int line = 0; line < kListAhead; ++line) __builtin_prefetch(stop + 16 * line, 0, 3);
      row.next = stop;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    RowState& row = state[r];
    row.inverse_total = softmax_row(weights + r * longest, row.end - row.begin, factor);
    RowMath<T>::round_weights(weights + r * longest, row.end - row.begin);
    row.next = row.begin;
  }
  for (int64_t limit = window; limit - window <= last_key; limit += window) {
    for (int64_t r = 0; r < rows; ++r) {
      RowState& row = state[r];
      const int32_t* stop = window_end(row.next, row.end, limit);
      if (stop == row.next) continue;
      RowMath<T>::template add_values<DIM>(outputs + r * padded, weights + r * longest, row.next - row.begin, v, v_stride,
                                           row.next, stop - row.next, dim);
      row.next = stop;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    T* out = static_cast<T*>(a.out.data) + head * a.out.head_stride + (from + r) * a.out.row_stride;
    for (int64_t d = 0; d < dim; ++d) from_float(outputs[r * padded + RowMath<T>::place(d)] * state[r].inverse_total, out + d);
  }
}

template <class T>
int attend_rows(const SaAttend& a) {
  int64_t longest = 1;
  for (int64_t list = 0; list < a.heads * ceil_div(a.rows, a.query_block); ++list)
    longest = max_of(longest, a.indptr[list + 1] - a.indptr[list]);
  longest = round_up(longest, VL);
  int64_t rows = max_of<int64_t>(min_of<int64_t>(kWeightBytes / (4 * longest), kRowsPerTask), 8);
  while (rows > 4 && a.heads * ceil_div(a.rows, rows) < 4 * a.threads) rows /= 2;  // enough tasks to share out
  const int64_t blocks = ceil_div(a.rows, rows), padded = round_up(a.dim, 32);
  return run_queue(a.heads * blocks, a.threads, rows * (2 * padded + longest) * 4, [&](int64_t t, char* scratch) {
    const int64_t head = t / blocks, from = (blocks - 1 - t % blocks) * rows, to = min_of(from + rows, a.rows);
    const bool dense_rows = a.k.row_stride == a.dim && a.v.row_stride == a.dim;  // constant strides need no multiplications
    if (a.dim == 64 && dense_rows) attend_rows_task<T, 64>(a, head, from, to, longest, scratch);
    else if (a.dim == 128 && dense_rows) attend_rows_task<T, 128>(a, head, from, to, longest, scratch);
    else attend_rows_task<T, 0>(a, head, from, to, longest, scratch);
  });
}

}  // namespace
