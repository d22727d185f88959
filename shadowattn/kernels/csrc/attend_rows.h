// Exact attention where every row has a list of its own.
//
// A row alone would fetch each of its keys from a far cache. So up to 64 rows go through K together, in windows of keys that stay
// in a near cache from row to row; then, their softmax done, through V. Scores are dot products, D in the lanes, VL keys at a
// time and one sum over lanes for all of them.
#pragma once
#include "abi.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kRowsPerTask = 64;
constexpr int64_t kWindowBytes = 32 << 10;   // of K, then of V: what the first-level cache holds beside the rest
constexpr int64_t kWeightBytes = 384 << 10;  // scores of all rows of a task, in the second-level cache
constexpr int kListAhead = 6;                // cache lines of a row's list that are fetched for its next window
constexpr int kKeysAtOnce = VL < 8 ? VL : 8;  // dot products in flight: enough to hide the latency of a fused multiply-add

// Scores of n keys: s[j] = dot(q, k[idx[j]]) · scale. Writes whole vectors; what lies past n is −∞.
template <class T>
struct RowDots {
  // q in float32, padded with zeros to whole vectors.
  static void prepare(const T* q, int64_t dim, void* to) {
    float* out = static_cast<float*>(to);
    for (int64_t d = 0; d < dim; ++d) out[d] = to_float(q[d]);
    for (int64_t d = dim; d < round_up(dim, 32); ++d) out[d] = 0;
  }
  template <int DIM>
  static void add(vf* sums, const void* query, const T* const* rows, int64_t dim_) {
    const int64_t dim = DIM ? DIM : dim_;
    const float* q = static_cast<const float*>(query);
#pragma GCC unroll 8
    for (int u = 0; u < kKeysAtOnce; ++u) sums[u] = set1(0);
#pragma GCC unroll 8
    for (int64_t d = 0; d + VL <= dim; d += VL) {
      const vf x = load(q + d);
#pragma GCC unroll 8
      for (int u = 0; u < kKeysAtOnce; ++u) sums[u] += x * load(rows[u] + d);
    }
    if (dim % VL) {
      const vf x = load(q + dim / VL * VL);
      for (int u = 0; u < kKeysAtOnce; ++u) sums[u] += x * load_half(rows[u] + dim / VL * VL);
    }
  }
};

// o[d] += Σ_j p[j] · v[idx[j]][d], in panels of P vectors so that the sums stay in registers.
template <class T, int P, bool HALF = false>
inline void add_panel(float* o, const float* p, const T* v, int64_t stride, const int32_t* idx, int64_t n) {
  constexpr int U = SA_LEVEL >= 2 ? 4 : 2;
  vf sums[U][P];
#pragma GCC unroll 4
  for (int i = 0; i < P; ++i) {
    sums[0][i] = load(o + i * VL);
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) sums[u][i] = set1(0);
  }
  int64_t j = 0;
  for (; j + U <= n; j += U) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const vf weight = set1(p[j + u]);
      const T* row = v + idx[j + u] * stride;
#pragma GCC unroll 4
      for (int i = 0; i < P; ++i) sums[u][i] += weight * (HALF ? load_half(row + i * VL) : load(row + i * VL));
    }
  }
  for (; j < n; ++j) {
    const vf weight = set1(p[j]);
    const T* row = v + idx[j] * stride;
#pragma GCC unroll 4
    for (int i = 0; i < P; ++i) sums[0][i] += weight * (HALF ? load_half(row + i * VL) : load(row + i * VL));
  }
#pragma GCC unroll 4
  for (int i = 0; i < P; ++i) {
    vf sum = sums[0][i];
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) sum += sums[u][i];
    store(o + i * VL, sum);
  }
}

template <class T>
struct RowValues {
  static void prepare(float*, int64_t) {}
  template <int DIM>
  static void add(float* o, const float* weights, int64_t from, const T* v, int64_t stride, const int32_t* idx, int64_t n,
                  int64_t dim_) {
    const float* p = weights + from;
    const int64_t dim = DIM ? DIM : dim_;
    int64_t d = 0;
    for (; d + 4 * VL <= dim; d += 4 * VL) add_panel<T, 4>(o + d, p, v + d, stride, idx, n);
    for (; d + 2 * VL <= dim; d += 2 * VL) add_panel<T, 2>(o + d, p, v + d, stride, idx, n);
    for (; d + VL <= dim; d += VL) add_panel<T, 1>(o + d, p, v + d, stride, idx, n);
    if (d < dim) add_panel<T, 1, true>(o + d, p, v + d, stride, idx, n);
  }
  static float element(const float* o, int64_t d) { return o[d]; }
};

