// Exact attention where a block of up to 64 rows shares one list; with every key in the list, our own dense attention.
//
// The rows of the block are the lanes. Q and the output are held transposed, [D][rows]; a selected key is read where it lies
// and its elements are broadcast, so that gathering costs nothing, the softmax needs no sums over lanes, and each element of K
// and V read serves all rows. Lists are worked off in tiles of 64 keys with an online softmax.
#pragma once
#include "abi.h"
#include "parallel.h"
#include "simd.h"

#include <cstdlib>

namespace {

constexpr int64_t kTile = 64;      // keys: Qᵀ, the tile's scores and the outputs fit in the first-level cache
constexpr int64_t kMaxRows = 64;   // of a block
constexpr int64_t kDenseRows = 32; // of a block whose list is every key
constexpr int kStep = SA_LEVEL >= 2 ? 8 : 4;  // keys, or dimensions, whose sums are in registers at once; D is a multiple of 8

struct Block {
  int64_t head, rows, first_row;
  const int32_t* list;  // NULL: keys 0 …
  int64_t from, to;     // of the list
  int64_t lanes;        // rows, rounded up to whole vectors
};

// Where a block's work lives, carved out of a thread's scratch.
struct BlockMemory {
  float *queries, *scores, *outputs, *top, *total, *keys, *values;

  static int64_t floats(int64_t dim, int64_t lanes) { return (2 * dim + kTile + 3) * lanes + 2 * kTile * dim + 64; }

  BlockMemory(char* scratch, int64_t dim, int64_t lanes) {
    queries = reinterpret_cast<float*>(scratch);
    scores = queries + dim * lanes;
    outputs = scores + kTile * lanes;
    top = outputs + dim * lanes;
    total = top + lanes;
    keys = total + lanes;
    values = keys + kTile * dim;
  }
};

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
    for (int i = 0; i < NV; ++i) in_lanes[i] = load(y + t * lanes + i * VL);
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u) {
      const vf element = set1(row[u][t]);
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] += element * in_lanes[i];
    }
  }
}

template <class T>
struct BlockMath {
  static void load_query(const T* q, int64_t dim, float factor, float* to, int64_t lanes) {
    for (int64_t d = 0; d < dim; ++d) to[d * lanes] = to_float(q[d]) * factor;
  }

  // Rows of a tile as float32: where they lie, or converted into `copy`, which stays in the cache.
  static const float* in_float(const T* row, int64_t dim, float* copy);

  template <int NV>
  static void scores(const float* queries, const float* const* keys, int64_t dim, float, float* to, int64_t lanes) {
    vf sums[kStep][NV];
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] = set1(0);
    broadcast_products<NV>(sums, keys, queries, lanes, dim);
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) store(to + u * lanes + i * VL, sums[u][i]);
  }

  template <int NV>
  static void outputs(float* o, const float* keep, const float* weights, const float* const* values, int64_t d, int64_t tile,
                      int64_t lanes) {
    vf sums[kStep][NV];
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] = load(o + (d + u) * lanes + i * VL) * load(keep + i * VL);
    for (int64_t j = 0; j < tile; ++j) {
      const float* value = values[j] + d;
      vf weight[NV];
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) weight[i] = load(weights + j * lanes + i * VL);
#pragma GCC unroll 8
      for (int u = 0; u < kStep; ++u) {
        const vf element = set1(value[u]);
#pragma GCC unroll 2
        for (int i = 0; i < NV; ++i) sums[u][i] += element * weight[i];
      }
    }
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) store(o + (d + u) * lanes + i * VL, sums[u][i]);
  }

  static int64_t output_index(int64_t d) { return d; }
};

template <>
inline const float* BlockMath<float>::in_float(const float* row, int64_t, float*) {
  return row;
}
template <>
inline const float* BlockMath<bf16>::in_float(const bf16* row, int64_t dim, float* copy) {
  for (int64_t d = 0; d < dim; ++d) copy[d] = to_float(row[d]);
  return copy;
}

