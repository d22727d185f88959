// What attention of blocks that share a list multiplies, a tile of keys at a time: Q with keys, weights with values.
//
// Two forms with the same functions, BlockFloats and BlockPairs: load_query(), row() and scores() for Q·K; weigh() for the
// softmax; tile_values(), outputs() and output_at(), the place of a dimension in the outputs, for weights·V.
#pragma once
#include <type_traits>

#include "exp2.h"
#include "isa.h"

namespace {

constexpr int kStep = Isa::kRegisters / 4;  // keys, or dimensions, whose sums are in registers at once; D is a multiple of 8

// sums[u][i] += x[u][t] · y[t][lanes of vector i], over t < count: both products of attention have this form. `x` are kStep
// rows that are broadcast element by element, `y` has the rows of the block in its lanes.
template <int NV>
inline void broadcast_products(vf (*sums)[NV], const float* const* x, const float* y, int64_t lanes, int64_t count) {
  const float* row[kStep];
#pragma GCC unroll 8
  for (int u = 0; u < kStep; ++u) row[u] = x[u];
  for (int64_t t = 0; t < count; ++t) {
    vf in_lanes[NV];
#pragma GCC unroll 2
    for (int i = 0; i < NV; ++i) in_lanes[i] = Isa::load(y + t * lanes + i * VL);
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u) {
      const vf element = Isa::set1(row[u][t]);
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] += element * in_lanes[i];
    }
  }
}

template <class T>
struct BlockFloats {
  static constexpr int kDegree = sizeof(T) == 2 ? 4 : 6;  // bfloat16 weights keep 8 bits; degree 4 has 14
  using Row = const float*;  // of a tile: where it lies, or converted into a copy that stays in the cache

  // `to`: the query's lane of [D][lanes].
  static void load_query(const T* q, int64_t dim, float factor, float* to, int64_t lanes) {
    for (int64_t d = 0; d < dim; ++d) to[d * lanes] = to_float(q[d]) * factor;
  }

  static Row row(const T* x, int64_t dim, float* copy) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
    else {
      for (int64_t d = 0; d < dim; ++d) copy[d] = to_float(x[d]);
      return copy;
    }
  }

  template <int NV>
  static void scores(const float* queries, const Row* keys, int64_t dim, float, float* to, int64_t lanes) {
    vf sums[kStep][NV];
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] = Isa::set1(0);
    broadcast_products<NV>(sums, keys, queries, lanes, dim);
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) Isa::store(to + u * lanes + i * VL, sums[u][i]);
  }

  // The weights of a tile's scores, in place; returns `total` with the weights added to it.
  static vf weigh(float* scores, int64_t tile, int64_t lanes, vf top, vf total) {
    for (int64_t j = 0; j < tile; ++j) {
      const vf weight = exp2_nonpositive<kDegree>(Isa::load(scores + j * lanes) - top);
      total += weight;
      Isa::store(scores + j * lanes, weight);
    }
    return total;
  }

  static const Row* tile_values(const Row* rows, int64_t, int64_t, float*) { return rows; }

  template <int NV>
  static void outputs(float* o, const float* keep, const float* weights, const Row* values, int64_t d, int64_t tile,
                      int64_t lanes) {
    vf sums[kStep][NV];
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] = Isa::load(o + (d + u) * lanes + i * VL) * Isa::load(keep + i * VL);
    for (int64_t j = 0; j < tile; ++j) {
      const float* value = values[j] + d;
      vf weight[NV];
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) weight[i] = Isa::load(weights + j * lanes + i * VL);
#pragma GCC unroll 8
      for (int u = 0; u < kStep; ++u) {
        const vf element = Isa::set1(value[u]);
#pragma GCC unroll 2
        for (int i = 0; i < NV; ++i) sums[u][i] += element * weight[i];
      }
    }
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) Isa::store(o + (d + u) * lanes + i * VL, sums[u][i]);
  }

  static int64_t output_at(int64_t d, int64_t) { return d; }
};

