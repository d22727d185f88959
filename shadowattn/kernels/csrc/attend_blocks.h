// Exact attention where a block of up to 64 rows shares one list; with every key in the list, our own dense attention.
//
// The rows of the block are the lanes. Q and the output are held transposed, [D][rows]; a selected key is read where it lies
// and its elements are broadcast, so that gathering costs nothing, the softmax needs no sums over lanes, and each element of K
// and V read serves all rows. Lists are worked off in tiles of 64 keys with an online softmax. Where the list is the union of the
// rows' own lists, scores of the lanes that do not keep a key become −∞, and each row attends to its own keys alone.
#pragma once
#include <cstdlib>

#include "abi.h"
#include "block_math.h"
#include "exp2.h"
#include "parallel.h"

namespace {

constexpr int64_t kTile = 64;      // keys: Qᵀ, the tile's scores and the outputs fit in the first-level cache
constexpr int64_t kMaxRows = 64;   // of a block
constexpr int64_t kDenseRows = 32; // of a block whose list is every key

struct Block {
  int64_t head, rows, first_query;
  const int32_t* list;      // NULL: keys 0 …
  const uint64_t* members;  // of the list's keys; NULL: all rows keep each
  int64_t from, to;         // of the list
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

// Scores of the rows that do not keep a key become −∞.
inline void hide_from_others(float* scores, const uint64_t* members, int64_t keys, int64_t lanes) {
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t lane = 0; lane < lanes; lane += VL) {
      float* s = scores + j * lanes + lane;
      Isa::store(s, Isa::kept(Isa::load(s), members[j] >> lane));
    }
  }
}

// Rescaling factors, running maximum and total of each lane; scores become weights.
template <class T>
inline void softmax_tile(const BlockMemory& m, int64_t tile, int64_t lanes, float* keep) {
  for (int64_t lane = 0; lane < lanes; lane += VL) {
    const vf old = Isa::load(m.top + lane);
    vf top = old;
    for (int64_t j = 0; j < tile; ++j) top = Isa::max(Isa::load(m.scores + j * lanes + lane), top);
    const vf factor = exp2_nonpositive(old - top);
    Isa::store(keep + lane, factor);
    Isa::store(m.top + lane, top);
    Isa::store(m.total + lane, BlockMath<T>::weigh(m.scores + lane, tile, lanes, top, Isa::load(m.total + lane) * factor));
  }
}

template <class T>
void attend_block(const SaAttend& a, const Block& b, const BlockMemory& m) {
  using Math = BlockMath<T>;
  const int64_t dim = a.dim, lanes = b.lanes, group = a.kv_head[b.head];
  const T* k = static_cast<const T*>(a.k.data) + group * a.k.head_stride;
  const T* v = static_cast<const T*>(a.v.data) + group * a.v.head_stride;
  const float factor = a.scale * kLog2e;
  for (int64_t lane = 0; lane < lanes; ++lane) {  // lanes past the last row repeat it
    const T* q = static_cast<const T*>(a.q.data) + b.head * a.q.head_stride + (b.first_query + min_of(lane, b.rows - 1)) * a.q.row_stride;
    m.top[lane] = kLowest;
    m.total[lane] = 0;
    Math::load_query(q, dim, factor, m.queries + lane, lanes);
  }
  memset(m.outputs, 0, static_cast<size_t>(dim * lanes) * 4);
  const int64_t* positions = a.positions + b.first_query;
  const auto key_at = [&](int64_t i) -> int64_t { return b.list ? b.list[i] : i; };
  alignas(64) float keep[kMaxRows];
  typename Math::Row keys[kTile], values[kTile];
  for (int64_t start = b.from; start < b.to; start += kTile) {
    const int64_t n = min_of(kTile, b.to - start), tile = round_up(n, kStep);
    for (int64_t j = 0; j < tile; ++j) {  // slots past the list repeat its first key; their weights are 0
      const int64_t key = key_at(start + (j < n ? j : 0));
      keys[j] = Math::row(k + key * a.k.row_stride, dim, m.keys + j * dim);
      values[j] = Math::row(v + key * a.v.row_stride, dim, m.values + j * dim);
    }
    for (int64_t j = start + n; j < min_of(start + n + kTile, b.to); ++j) {
      fetch_bytes(k + key_at(j) * a.k.row_stride, dim * static_cast<int64_t>(sizeof(T)));
      fetch_bytes(v + key_at(j) * a.v.row_stride, dim * static_cast<int64_t>(sizeof(T)));
    }
    for (int64_t lane = 0; lane < lanes;) {
      const bool two = lane + 2 * VL <= lanes;
      for (int64_t j = 0; j < tile; j += kStep) {
        float* to = m.scores + j * lanes + lane;
        if (two) Math::template scores<2>(m.queries + lane, keys + j, dim, factor, to, lanes);
        else Math::template scores<1>(m.queries + lane, keys + j, dim, factor, to, lanes);
      }
      lane += two ? 2 * VL : VL;
    }
    for (int64_t j = n; j < tile; ++j)
      for (int64_t lane = 0; lane < lanes; ++lane) m.scores[j * lanes + lane] = -__builtin_inff();
    if (b.members) hide_from_others(m.scores, b.members + start, n, lanes);
    if (key_at(start + n - 1) > positions[0]) {
      for (int64_t j = 0; j < n; ++j) {
        const int64_t key = key_at(start + j);
        if (key <= positions[0]) continue;
        for (int64_t lane = 0; lane < lanes; ++lane)
          if (key > positions[min_of(lane, b.rows - 1)]) m.scores[j * lanes + lane] = -__builtin_inff();
      }
    }
    softmax_tile<T>(m, tile, lanes, keep);
    const auto tile_values = Math::tile_values(values, tile, dim, m.values);
    for (int64_t lane = 0; lane < lanes;) {
      const bool two = lane + 2 * VL <= lanes;
      for (int64_t d = 0; d < dim; d += kStep) {
        float* o = m.outputs + lane;
        if (two) Math::template outputs<2>(o, keep + lane, m.scores + lane, tile_values, d, tile, lanes);
        else Math::template outputs<1>(o, keep + lane, m.scores + lane, tile_values, d, tile, lanes);
      }
      lane += two ? 2 * VL : VL;
    }
  }
}