#if SA_LEVEL >= 3
// With bfloat16 products two dimensions (of Q·K) or two keys (of weights·V) share a lane. `keys` point at pairs of dimensions,
// `values` at pairs of keys, interleaved per tile; weights are rounded to pairs in place.
inline void interleave_values(const bf16* a, const bf16* b, int64_t dim, uint32_t* to) {
  int64_t d = 0;
  for (; d + 32 <= dim; d += 32) {  // the order within 32 dimensions that output_index() undoes
    const __m512i x = _mm512_loadu_si512(a + d), y = _mm512_loadu_si512(b + d);
    _mm512_storeu_si512(to + d, _mm512_unpacklo_epi16(x, y));
    _mm512_storeu_si512(to + d + 16, _mm512_unpackhi_epi16(x, y));
  }
  for (; d < dim; ++d) to[d] = a[d].bits | static_cast<uint32_t>(b[d].bits) << 16;
}

inline int64_t interleaved_at(int64_t d, int64_t dim) {
  if (d >= dim / 32 * 32) return d;
  const int64_t lane = d % 32 / 8, within = d % 8;
  return d / 32 * 32 + (within < 4 ? 4 * lane + within : 16 + 4 * lane + within - 4);
}

template <int NV>
inline void scores_bf16(const uint32_t* queries, const uint32_t* const* keys, int64_t dim, float factor, float* to, int64_t lanes) {
  __m512 sums[kStep][NV];
  const uint32_t* row[kStep];
#pragma GCC unroll 8
  for (int u = 0; u < kStep; ++u) {
    row[u] = keys[u];
#pragma GCC unroll 2
    for (int i = 0; i < NV; ++i) sums[u][i] = _mm512_setzero_ps();
  }
  for (int64_t d = 0; d < dim / 2; ++d) {
    __m512bh in_lanes[NV];
#pragma GCC unroll 2
    for (int i = 0; i < NV; ++i) in_lanes[i] = (__m512bh)_mm512_loadu_si512(queries + d * lanes + i * VL);
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u) {
      const __m512bh element = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(row[u][d]));
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] = _mm512_dpbf16_ps(sums[u][i], in_lanes[i], element);
    }
  }
#pragma GCC unroll 8
  for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
    for (int i = 0; i < NV; ++i) store(to + u * lanes + i * VL, sums[u][i] * set1(factor));
}

template <int NV>
inline void outputs_bf16(float* o, const float* keep, const uint32_t* weights, const uint32_t* values, int64_t dim, int64_t d,
                         int64_t pairs, int64_t lanes) {
  __m512 sums[kStep][NV];
#pragma GCC unroll 8
  for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
    for (int i = 0; i < NV; ++i) sums[u][i] = load(o + (d + u) * lanes + i * VL) * load(keep + i * VL);
  for (int64_t j = 0; j < pairs; ++j) {
    const uint32_t* value = values + j * dim + d;
    __m512bh weight[NV];
#pragma GCC unroll 2
    for (int i = 0; i < NV; ++i) weight[i] = (__m512bh)_mm512_loadu_si512(weights + j * lanes + i * VL);
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u) {
      const __m512bh element = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(value[u]));
#pragma GCC unroll 2
      for (int i = 0; i < NV; ++i) sums[u][i] = _mm512_dpbf16_ps(sums[u][i], weight[i], element);
    }
  }
#pragma GCC unroll 8
  for (int u = 0; u < kStep; ++u)
#pragma GCC unroll 2
    for (int i = 0; i < NV; ++i) store(o + (d + u) * lanes + i * VL, sums[u][i]);
}
#endif

template <class T>
constexpr bool kPairs = SA_LEVEL >= 3 && sizeof(T) == 2;

