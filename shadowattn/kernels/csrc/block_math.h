// What attention of blocks that share a list multiplies, a tile of keys at a time: Q with keys, weights with values.
//
// Three forms with the same functions, BlockFloats, BlockPairs and BlockTiles: load_query(), key_row() and scores() for Q·K; weigh()
// for the softmax; value_row(), values(), add_values() and output_at(), where a dimension of a row's outputs lies, for weights·V.
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

// A tile's sums, which begin at 0 in the vector forms, are added to what the earlier ones left: a sum over thousands of keys rounds what
// it adds to less often.
inline void add_kept(float* to, const float* keep, vf sums) { Isa::store(to, Isa::load(to) * Isa::load(keep) + sums); }

// What those forms share that multiply a vector at a time: `Form` has some_scores() and some_outputs() for kStep keys or dimensions.
template <class Form>
struct BlockVectors {
  static constexpr int64_t kTile = 64;        // keys: Qᵀ, the tile's scores and the outputs fit in the first-level cache
  static constexpr int64_t kKeyStep = kStep;  // of which a tile is a multiple
  static constexpr int64_t kColumns = 64;     // rows of a block that go through a tile together
  static constexpr int64_t kPanel = 64;       // lanes whose numbers lie together, in order
  static constexpr bool kHidesOnTheWay = false;  // scores that a row does not have, in the softmax, and not before it
  static constexpr int64_t kDenseRows = 32;   // of a block whose list is every key
  static constexpr int64_t kTogether = 1;     // such blocks that go through a segment of the keys one after another
  struct Shapes {  // of tiles: none
    ~Shapes() {}   // not trivial: else an object that nobody names would be unused
  };

  static int64_t padded(int64_t dim) { return dim; }  // dimensions of Qᵀ and of the outputs

  // [tile][lanes]: Q·K. All lanes are columns. Between its steps, of kScoreKeys keys and up to two vectors of lanes, it calls ahead().
  static constexpr int64_t kScoreKeys = kStep;
  template <class Row, class Ahead>
  static void scores(const float* queries, int64_t, const Row* keys, int64_t tile, int64_t dim, float* to, int64_t lanes, int64_t,
                     Ahead& ahead) {
    by_two_vectors(lanes, [&](auto vectors, int64_t lane) {
      for (int64_t j = 0; j < tile; j += kStep) {
        Form::template some_scores<vectors>(queries + lane, keys + j, dim, to + j * lanes + lane, lanes);
        ahead();
      }
    });
  }

  // outputs = outputs · keep + weights · values.
  template <class Values>
  static void add_values(float* outputs, int64_t, const float* keep, const float* weights, const Values& values, int64_t tile,
                         int64_t dim, int64_t lanes, int64_t) {
    by_two_vectors(lanes, [&](auto vectors, int64_t lane) {
      for (int64_t d = 0; d < dim; d += kStep)
        Form::template some_outputs<vectors>(outputs + lane, keep + lane, weights + lane, values, d, tile, lanes);
    });
  }

 protected:
  template <class OfVectors>
  static void by_two_vectors(int64_t lanes, const OfVectors& of_vectors) {
    int64_t lane = 0;
    for (; lane + 2 * VL <= lanes; lane += 2 * VL) of_vectors(std::integral_constant<int, 2>(), lane);
    for (; lane < lanes; lane += VL) of_vectors(std::integral_constant<int, 1>(), lane);
  }
};

template <class T>
struct BlockFloats : BlockVectors<BlockFloats<T>> {
  using Row = const float*;  // of a tile: where it lies, or converted into a copy that stays in the cache
  using Values = const Row*;

  // Into its lane of all queries. Where the scale is negative it is turned.
  static void load_query(const T* q, int64_t dim, bool negative, float* queries, int64_t lane, int64_t lanes) {
    for (int64_t d = 0; d < dim; ++d) queries[d * lanes + lane] = negative ? -to_float(q[d]) : to_float(q[d]);
  }