#if SA_LEVEL >= 3
inline __m512bh load_bf16(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline __m512bh load_bf16_end(const bf16* p, int64_t n) {
  return (__m512bh)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1), p);
}

// Pairs of bfloat16 products at a time, added in float32.
template <>
struct RowDots<bf16> {
  static void prepare(const bf16* q, int64_t dim, void* to) {
    memcpy(to, q, static_cast<size_t>(dim) * 2);
    memset(static_cast<bf16*>(to) + dim, 0, static_cast<size_t>(round_up(dim, 32) - dim) * 2);
  }
  template <int DIM>
  static void add(vf* sums, const void* query, const bf16* const* rows, int64_t dim_) {
    const int64_t dim = DIM ? DIM : dim_;
    const bf16* q = static_cast<const bf16*>(query);
    __m512 part[kKeysAtOnce];
#pragma GCC unroll 8
    for (int u = 0; u < kKeysAtOnce; ++u) part[u] = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int64_t d = 0; d + 32 <= dim; d += 32) {
      const __m512bh x = load_bf16(q + d);
#pragma GCC unroll 8
      for (int u = 0; u < kKeysAtOnce; ++u) part[u] = _mm512_dpbf16_ps(part[u], x, load_bf16(rows[u] + d));
    }
    if (dim % 32) {
      const int64_t d = dim / 32 * 32;
      const __m512bh x = load_bf16(q + d);
      for (int u = 0; u < kKeysAtOnce; ++u) part[u] = _mm512_dpbf16_ps(part[u], x, load_bf16_end(rows[u] + d, dim - d));
    }
#pragma GCC unroll 8
    for (int u = 0; u < kKeysAtOnce; ++u) sums[u] = part[u];
  }
};

// Two keys at a time: their values are interleaved within 128-bit lanes, which leaves the sums of 32 dimensions in the order
// that element() undoes. P: 32-dimension panels at once. Weights arrive rounded to bfloat16, in pairs.
template <int P, bool END>
inline void add_panel_bf16(float* o, const uint16_t* p, const bf16* v, int64_t stride, const int32_t* idx, int64_t n,
                           int64_t end) {
  constexpr int U = 4;
  __m512 low[U][P], high[U][P];
#pragma GCC unroll 4
  for (int i = 0; i < P; ++i) {
    low[0][i] = load(o + 32 * i);
    high[0][i] = load(o + 32 * i + 16);
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) low[u][i] = high[u][i] = _mm512_setzero_ps();
  }
  const auto pair = [&](int64_t j, int u) {
    const bool two = j + 1 < n;
    const bf16 *a = v + idx[j] * stride, *b = two ? v + idx[j + 1] * stride : a;
    uint32_t weights;
    memcpy(&weights, p + j, 4);  // p is padded with zeros to a multiple of VL
    const __m512bh w = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(weights));
#pragma GCC unroll 4
    for (int i = 0; i < P; ++i) {
      const __m512i x = (__m512i)(END ? load_bf16_end(a + 32 * i, end) : load_bf16(a + 32 * i));
      const __m512i y = (__m512i)(END ? load_bf16_end(b + 32 * i, end) : load_bf16(b + 32 * i));
      low[u][i] = _mm512_dpbf16_ps(low[u][i], w, (__m512bh)_mm512_unpacklo_epi16(x, y));
      high[u][i] = _mm512_dpbf16_ps(high[u][i], w, (__m512bh)_mm512_unpackhi_epi16(x, y));
    }
  };
  int64_t j = 0;
  for (; j + 2 * U <= n; j += 2 * U) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) pair(j + 2 * u, u);
  }
  for (; j < n; j += 2) pair(j, 0);
#pragma GCC unroll 4
  for (int i = 0; i < P; ++i) {
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) {
      low[0][i] += low[u][i];
      high[0][i] += high[u][i];
    }
    store(o + 32 * i, low[0][i]);
    store(o + 32 * i + 16, high[0][i]);
  }
}