// Rescaling factors, running maximum and total of each lane; scores become weights.
template <class T>
inline void softmax_tile(const BlockMemory& m, int64_t tile, int64_t lanes, float* keep) {
  constexpr int kDegree = sizeof(T) == 2 ? 4 : 6;  // bfloat16 weights keep 8 bits; degree 4 has 14
  for (int64_t lane = 0; lane < lanes; lane += VL) {
    const vf old = load(m.top + lane);
    vf top = old;
    for (int64_t j = 0; j < tile; ++j) top = vmax(load(m.scores + j * lanes + lane), top);
    const vf factor = exp2_nonpositive(old - top);
    store(keep + lane, factor);
    store(m.top + lane, top);
    vf total = load(m.total + lane) * factor;
#if SA_LEVEL >= 3
    if (kPairs<T>) {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(m.scores);  // in place: pair j / 2 lies before the scores still to be read
      for (int64_t j = 0; j < tile; j += 2) {
        const vf a = exp2_nonpositive<kDegree>(load(m.scores + j * lanes + lane) - top);
        const vf b = exp2_nonpositive<kDegree>(load(m.scores + (j + 1) * lanes + lane) - top);
        total += a + b;
        const __m512i half = _mm512_set1_epi32(0x8000);
        const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(a), half), 16);
        const __m512i high = _mm512_add_epi32(_mm512_castps_si512(b), half);
        const __m512i both = _mm512_mask_mov_epi16(low, 0xaaaaaaaau, high);
        _mm512_storeu_si512(pairs + j / 2 * lanes + lane, both);
      }
    } else
#endif
    {
      for (int64_t j = 0; j < tile; ++j) {
        const vf weight = exp2_nonpositive<kDegree>(load(m.scores + j * lanes + lane) - top);
        total += weight;
        store(m.scores + j * lanes + lane, weight);
      }
    }
    store(m.total + lane, total);
  }
}