  // Number j of a tile; `copies` has room for all of it.
  static Row key_row(const T* x, int64_t dim, int64_t j, float* copies) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
    else {
      float* copy = copies + j * dim;
      for (int64_t d = 0; d < dim; ++d) copy[d] = to_float(x[d]);
      return copy;
    }
  }
  static Row value_row(const T* x, int64_t dim, int64_t j, float* copies) { return key_row(x, dim, j, copies); }

  template <int NV>
  static void some_scores(const float* queries, const Row* keys, int64_t dim, float* to, int64_t lanes) {
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

  // The weights of a tile's scores, which score() reads of `scores`, and which they replace; returns their sum.
  template <class Score>
  static vf weigh(const Score& score, float* scores, int64_t tile, int64_t lanes, vf factor, vf top) {
    vf total = Isa::set1(0);
    for (int64_t j = 0; j < tile; ++j) {
      const vf power = (score(j) - top) * factor, weight = sizeof(T) == 2 ? exp2_coarse(power) : exp2_nonpositive(power);
      total += weight;
      Isa::store(scores + j * lanes, weight);
    }
    return total;
  }

  static Values values(const Row* rows, int64_t, int64_t, float*) { return rows; }

  template <int NV>
  static void some_outputs(float* o, const float* keep, const float* weights, const Row* values, int64_t d, int64_t tile,
                      int64_t lanes) {
    vf sums[kStep][NV];
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] = Isa::set1(0);
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
      for (int i = 0; i < NV; ++i) add_kept(o + (d + u) * lanes + i * VL, keep + i * VL, sums[u][i]);
  }

  static int64_t output_at(int64_t d, int64_t lane, int64_t, int64_t lanes) { return d * lanes + lane; }
};

// bfloat16 on a level that multiplies it: two dimensions of Q and K, or two keys' weights and values, share a lane.
template <class I>
struct BlockPairs : BlockVectors<BlockPairs<I>> {
  using Row = const bf16*;
  using pairs = typename I::pairs;

  struct Values {  // [tile / 2][D] pairs of keys
    const uint32_t* data;
    int64_t dim;
  };

  static void load_query(const bf16* q, int64_t dim, bool negative, float* queries, int64_t lane, int64_t lanes) {
    load_pairs(q, dim, dim, negative, queries + lane, lanes);
  }

  static Row key_row(const bf16* x, int64_t, int64_t, float*) { return x; }
  static Row value_row(const bf16* x, int64_t, int64_t, float*) { return x; }

  template <int NV>
  static void some_scores(const float* queries, const Row* keys, int64_t dim, float* to, int64_t lanes) {
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
      for (int i = 0; i < NV; ++i) I::store(to + u * lanes + i * VL, sums[u][i]);
  }

  template <class Score>
  static vf weigh(const Score& score, float* scores, int64_t tile, int64_t lanes, vf factor, vf top) {
    vf total = I::set1(0);
    for (int64_t j = 0; j < tile; j += 2) {
      const vf a = exp2_coarse((score(j) - top) * factor);
      const vf b = exp2_coarse((score(j + 1) - top) * factor);
      total += a + b;
      I::store_pairs(scores + j / 2 * lanes, I::rounded_pairs(a, b));  // before the scores still to be read
    }
    return total;
  }

  static Values values(const Row* rows, int64_t tile, int64_t dim, float* to) {
    uint32_t* data = reinterpret_cast<uint32_t*>(to);
    for (int64_t j = 0; j < tile; j += 2) interleave(rows[j], rows[j + 1], dim, data + j / 2 * dim);
    return {data, dim};
  }

  template <int NV>
  static void some_outputs(float* o, const float* keep, const float* weights, const Values& values, int64_t d, int64_t tile,
                      int64_t lanes) {
    vf sums[kStep][NV];
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] = I::set1(0);
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
      for (int i = 0; i < NV; ++i) add_kept(o + (d + u) * lanes + i * VL, keep + i * VL, sums[u][i]);
  }

  static int64_t output_at(int64_t d, int64_t lane, int64_t dim, int64_t lanes) {
    return (d < dim / 32 * 32 ? I::interleaved_at(d) : d) * lanes + lane;
  }

 protected:
  static void load_pairs(const bf16* q, int64_t dim, int64_t padded, bool negative, float* to, int64_t lanes) {
    for (int64_t d = 0; d < padded / 2; ++d) {
      uint32_t pair = 0;
      if (2 * d < dim) memcpy(&pair, q + 2 * d, 4);
      pair ^= negative ? 0x80008000u : 0;
      memcpy(to + d * lanes, &pair, 4);
    }
  }

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

// bfloat16 on a level with tiles. The keys are rows of a tile and the block's rows its columns, as in the other forms, so that the
// softmax needs no sums over lanes; V is transposed for the weights' product. All that is multiplied lies in whole tiles: Q, scores,
// weights and sums in panels of VL lanes, [panel][…][VL], and keys and values in groups of 16 keys or dimensions.
template <class I>
struct BlockTiles : BlockPairs<I> {
  static constexpr int64_t kTile = 128;
  static constexpr int64_t kKeyStep = 32;
  static constexpr int64_t kColumns = 64;    // all rows: keys and values come from a far cache once
  static constexpr int64_t kPanel = VL;
  static constexpr bool kHidesOnTheWay = true;
  static constexpr int64_t kDenseRows = 64;  // what keys cost beside their products is shared by more rows
  static constexpr int64_t kTogether = 8;    // they bring the keys from a far cache once
  using typename BlockPairs<I>::Row;
  using typename BlockPairs<I>::pairs;
  using Values = const bf16*;  // [padded D / 16][kTile / 32] tiles
  using Shapes = typename I::WholeTiles;

