// What attention of rows with lists of their own multiplies: a row with keys, and its weights with values.
//
// Two forms with the same functions, RowFloats and RowPairs: load_query() and add_dots() for Q·K; round_weights(), add_values() and
// place(), where the sum of a dimension is, for weights·V.
#pragma once
#include <type_traits>

#include "isa.h"

namespace {

constexpr int kKeysAtOnce = VL < 8 ? VL : 8;  // dot products in flight: enough to hide the latency of a fused multiply-add

// o[d] += Σ_j p[j] · v[idx[j]][d], in panels of P vectors so that the sums stay in registers.
template <class T, int P, bool HALF = false>
inline void add_panel(float* o, const float* p, const T* v, int64_t stride, const int32_t* idx, int64_t n) {
  constexpr int U = Isa::kRegisters / 8;
  vf sums[U][P];
#pragma GCC unroll 4
  for (int i = 0; i < P; ++i) {
    sums[0][i] = Isa::load(o + i * VL);
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) sums[u][i] = Isa::set1(0);
  }
  int64_t j = 0;
  for (; j + U <= n; j += U) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const vf weight = Isa::set1(p[j + u]);
      const T* row = v + idx[j + u] * stride;
#pragma GCC unroll 4
      for (int i = 0; i < P; ++i) sums[u][i] += weight * (HALF ? Isa::load_half(row + i * VL) : Isa::load(row + i * VL));
    }
  }
  for (; j < n; ++j) {
    const vf weight = Isa::set1(p[j]);
    const T* row = v + idx[j] * stride;
#pragma GCC unroll 4
    for (int i = 0; i < P; ++i) sums[0][i] += weight * (HALF ? Isa::load_half(row + i * VL) : Isa::load(row + i * VL));
  }
#pragma GCC unroll 4
  for (int i = 0; i < P; ++i) {
    vf sum = sums[0][i];
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) sum += sums[u][i];
    Isa::store(o + i * VL, sum);
  }
}

// Dot products of any dimension, by the sums of `Math`.
template <class Math, class T>
inline void score_four_by_four(const void* query, const T* k, int64_t stride, const int32_t* keys, int64_t n, int64_t dim, float* s) {
  for (int64_t j = 0; j < n; j += 4) {
    vf sums[4];
    const T* const rows[4] = {k + keys[j] * stride, k + keys[j + 1] * stride, k + keys[j + 2] * stride, k + keys[j + 3] * stride};
    Math::template add_dots<0, 4>(sums, query, rows, dim);
    Isa::store_sums(sums, s + j);
  }
}

template <class T>
struct RowFloats {
  // q in float32, padded with zeros to whole vectors, and turned where it is `negative`.
  static void load_query(const T* q, int64_t dim, void* to, bool negative = false) {
    float* out = static_cast<float*>(to);
    for (int64_t d = 0; d < dim; ++d) out[d] = negative ? -to_float(q[d]) : to_float(q[d]);
    for (int64_t d = dim; d < round_up(dim, 32); ++d) out[d] = 0;
  }
  template <int DIM, int KEYS = kKeysAtOnce>
  static void add_dots(vf* sums, const void* query, const T* const* rows, int64_t dim_) {
    const int64_t dim = DIM ? DIM : dim_;
    const float* q = static_cast<const float*>(query);
#pragma GCC unroll 8
    for (int u = 0; u < KEYS; ++u) sums[u] = Isa::set1(0);
#pragma GCC unroll 8
    for (int64_t d = 0; d + VL <= dim; d += VL) {
      const vf x = Isa::load(q + d);
#pragma GCC unroll 8
      for (int u = 0; u < KEYS; ++u) sums[u] += x * Isa::load(rows[u] + d);
    }
    if (dim % VL) {
      const vf x = Isa::load(q + dim / VL * VL);
      for (int u = 0; u < KEYS; ++u) sums[u] += x * Isa::load_half(rows[u] + dim / VL * VL);
    }
  }