template <class T>
void attend_block(const SaAttend& a, const Block& b, const BlockMemory& m) {
  const int64_t dim = a.dim, lanes = b.lanes, group = a.kv_head[b.head];
  const T* k = static_cast<const T*>(a.k.data) + group * a.k.head_stride;
  const T* v = static_cast<const T*>(a.v.data) + group * a.v.head_stride;
  const float factor = a.scale * kLog2e;
  for (int64_t lane = 0; lane < lanes; ++lane) {  // lanes past the last row repeat it
    const T* q = static_cast<const T*>(a.q.data) + b.head * a.q.head_stride + (b.first_row + min_of(lane, b.rows - 1)) * a.q.row_stride;
    m.top[lane] = kLowest;
    m.total[lane] = 0;
    if (kPairs<T>) {
      for (int64_t d = 0; d < dim / 2; ++d) memcpy(m.queries + d * lanes + lane, q + 2 * d, 4);
    } else {
      BlockMath<T>::load_query(q, dim, factor, m.queries + lane, lanes);
    }
  }
  memset(m.outputs, 0, static_cast<size_t>(dim * lanes) * 4);
  const int64_t* positions = a.positions + b.first_row;
  const auto key_at = [&](int64_t i) -> int64_t { return b.list ? b.list[i] : i; };
  alignas(64) float keep[kMaxRows];
  const float* keys[kTile];
  const float* values[kTile];
  for (int64_t start = b.from; start < b.to; start += kTile) {
    const int64_t n = min_of(kTile, b.to - start), tile = round_up(n, kStep);
    for (int64_t j = 0; j < tile; ++j) {  // slots past the list repeat its first key; their weights are 0
      const int64_t key = key_at(start + (j < n ? j : 0));
      if (kPairs<T>) {
        keys[j] = reinterpret_cast<const float*>(k + key * a.k.row_stride);
        values[j] = reinterpret_cast<const float*>(v + key * a.v.row_stride);
      } else {
        keys[j] = BlockMath<T>::in_float(k + key * a.k.row_stride, dim, m.keys + j * dim);
        values[j] = BlockMath<T>::in_float(v + key * a.v.row_stride, dim, m.values + j * dim);
      }
    }
    for (int64_t j = start + n; j < min_of(start + n + kTile, b.to); ++j) {
      const char* next = reinterpret_cast<const char*>(k + key_at(j) * a.k.row_stride);
      const char* next_v = reinterpret_cast<const char*>(v + key_at(j) * a.v.row_stride);
      for (int64_t byte = 0; byte < dim * static_cast<int64_t>(sizeof(T)); byte += 64) {
        __builtin_prefetch(next + byte, 0, 2);
        __builtin_prefetch(next_v + byte, 0, 2);
      }
    }
    for (int64_t lane = 0; lane < lanes;) {
      const bool two = lane + 2 * VL <= lanes;
      for (int64_t j = 0; j < tile; j += kStep) {
        float* to = m.scores + j * lanes + lane;
#if SA_LEVEL >= 3
        if (kPairs<T>) {
          const uint32_t* queries = reinterpret_cast<const uint32_t*>(m.queries) + lane;
          const uint32_t* const* rows = reinterpret_cast<const uint32_t* const*>(keys + j);
          if (two) scores_bf16<2>(queries, rows, dim, factor, to, lanes);
          else scores_bf16<1>(queries, rows, dim, factor, to, lanes);
          continue;
        }
#endif
        if (two) BlockMath<T>::template scores<2>(m.queries + lane, keys + j, dim, factor, to, lanes);
        else BlockMath<T>::template scores<1>(m.queries + lane, keys + j, dim, factor, to, lanes);
      }
      lane += two ? 2 * VL : VL;
    }
    for (int64_t j = n; j < tile; ++j)
      for (int64_t lane = 0; lane < lanes; ++lane) m.scores[j * lanes + lane] = -__builtin_inff();
    if (key_at(start + n - 1) > positions[0]) {
      for (int64_t j = 0; j < n; ++j) {
        const int64_t key = key_at(start + j);
        if (key <= positions[0]) continue;
        for (int64_t lane = 0; lane < lanes; ++lane)
          if (key > positions[min_of(lane, b.rows - 1)]) m.scores[j * lanes + lane] = -__builtin_inff();
      }
    }
    softmax_tile<T>(m, tile, lanes, keep);
#if SA_LEVEL >= 3
    if (kPairs<T>) {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(m.values);
      for (int64_t j = 0; j < tile; j += 2)
        interleave_values(reinterpret_cast<const bf16*>(values[j]), reinterpret_cast<const bf16*>(values[j + 1]), dim,
                          pairs + j / 2 * dim);
    }
#endif
    for (int64_t lane = 0; lane < lanes;) {
      const bool two = lane + 2 * VL <= lanes;
      for (int64_t d = 0; d < dim; d += kStep) {
        float* o = m.outputs + lane;
#if SA_LEVEL >= 3
        if (kPairs<T>) {
          const uint32_t* weights = reinterpret_cast<const uint32_t*>(m.scores) + lane;
          const uint32_t* pairs = reinterpret_cast<const uint32_t*>(m.values);
          if (two) outputs_bf16<2>(o, keep + lane, weights, pairs, dim, d, tile / 2, lanes);
          else outputs_bf16<1>(o, keep + lane, weights, pairs, dim, d, tile / 2, lanes);
          continue;
        }
#endif
        if (two) BlockMath<T>::template outputs<2>(o, keep + lane, m.scores + lane, values, d, tile, lanes);
        else BlockMath<T>::template outputs<1>(o, keep + lane, m.scores + lane, values, d, tile, lanes);
      }
      lane += two ? 2 * VL : VL;
    }
  }
}

template <class T>
inline int64_t stored_at(int64_t d, int64_t dim) {
#if SA_LEVEL >= 3
  if (kPairs<T>) return interleaved_at(d, dim);
#endif
  (void)dim;
  return d;
}

template <class T>
void write_block(const SaAttend& a, const Block& b, const float* outputs, const float* total) {
  for (int64_t row = 0; row < b.rows; ++row) {
    T* out = static_cast<T*>(a.out.data) + b.head * a.out.head_stride + (b.first_row + row) * a.out.row_stride;
    const float inverse = 1 / total[row];
    for (int64_t d = 0; d < a.dim; ++d) from_float(outputs[stored_at<T>(d, a.dim) * b.lanes + row] * inverse, out + d);
  }
}