  static int64_t padded(int64_t dim) { return round_up(dim, 32); }

  static void load_query(const bf16* q, int64_t dim, bool negative, float* queries, int64_t lane, int64_t) {
    BlockPairs<I>::load_pairs(q, dim, padded(dim), negative, query_panel(queries, lane, dim) + lane % VL, VL);
  }

  static Row key_row(const bf16* x, int64_t dim, int64_t j, float* copies) {
    bf16* group = reinterpret_cast<bf16*>(copies) + j / 16 * 16 * padded(dim);
    for (int64_t d = 0; d < dim; d += 32)
      I::store_pairs(group + 16 * d + j % 16 * 32, dim - d < 32 ? I::load_pairs(x + d, dim - d) : I::load_pairs(x + d));
    return group;
  }

  static constexpr int64_t kScoreKeys = 32;
  template <class Ahead>
  static void scores(const float* queries, int64_t first, const Row* keys, int64_t tile, int64_t dim, float* to, int64_t,
                     int64_t columns, Ahead& ahead) {
    BlockPairs<I>::by_two_vectors(columns, [&](auto vectors, int64_t lane) {
      const void* panels[] = {query_panel(queries, first + lane, dim), query_panel(queries, first + lane + VL, dim)};
      for (int64_t j = 0; j < tile; j += 32) {
        const void* groups[] = {keys[j], keys[j + 16]};
        float* sums[] = {to + lane * tile + j * VL, to + (lane + VL) * tile + j * VL};
        I::template tile_products<vectors, false>(groups, panels, padded(dim) / 32, sums);
        ahead();
      }
    });
  }

  static Values values(const Row* rows, int64_t tile, int64_t dim, float* to) {
    bf16* transposed = reinterpret_cast<bf16*>(to);
    for (int64_t j = 0; j < tile; j += 32)
      for (int64_t d = 0; d < dim; d += 32) {
        const auto row = [&](int64_t i) { return dim - d < 32 ? I::load_pairs(rows[j + i] + d, dim - d) : I::load_pairs(rows[j + i] + d); };
        const auto at = [&](int64_t dimension) {
          return transposed + (d + dimension) / 16 * 16 * kTile + 16 * j + dimension % 16 * 32;
        };
        I::transpose_16([&](int i) { return I::interleave_low(row(2 * i), row(2 * i + 1)); },
                        [&](int i, pairs x) { I::store_pairs(at(i / 4 * 8 + i % 4), x); });
        I::transpose_16([&](int i) { return I::interleave_high(row(2 * i), row(2 * i + 1)); },
                        [&](int i, pairs x) { I::store_pairs(at(i / 4 * 8 + i % 4 + 4), x); });
      }
    return transposed;
  }

  static void add_values(float* outputs, int64_t first, const float* keep, const float* weights, Values values, int64_t tile,
                         int64_t dim, int64_t, int64_t columns) {
    const int64_t dims = padded(dim);
    for (int64_t lane = 0; lane < columns; lane += VL) {
      const vf factor = I::load(keep + lane);
      if (I::all_ones(factor)) continue;
      float* panel = outputs + (first + lane) * dims;
      for (int64_t d = 0; d < dims; ++d) I::store(panel + d * VL, I::load(panel + d * VL) * factor);
    }
    BlockPairs<I>::by_two_vectors(columns, [&](auto vectors, int64_t lane) {
      const void* panels[] = {weights + lane * tile, weights + (lane + VL) * tile};
      for (int64_t d = 0; d < dims; d += 32) {
        const void* groups[] = {values + d * kTile, values + (d + 16) * kTile};
        float* sums[] = {outputs + (first + lane) * dims + d * VL, outputs + (first + lane + VL) * dims + d * VL};
        I::template tile_products<vectors, true>(groups, panels, tile / 32, sums);
      }
    });
  }

  static int64_t output_at(int64_t d, int64_t lane, int64_t dim, int64_t) { return (lane / VL * padded(dim) + d) * VL + lane % VL; }

 private:
  template <class Floats>  // of queries, which are pairs of dimensions
  static Floats* query_panel(Floats* queries, int64_t lane, int64_t dim) { return queries + lane / VL * padded(dim) / 2 * VL; }
};

template <class T>
using BlockMath = std::conditional_t<(sizeof(T) > 2 || !Isa::kBf16Dot), BlockFloats<T>,
                                     std::conditional_t<Isa::kTiles, BlockTiles<Isa>, BlockPairs<Isa>>>;

}  // namespace