  // s[j] = q · k[keys[j]] for n keys, four at a time: `keys` and `s` have room for the last ones.
  template <int DIM>
  static void score(const void* query, const T* k, int64_t stride, const int32_t* keys, int64_t n, int64_t dim, float* s) {
    if constexpr (DIM % VL || DIM == 0 || DIM / VL > Isa::kRegisters / 2) {
      score_four_by_four<RowFloats<T>>(query, k, stride, keys, n, dim, s);
    } else {
      constexpr int P = DIM / VL;
      vf q[P];
#pragma GCC unroll 16
      for (int i = 0; i < P; ++i) q[i] = Isa::load(static_cast<const float*>(query) + i * VL);
      for (int64_t j = 0; j < n; j += 4) {
        vf sums[4];
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) {
          const T* row = k + keys[j + u] * stride;
          sums[u] = q[0] * Isa::load(row);
#pragma GCC unroll 16
          for (int i = 1; i < P; ++i) sums[u] += q[i] * Isa::load(row + i * VL);
        }
        Isa::store_sums(sums, s + j);
      }
    }
  }

  static void round_weights(float*, int64_t) {}
  template <int DIM>
  static void add_values(float* o, const float* weights, int64_t from, const T* v, int64_t stride, const int32_t* idx, int64_t n,
                         int64_t dim_) {
    const float* p = weights + from;
    const int64_t dim = DIM ? DIM : dim_;
    int64_t d = 0;
    for (; d + 4 * VL <= dim; d += 4 * VL) add_panel<T, 4>(o + d, p, v + d, stride, idx, n);
    for (; d + 2 * VL <= dim; d += 2 * VL) add_panel<T, 2>(o + d, p, v + d, stride, idx, n);
    for (; d + VL <= dim; d += VL) add_panel<T, 1>(o + d, p, v + d, stride, idx, n);
    if (d < dim) add_panel<T, 1, true>(o + d, p, v + d, stride, idx, n);
  }
  static int64_t place(int64_t d) { return d; }
};

// Two keys at a time: their values are interleaved, which leaves the sums of 32 dimensions in the order of place().
// P: 32-dimension panels at once. Weights arrive rounded to bfloat16, in pairs.
template <class I, int P, bool END>
inline void add_panel_pairs(float* o, const uint16_t* p, const bf16* v, int64_t stride, const int32_t* idx, int64_t n,
                            int64_t end) {
  constexpr int U = 4;
  vf low[U][P], high[U][P];
#pragma GCC unroll 4
  for (int i = 0; i < P; ++i) {
    low[0][i] = I::load(o + 32 * i);
    high[0][i] = I::load(o + 32 * i + 16);
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) low[u][i] = high[u][i] = I::set1(0);
  }
  const auto add_two = [&](int u, const bf16* a, const bf16* b, typename I::pairs w) {
#pragma GCC unroll 4
    for (int i = 0; i < P; ++i) {
      const typename I::pairs x = END ? I::load_pairs(a + 32 * i, end) : I::load_pairs(a + 32 * i);
      const typename I::pairs y = END ? I::load_pairs(b + 32 * i, end) : I::load_pairs(b + 32 * i);
      low[u][i] = I::add_dots(low[u][i], w, I::interleave_low(x, y));
      high[u][i] = I::add_dots(high[u][i], w, I::interleave_high(x, y));
    }
  };
  int64_t j = 0;
  for (; j + 2 * U <= n; j += 2 * U) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const int64_t at = j + 2 * u;
      add_two(u, v + idx[at] * stride, v + idx[at + 1] * stride, I::set1_pair(p + at));
    }
  }
  for (; j + 1 < n; j += 2) add_two(0, v + idx[j] * stride, v + idx[j + 1] * stride, I::set1_pair(p + j));
  if (j < n) {
    const uint16_t last[2] = {p[j], 0};
    add_two(0, v + idx[j] * stride, v + idx[j] * stride, I::set1_pair(last));
  }