// Adds part `other` (its sums, maximum and total) to `m`: softmax over the union of both lists.
inline void merge_parts(int64_t dim, int64_t lanes, const BlockMemory& m, const float* outputs, const float* top, const float* total) {
  for (int64_t lane = 0; lane < lanes; lane += VL) {
    const vf ours = load(m.top + lane), theirs = load(top + lane), both = vmax(ours, theirs);
    const vf keep = exp2_nonpositive(ours - both), add = exp2_nonpositive(theirs - both);
    store(m.top + lane, both);
    store(m.total + lane, load(m.total + lane) * keep + load(total + lane) * add);
    for (int64_t d = 0; d < dim; ++d) {
      float* o = m.outputs + d * lanes + lane;
      store(o, load(o) * keep + load(outputs + d * lanes + lane) * add);
    }
  }
}

template <class T>
int attend_blocks(const SaAttend& a) {
  const int64_t shared = a.indices ? a.query_block : kDenseRows;
  const int64_t rows = min_of(shared, kMaxRows), pieces = ceil_div(shared, rows), lists = ceil_div(a.rows, shared);
  const int64_t blocks = a.heads * lists * pieces, lanes = round_up(rows, VL);
  // A decode step has one block a group: its list is cut in parts, so that all threads have work.
  const int64_t longest = a.keys / 256 + 1;
  const int64_t parts = blocks >= 2 * a.threads ? 1 : min_of(ceil_div(2 * a.threads, blocks), longest);
  const int64_t part_floats = (a.dim + 2) * lanes;
  float* partial = nullptr;
  if (parts > 1) {
    partial = static_cast<float*>(malloc(static_cast<size_t>(blocks * parts * part_floats) * 4));
    if (!partial) return 1;
  }
  const auto block_at = [&](int64_t t) {
    const int64_t head = t / (lists * pieces), at = lists * pieces - 1 - t % (lists * pieces);  // last blocks first
    const int64_t list = at / pieces, first = list * shared + at % pieces * rows;
    const int64_t end = min_of(min_of(first + rows, (list + 1) * shared), a.rows);
    Block b{head, end - first, first, nullptr, 0, 0, lanes};
    if (b.rows <= 0) return b;
    if (a.indices) {
      const int64_t* start = a.indptr + head * lists + list;
      b.list = a.indices + start[0];
      b.to = start[1] - start[0];
    } else {
      b.to = a.positions[end - 1] + 1;
    }
    return b;
  };
  const int64_t scratch_bytes = BlockMemory::floats(a.dim, lanes) * 4;
  int failed = run_queue(blocks * parts, a.threads, scratch_bytes, [&](int64_t t, char* scratch) {
    Block b = block_at(t / parts);
    if (b.rows <= 0) return;
    const int64_t part = t % parts, keys = b.to;
    b.from = keys * part / parts;
    b.to = keys * (part + 1) / parts;
    BlockMemory m(scratch, a.dim, lanes);
    attend_block<T>(a, b, m);
    if (!partial) return write_block<T>(a, b, m.outputs, m.total);
    memcpy(partial + t * part_floats, m.outputs, static_cast<size_t>(part_floats) * 4);  // outputs, top and total are neighbours
  });
  if (partial && !failed) {
    failed = run_queue(blocks, a.threads, scratch_bytes, [&](int64_t t, char* scratch) {
      const Block b = block_at(t);
      if (b.rows <= 0) return;
      BlockMemory m(scratch, a.dim, lanes);
      const float* first = partial + t * parts * part_floats;
      memcpy(m.outputs, first, static_cast<size_t>(part_floats) * 4);
      for (int64_t part = 1; part < parts; ++part) {
        const float* other = first + part * part_floats;
        merge_parts(a.dim, lanes, m, other, other + a.dim * lanes, other + (a.dim + 1) * lanes);
      }
      write_block<T>(a, b, m.outputs, m.total);
    });
  }
  free(partial);
  return failed;
}

}  // namespace