// Some dimensions of all rows are scaled and rounded together, whole vectors of rows, and then written row by row.
template <class T>
void write_block(const SaAttend& a, const Block& b, const float* outputs, const float* total) {
  constexpr int64_t kTogether = 8;  // divides D
  float inverse[kMaxRows];
  T scaled[kTogether][kMaxRows];
  for (int64_t row = 0; row < b.rows; ++row) inverse[row] = 1 / total[row];
  T* out = static_cast<T*>(a.out.data) + b.head * a.out.head_stride + b.first_query * a.out.row_stride;
  for (int64_t from = 0; from < a.dim; from += kTogether) {
    for (int64_t d = 0; d < kTogether; ++d) {
      const float* of_rows = outputs + BlockMath<T>::output_at(from + d, a.dim) * b.lanes;
      for (int64_t row = 0; row < b.rows; ++row) from_float(of_rows[row] * inverse[row], scaled[d] + row);
    }
    for (int64_t row = 0; row < b.rows; ++row)
      for (int64_t d = 0; d < kTogether; ++d) out[row * a.out.row_stride + from + d] = scaled[d][row];
  }
}

// Adds part `other` (its sums, maximum and total) to `m`: softmax over the union of both lists.
inline void merge_parts(int64_t dim, int64_t lanes, const BlockMemory& m, const float* outputs, const float* top, const float* total) {
  for (int64_t lane = 0; lane < lanes; lane += VL) {
    const vf ours = Isa::load(m.top + lane), theirs = Isa::load(top + lane), both = Isa::max(ours, theirs);
    const vf keep = exp2_nonpositive(ours - both), add = exp2_nonpositive(theirs - both);
    Isa::store(m.top + lane, both);
    Isa::store(m.total + lane, Isa::load(m.total + lane) * keep + Isa::load(total + lane) * add);
    for (int64_t d = 0; d < dim; ++d) {
      float* o = m.outputs + d * lanes + lane;
      Isa::store(o, Isa::load(o) * keep + Isa::load(outputs + d * lanes + lane) * add);
    }
  }
}

template <class T>
int attend_blocks(const SaAttend& a) {
  const int64_t shared = a.indices ? a.query_block : min_of(kDenseRows, a.rows);  // lanes without rows only cost
  const int64_t rows = min_of(shared, kMaxRows), pieces = ceil_div(shared, rows), lists = ceil_div(a.rows, shared);
  const int64_t blocks = a.heads * lists * pieces, lanes = round_up(rows, VL);
  // A decode step on a list has one block a group: the list is cut in parts, so that all threads have work.
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
    Block b{head, end - first, first, nullptr, nullptr, 0, 0, lanes};
    if (b.rows <= 0) return b;
    if (a.indices) {
      const int64_t which = head * lists + list, start = a.indptr[which];
      b.list = a.indices + start;
      if (a.members) b.members = a.members + start;
      b.to = (a.members ? a.ends[which] : a.indptr[which + 1]) - start;
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