template <>
struct RowValues<bf16> {
  // Weights become bfloat16 in place: a write never passes the reads.
  static void prepare(float* weights, int64_t n) {
    uint16_t* rounded = reinterpret_cast<uint16_t*>(weights);
    for (int64_t j = 0; j < n; j += 16) {
      const __m256bh half = _mm512_cvtneps_pbh(load(weights + j));
      memcpy(rounded + j, &half, sizeof half);
    }
  }
  template <int DIM>
  static void add(float* o, const float* weights, int64_t from, const bf16* v, int64_t stride, const int32_t* idx, int64_t n,
                  int64_t dim_) {
    const int64_t dim = DIM ? DIM : dim_;
    const uint16_t* rounded = reinterpret_cast<const uint16_t*>(weights) + from;
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_panel_bf16<2, false>(o + d, rounded, v + d, stride, idx, n, 0);
    for (; d + 32 <= dim; d += 32) add_panel_bf16<1, false>(o + d, rounded, v + d, stride, idx, n, 0);
    if (d < dim) add_panel_bf16<1, true>(o + d, rounded, v + d, stride, idx, n, dim - d);
  }
  static float element(const float* o, int64_t d) {
    const int64_t lane = d % 32 / 8, within = d % 8;
    return o[d / 32 * 32 + (within < 4 ? 4 * lane + within : 16 + 4 * lane + within - 4)];
  }
};
#endif

// First place in [from, to) whose key is ≥ limit, in an ascending list.
inline const int32_t* first_from(const int32_t* from, const int32_t* to, int64_t limit) {
  while (from < to) {
    const int32_t* middle = from + (to - from) / 2;
    if (*middle < limit) from = middle + 1;
    else to = middle;
  }
  return from;
}

// s[j] = dot(q, k[keys[j]]) · scale for n ≤ VL keys, where the last one stands in for those that are missing.
template <class T, int DIM>
inline void score_keys(const void* q, const T* k, int64_t stride, const int32_t* keys, int64_t n, int64_t dim, vf scale, float* s) {
  vf sums[VL];
  const T* rows[VL];
  if (n >= VL) {
#pragma GCC unroll 16
    for (int u = 0; u < VL; ++u) rows[u] = k + keys[u] * stride;
  } else {
    for (int u = 0; u < VL; ++u) rows[u] = k + keys[min_of<int64_t>(u, n - 1)] * stride;
  }
#pragma GCC unroll 2
  for (int u = 0; u < VL; u += kKeysAtOnce) RowDots<T>::template add<DIM>(sums + u, q, rows + u, dim);
  store(s, sums_of(sums) * scale);
}

// Softmax of n scores in place, in whole vectors; the padding becomes 0. Returns 1 / Σ of what stood in its stead.
inline float softmax_row(float* s, int64_t n) {
  const int64_t padded = round_up(n, VL);
  for (int64_t j = n; j < padded; ++j) s[j] = -__builtin_inff();
  vf top = set1(kLowest);
  for (int64_t j = 0; j < padded; j += VL) top = vmax(load(s + j), top);
  const vf largest = set1(lanes_max(top));
  vf total = set1(0);
  for (int64_t j = 0; j < padded; j += VL) {
    const vf weights = exp2_nonpositive(load(s + j) - largest);
    total += weights;
    store(s + j, weights);
  }
  return 1 / lanes_sum(total);
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
    RowDots<T>::prepare(q + (from + r) * a.q.row_stride, dim, queries + r * padded);
    memset(outputs + r * padded, 0, static_cast<size_t>(padded) * 4);
  }
  const vf factor = set1(a.scale * kLog2e);
  for (int64_t limit = window; limit - window <= last_key; limit += window) {
    for (int64_t r = 0; r < rows; ++r) {
      RowState& row = state[r];
      const int32_t* stop = window_end(row.next, row.end, limit);
      for (const int32_t* keys = row.next; keys < stop; keys += VL)
        score_keys<T, DIM>(queries + r * padded, k, k_stride, keys, stop - keys, dim, factor, weights + r * longest + (keys - row.begin));
      for (int line = 0; line < kListAhead; ++line) __builtin_prefetch(stop + 16 * line, 0, 3);
      row.next = stop;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    RowState& row = state[r];
    row.inverse_total = softmax_row(weights + r * longest, row.end - row.begin);
    RowValues<T>::prepare(weights + r * longest, row.end - row.begin);
    row.next = row.begin;
  }
  for (int64_t limit = window; limit - window <= last_key; limit += window) {
    for (int64_t r = 0; r < rows; ++r) {
      RowState& row = state[r];
      const int32_t* stop = window_end(row.next, row.end, limit);
      if (stop == row.next) continue;
      RowValues<T>::template add<DIM>(outputs + r * padded, weights + r * longest, row.next - row.begin, v, v_stride, row.next,
                                      stop - row.next, dim);
      row.next = stop;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    T* out = static_cast<T*>(a.out.data) + head * a.out.head_stride + (from + r) * a.out.row_stride;
    for (int64_t d = 0; d < dim; ++d) from_float(RowValues<T>::element(outputs + r * padded, d) * state[r].inverse_total, out + d);
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