#pragma GCC unroll 4
  for (int i = 0; i < P; ++i) {
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) {
      low[0][i] += low[u][i];
      high[0][i] += high[u][i];
    }
    I::store(o + 32 * i, low[0][i]);
    I::store(o + 32 * i + 16, high[0][i]);
  }
}

// bfloat16 on a level that multiplies it: pairs of products at a time, added in float32.
template <class I>
struct RowPairs {
  static void load_query(const bf16* q, int64_t dim, void* to, bool negative = false) {
    bf16* out = static_cast<bf16*>(to);
    for (int64_t d = 0; d < dim; ++d) out[d].bits = static_cast<uint16_t>(q[d].bits ^ (negative ? 0x8000 : 0));
    memset(out + dim, 0, static_cast<size_t>(round_up(dim, 32) - dim) * 2);
  }
  template <int DIM, int KEYS = kKeysAtOnce>
  static void add_dots(vf* sums, const void* query, const bf16* const* rows, int64_t dim_) {
    const int64_t dim = DIM ? DIM : dim_;
    const bf16* q = static_cast<const bf16*>(query);
#pragma GCC unroll 8
    for (int u = 0; u < KEYS; ++u) sums[u] = I::set1(0);
#pragma GCC unroll 8
    for (int64_t d = 0; d + 32 <= dim; d += 32) {
      const typename I::pairs x = I::load_pairs(q + d);
#pragma GCC unroll 8
      for (int u = 0; u < KEYS; ++u) sums[u] = I::add_dots(sums[u], x, I::load_pairs(rows[u] + d));
    }
    if (dim % 32) {
      const int64_t d = dim / 32 * 32;
      const typename I::pairs x = I::load_pairs(q + d);
      for (int u = 0; u < KEYS; ++u) sums[u] = I::add_dots(sums[u], x, I::load_pairs(rows[u] + d, dim - d));
    }
  }

  template <int DIM>
  static void score(const void* query, const bf16* k, int64_t stride, const int32_t* keys, int64_t n, int64_t dim, float* s) {
    if constexpr (DIM == 0) {
      score_four_by_four<RowPairs<I>>(query, k, stride, keys, n, dim, s);
    } else {
      constexpr int P = DIM / 32;
      typename I::pairs q[P];
#pragma GCC unroll 4
      for (int i = 0; i < P; ++i) q[i] = I::load_pairs(static_cast<const bf16*>(query) + 32 * i);
      for (int64_t j = 0; j < n; j += 4) {
        vf sums[4];
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) {
          const bf16* row = k + keys[j + u] * stride;
          sums[u] = I::set1(0);
#pragma GCC unroll 4
          for (int i = 0; i < P; ++i) sums[u] = I::add_dots(sums[u], q[i], I::load_pairs(row + 32 * i));
        }
        I::store_sums(sums, s + j);
      }
    }
  }

  // Weights become bfloat16 in place: a write never passes the reads.
  static void round_weights(float* weights, int64_t n) {
    uint16_t* rounded = reinterpret_cast<uint16_t*>(weights);
    for (int64_t j = 0; j < n; j += VL) I::store_rounded(rounded + j, I::load(weights + j));
  }
  template <int DIM>
  static void add_values(float* o, const float* weights, int64_t from, const bf16* v, int64_t stride, const int32_t* idx,
                         int64_t n, int64_t dim_) {
    const int64_t dim = DIM ? DIM : dim_;
    const uint16_t* rounded = reinterpret_cast<const uint16_t*>(weights) + from;
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_panel_pairs<I, 2, false>(o + d, rounded, v + d, stride, idx, n, 0);
    for (; d + 32 <= dim; d += 32) add_panel_pairs<I, 1, false>(o + d, rounded, v + d, stride, idx, n, 0);
    if (d < dim) add_panel_pairs<I, 1, true>(o + d, rounded, v + d, stride, idx, n, dim - d);
  }
  static int64_t place(int64_t d) { return I::interleaved_at(d); }
};

template <class T>
using RowMath = std::conditional_t<Isa::kBf16Dot && sizeof(T) == 2, RowPairs<Isa>, RowFloats<T>>;

}  // namespace