// bfloat16 on a level that multiplies it: two dimensions of Q and K, or two keys' weights and values, share a lane.
template <class I>
struct BlockPairs {
  static constexpr int kDegree = 4;
  using Row = const bf16*;
  using pairs = typename I::pairs;

  struct Values {  // [tile / 2][D] pairs of keys
    const uint32_t* data;
    int64_t dim;
  };

  static void load_query(const bf16* q, int64_t dim, float, float* to, int64_t lanes) {
    for (int64_t d = 0; d < dim / 2; ++d) memcpy(to + d * lanes, q + 2 * d, 4);
  }

  static Row row(const bf16* x, int64_t, float*) { return x; }

  template <int NV>
  static void scores(const float* queries, const Row* keys, int64_t dim, float factor, float* to, int64_t lanes) {
    vf sums[kStep][NV];
    const bf16* row[kStep];
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u) {
      row[u] = keys[u];
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] = I::set1(0);
    }
    for (int64_t d = 0; d < dim / 2; ++d) {
      pairs in_lanes[NV];
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) in_lanes[i] = I::load_pairs(queries + d * lanes + i * VL);
#pragma GCC unroll 8
      for (int u = 0; u < kStep; ++u) {
        const pairs element = I::set1_pair(row[u] + 2 * d);
#pragma GCC unroll 2
        for (int i = 0; i < NV; ++i) sums[u][i] = I::add_dots(sums[u][i], in_lanes[i], element);
      }
    }
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) I::store(to + u * lanes + i * VL, sums[u][i] * I::set1(factor));
  }

  static vf weigh(float* scores, int64_t tile, int64_t lanes, vf top, vf total) {
    for (int64_t j = 0; j < tile; j += 2) {
      const vf a = exp2_nonpositive<kDegree>(I::load(scores + j * lanes) - top);
      const vf b = exp2_nonpositive<kDegree>(I::load(scores + (j + 1) * lanes) - top);
      total += a + b;
      I::store_pairs(scores + j / 2 * lanes, I::rounded_pairs(a, b));  // before the scores still to be read
    }
    return total;
  }

  static Values tile_values(const Row* rows, int64_t tile, int64_t dim, float* to) {
    uint32_t* data = reinterpret_cast<uint32_t*>(to);
    for (int64_t j = 0; j < tile; j += 2) interleave(rows[j], rows[j + 1], dim, data + j / 2 * dim);
    return {data, dim};
  }

  template <int NV>
  static void outputs(float* o, const float* keep, const float* weights, const Values& values, int64_t d, int64_t tile,
                      int64_t lanes) {
    vf sums[kStep][NV];
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] = I::load(o + (d + u) * lanes + i * VL) * I::load(keep + i * VL);
    for (int64_t j = 0; j < tile / 2; ++j) {
      const uint32_t* value = values.data + j * values.dim + d;
      pairs weight[NV];
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) weight[i] = I::load_pairs(weights + j * lanes + i * VL);
#pragma GCC unroll 8
      for (int u = 0; u < kStep; ++u) {
        const pairs element = I::set1_pair(value + u);
#pragma GCC unroll 2
        for (int i = 0; i < NV; ++i) sums[u][i] = I::add_dots(sums[u][i], weight[i], element);
      }
    }
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) I::store(o + (d + u) * lanes + i * VL, sums[u][i]);
  }

  static int64_t output_at(int64_t d, int64_t dim) { return d < dim / 32 * 32 ? I::interleaved_at(d) : d; }

 private:
  static void interleave(const bf16* a, const bf16* b, int64_t dim, uint32_t* to) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {  // the order within 32 dimensions that output_at() undoes
      const pairs x = I::load_pairs(a + d), y = I::load_pairs(b + d);
      I::store_pairs(to + d, I::interleave_low(x, y));
      I::store_pairs(to + d + VL, I::interleave_high(x, y));
    }
    for (; d < dim; ++d) to[d] = a[d].bits | static_cast<uint32_t>(b[d].bits) << 16;
  }
};

template <class T>
using BlockMath = std::conditional_t<Isa::kBf16Dot && sizeof(T) == 2, BlockPairs<Isa>, BlockFloats<T>>;

}  // namespace
