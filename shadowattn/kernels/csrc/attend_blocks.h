// Exact attention where a block of up to 64 rows shares one list; with every key in the list, our own dense attention.
//
// The rows of the block are the lanes. Q and the output are held transposed, [D][rows] or, for tiles, in panels of rows; a selected key
// is read where it lies and its elements are broadcast, so that gathering costs nothing, the softmax needs no sums over lanes, and each
// element of K and V read serves all rows. Lists are worked off in tiles of keys with an online softmax. Where the list is the union of
// the rows' own lists, scores of the lanes that do not keep a key become −∞, and each row attends to its own keys alone.
//
// Where a level has instructions for tiles, bfloat16 keys are copied together and values are transposed; dense blocks of heads that
// share keys do that once for all of them.
#pragma once
#include <cstdlib>

#include "abi.h"
#include "block_math.h"
#include "exp2.h"
#include "parallel.h"
#include "stage_times.h"

namespace {

constexpr int64_t kMaxRows = 64;   // of a block
constexpr int64_t kSegment = 512;  // keys that blocks whose list is every key go through one after another

struct Block {
  int64_t head, rows, first_query;
  const int32_t* list;      // NULL: keys 0 …
  const uint64_t* members;  // of the list's keys; NULL: all rows keep each
  int64_t from, to;         // of the list
  int64_t lanes;            // rows, rounded up to whole vectors

  int64_t key(int64_t i) const { return list ? list[i] : i; }
};

// What a block is between two tiles: Qᵀ and the sums, in the order of the form that multiplies them, and the largest score and the
// total weight of each lane.
template <class T>
struct BlockMemory {
  float *queries, *outputs, *top, *total;

  static int64_t floats_of_part(int64_t dim, int64_t lanes) { return (BlockMath<T>::padded(dim) + 2) * lanes; }
  static int64_t bytes(int64_t dim, int64_t lanes) { return (2 * BlockMath<T>::padded(dim) + 2) * lanes * 4; }

  BlockMemory(char* scratch, int64_t dim, int64_t lanes) {
    queries = reinterpret_cast<float*>(scratch);
    outputs = queries + BlockMath<T>::padded(dim) * lanes;  // a part of the keys makes outputs, top and total, in this order
    top = outputs + BlockMath<T>::padded(dim) * lanes;
    total = top + lanes;
  }
};

// The next tile's keys and values are fetched while this one's scores are computed, some between two of their steps: a processor that
// is asked for a whole tile at once waits until it has room for what it asks for.
template <class T>
struct FetchAhead {
  const SaAttend& a;
  const Block& b;
  int64_t next, end;  // of the list
  int64_t keys_at_once;

  FetchAhead(const SaAttend& attend, const Block& block, int64_t from, int64_t to)
      : a(attend), b(block), next(from), end(to), keys_at_once(ceil_div(BlockMath<T>::kScoreKeys, ceil_div(b.lanes, 2 * VL))) {}
  void all() {
    while (next < end) (*this)();
  }
  void operator()() {
    const int64_t group = a.kv_head[b.head], bytes = a.dim * static_cast<int64_t>(sizeof(T));
    const T* k = static_cast<const T*>(a.k.data) + group * a.k.head_stride;
    const T* v = static_cast<const T*>(a.v.data) + group * a.v.head_stride;
    for (const int64_t last = min_of(next + keys_at_once, end); next < last; ++next) {
      fetch_bytes(k + b.key(next) * a.k.row_stride, bytes);
      fetch_bytes(v + b.key(next) * a.v.row_stride, bytes);
    }
  }
};

// Neighbours of a list and their values, in the form that is multiplied. Slots past the last key repeat the first one.
template <class T>
struct Tile {
  using Math = BlockMath<T>;
  int64_t start, keys;
  typename Math::Row key_rows[Math::kTile], value_rows[Math::kTile];
  typename Math::Values values;

  // Floats of what it copies; of keys and values each.
  static int64_t copied(int64_t dim) { return Math::kTile * Math::padded(dim); }

  void take(const SaAttend& a, const Block& b, int64_t from, int64_t to, float* copies) {
    const int64_t dim = a.dim, group = a.kv_head[b.head];
    const T* k = static_cast<const T*>(a.k.data) + group * a.k.head_stride;
    const T* v = static_cast<const T*>(a.v.data) + group * a.v.head_stride;
    start = from, keys = min_of(Math::kTile, to - from);
    const int64_t slots = round_up(keys, Math::kKeyStep);
    for (int64_t j = 0; j < slots; ++j) {
      const int64_t key = b.key(start + (j < keys ? j : 0));
      key_rows[j] = Math::key_row(k + key * a.k.row_stride, dim, j, copies);
      value_rows[j] = Math::value_row(v + key * a.v.row_stride, dim, j, copies + copied(dim));
    }
    values = Math::values(value_rows, slots, dim, copies + copied(dim));
  }
};

template <class T>
void start_block(const SaAttend& a, const Block& b, const BlockMemory<T>& m) {
  for (int64_t lane = 0; lane < b.lanes; ++lane) {  // lanes past the last row repeat its query, and are not written
    const T* q = static_cast<const T*>(a.q.data) + b.head * a.q.head_stride + (b.first_query + min_of(lane, b.rows - 1)) * a.q.row_stride;
    m.top[lane] = kLowest;
    m.total[lane] = 0;
    BlockMath<T>::load_query(q, a.dim, a.scale < 0, m.queries, lane, b.lanes);
  }
  memset(m.outputs, 0, static_cast<size_t>(BlockMath<T>::padded(a.dim) * b.lanes) * 4);
}

// For each of a tile's keys the lanes that have a score there: rows that keep the key and do not come before it; none for slots behind
// the last key. NULL: all lanes have all scores, and where a form hides on the way there are no such slots.
template <class T>
const uint64_t* lanes_of(const SaAttend& a, const Block& b, const Tile<T>& tile, int64_t slots, uint64_t* lanes) {
  const int64_t* positions = a.positions + b.first_query;
  const bool unseen = b.key(tile.start + tile.keys - 1) > positions[0];
  if (!unseen && (tile.keys == slots || !BlockMath<T>::kHidesOnTheWay)) return b.members ? b.members + tile.start : nullptr;
  int64_t before = 0;  // rows
  for (int64_t j = 0; j < tile.keys; ++j) {
    lanes[j] = b.members ? b.members[tile.start + j] : ~uint64_t{0};
    while (before < b.rows && positions[before] < b.key(tile.start + j)) ++before;
    lanes[j] = before < 64 ? lanes[j] >> before << before : 0;
  }
  for (int64_t j = tile.keys; j < slots; ++j) lanes[j] = 0;
  return lanes;
}

// Scores of a tile become −∞ where a lane has none.
inline void hide(const uint64_t* lanes, int64_t keys, int64_t slots, int64_t columns, float* scores) {
  for (int64_t j = 0; lanes && j < keys; ++j)
    for (int64_t i = 0; i < columns; i += VL) {
      float* score = scores + j * columns + i;
      Isa::store(score, Isa::kept(Isa::load(score), lanes[j] >> i));
    }
  for (int64_t i = keys * columns; i < slots * columns; ++i) scores[i] = -__builtin_inff();
}

// Rescaling factors, running maximum and total of each lane; scores become weights. Where there are `lanes`, it takes scores that a
// lane does not have as −∞; the first column is lane `first`.
template <class T, bool HIDES>
inline void softmax_tile(float* scores, int64_t slots, int64_t columns, vf factor, float* tops, float* totals, float* keep,
                         const uint64_t* lanes, int64_t first) {
  using Math = BlockMath<T>;
  for (int64_t lane = 0; lane < columns; lane += VL) {
    const auto score = [&](int64_t j) {
      const vf x = Isa::load(scores + j * columns + lane);
      return HIDES ? Isa::kept(x, lanes[j] >> (first + lane)) : x;
    };
    const vf old = Isa::load(tops + lane);
    vf top[kStep];  // a single one would wait for itself
#pragma GCC unroll 8
    for (int u = 0; u < kStep; ++u) top[u] = old;
    for (int64_t j = 0; j < slots; j += kStep)
#pragma GCC unroll 8
      for (int u = 0; u < kStep; ++u) top[u] = Isa::max(score(j + u), top[u]);
#pragma GCC unroll 8
    for (int u = 1; u < kStep; ++u) top[0] = Isa::max(top[u], top[0]);
    const vf shrink = exp2_nonpositive((old - top[0]) * factor);
    Isa::store(keep + lane, shrink);
    Isa::store(tops + lane, top[0]);
    Isa::store(totals + lane, Isa::load(totals + lane) * shrink + Math::weigh(score, scores + lane, slots, columns, factor, top[0]));
  }
}

// A block to the keys of a tile, while those of the next one are fetched, up to key `end` of the list; 0: none.
template <class T>
void attend_tile(const SaAttend& a, const Block& b, const Tile<T>& tile, const BlockMemory<T>& m, float* scores, int64_t end,
                 Laps* laps) {
  using Math = BlockMath<T>;
  const int64_t slots = round_up(tile.keys, Math::kKeyStep);
  const vf factor = weight_factor(a.scale);
  alignas(64) float keep[Math::kColumns];
  uint64_t some[Math::kTile];
  const uint64_t* lanes = lanes_of(a, b, tile, slots, some);
  FetchAhead<T> ahead(a, b, tile.start + tile.keys, min_of(tile.start + tile.keys + Math::kTile, end));
  for (int64_t lane = 0; lane < b.lanes; lane += Math::kColumns) {
    const int64_t columns = min_of(Math::kColumns, b.lanes - lane);
    Math::scores(m.queries, lane, tile.key_rows, slots, a.dim, scores, b.lanes, columns, ahead);
    laps->end_part(SA_SCORES);
    for (int64_t part = 0; part < columns; part += Math::kPanel) {
      const int64_t width = min_of(Math::kPanel, columns - part), at = lane + part;
      float *panel = scores + part * slots, *top = m.top + at, *total = m.total + at;
      static_assert(Math::kHidesOnTheWay || Math::kPanel >= kMaxRows, "hide() takes a panel's first column for lane 0");
      if constexpr (!Math::kHidesOnTheWay) hide(lanes, tile.keys, slots, width, panel);
      if (Math::kHidesOnTheWay && lanes) softmax_tile<T, true>(panel, slots, width, factor, top, total, keep + part, lanes, at);
      else softmax_tile<T, false>(panel, slots, width, factor, top, total, keep + part, lanes, at);
    }
    laps->end_part(SA_SOFTMAX);
    Math::add_values(m.outputs, lane, keep, scores, tile.values, slots, a.dim, b.lanes, columns);
    laps->end_part(SA_VALUES);
  }
}

// Room for some blocks that attend to their lists, one after another or `together`.
template <class T>
int64_t bytes_of_blocks(int64_t dim, int64_t lanes, int64_t tiles = 1, int64_t together = 1) {
  return (BlockMath<T>::kTile * BlockMath<T>::kColumns + 2 * tiles * Tile<T>::copied(dim)) * 4 + together * BlockMemory<T>::bytes(dim, lanes);
}

// A block to its list.
template <class T>
BlockMemory<T> attend_block(const SaAttend& a, const Block& b, char* scratch, Laps* laps) {
  float *scores = reinterpret_cast<float*>(scratch), *copies = scores + BlockMath<T>::kTile * BlockMath<T>::kColumns;
  const BlockMemory<T> m(reinterpret_cast<char*>(copies + 2 * Tile<T>::copied(a.dim)), a.dim, b.lanes);
  const typename BlockMath<T>::Shapes shapes;
  Tile<T> tile;
  start_block(a, b, m);
  laps->begin_parts();
  for (int64_t start = b.from; start < b.to; start += BlockMath<T>::kTile) {
    tile.take(a, b, start, b.to, copies);
    laps->end_part(SA_FORM);
    attend_tile(a, b, tile, m, scores, b.to, laps);
  }
  return m;
}

// Some dimensions of all rows are scaled and rounded together, whole vectors of rows, and then written row by row.
template <class T>
void write_block(const SaAttend& a, const Block& b, const BlockMemory<T>& m) {
  constexpr int64_t kTogether = 8;  // divides D
  float inverse[kMaxRows];
  T scaled[kTogether][kMaxRows];
  for (int64_t lane = 0; lane < b.lanes; ++lane) inverse[lane] = 1 / m.total[lane];
  T* out = static_cast<T*>(a.out.data) + b.head * a.out.head_stride + b.first_query * a.out.row_stride;
  for (int64_t from = 0; from < a.dim; from += kTogether) {
    for (int64_t d = 0; d < kTogether; ++d)
      for (int64_t lane = 0; lane < b.lanes; lane += VL) {
        const float* of_rows = m.outputs + BlockMath<T>::output_at(from + d, lane, a.dim, b.lanes);
        for (int64_t i = 0; i < VL; ++i) from_float(of_rows[i] * inverse[lane + i], scaled[d] + lane + i);
      }
    for (int64_t row = 0; row < b.rows; ++row)
      for (int64_t d = 0; d < kTogether; ++d) out[row * a.out.row_stride + from + d] = scaled[d][row];
  }
}

// Blocks of one key head whose lists are every key go through these together, a segment at a time: it is read from a far cache and
// brought into form once for all of them.
template <class T>
void attend_together(const SaAttend& a, const Block* blocks, int64_t count, char* scratch, Laps* laps) {
  constexpr int64_t kTile = BlockMath<T>::kTile, kTiles = kSegment / kTile;
  static_assert(kSegment % kTile == 0, "whole tiles");
  float *scores = reinterpret_cast<float*>(scratch), *copies = scores + kTile * BlockMath<T>::kColumns;
  char* memory = reinterpret_cast<char*>(copies + 2 * kTiles * Tile<T>::copied(a.dim));
  int64_t lanes = 0, longest = 0;
  for (int64_t i = 0; i < count; ++i) lanes = max_of(lanes, blocks[i].lanes), longest = max_of(longest, blocks[i].to);
  const int64_t bytes = BlockMemory<T>::bytes(a.dim, lanes);
  const auto memory_of = [&](int64_t i) { return BlockMemory<T>(memory + i * bytes, a.dim, blocks[i].lanes); };
  const typename BlockMath<T>::Shapes shapes;
  Tile<T> tiles[kTiles];
  for (int64_t i = 0; i < count; ++i) start_block(a, blocks[i], memory_of(i));
  laps->begin_parts();
  for (int64_t from = 0; from < longest; from += kSegment) {
    for (int64_t t = 0, start = from; start + kTile <= min_of(from + kSegment, longest); ++t, start += kTile) {
      FetchAhead<T>(a, blocks[0], start + kTile, min_of(start + 2 * kTile, longest)).all();
      tiles[t].take(a, blocks[0], start, longest, copies + 2 * t * Tile<T>::copied(a.dim));
    }
    laps->end_part(SA_FORM);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t t = 0, start = from; start + kTile <= min_of(from + kSegment, blocks[i].to); ++t, start += kTile)
        attend_tile(a, blocks[i], tiles[t], memory_of(i), scores, 0, laps);
  }
  for (int64_t i = 0; i < count; ++i) {  // what is left is less than a tile, and the block's own: it ends where its last row does
    const int64_t left = blocks[i].to / kTile * kTile;
    if (left < blocks[i].to) {
      tiles[0].take(a, blocks[i], left, blocks[i].to, copies);
      laps->end_part(SA_FORM);
      attend_tile(a, blocks[i], tiles[0], memory_of(i), scores, 0, laps);
    }
    write_block(a, blocks[i], memory_of(i));
    laps->begin_parts();
  }
}

// Adds another part (`outputs`, and its maximum and total behind them) to `m`: softmax over the union of both lists.
template <class T>
void merge_parts(const SaAttend& a, int64_t lanes, const BlockMemory<T>& m, const float* outputs) {
  const int64_t dim = a.dim;
  const vf factor = weight_factor(a.scale);
  const float *tops = outputs + BlockMath<T>::padded(dim) * lanes, *totals = tops + lanes;
  for (int64_t lane = 0; lane < lanes; lane += VL) {
    const vf ours = Isa::load(m.top + lane), theirs = Isa::load(tops + lane), both = Isa::max(ours, theirs);
    const vf keep = exp2_nonpositive((ours - both) * factor);
    const vf add = exp2_nonpositive((theirs - both) * factor);
    Isa::store(m.top + lane, both);
    Isa::store(m.total + lane, Isa::load(m.total + lane) * keep + Isa::load(totals + lane) * add);
    for (int64_t d = 0; d < dim; ++d) {
      const int64_t at = BlockMath<T>::output_at(d, lane, dim, lanes);
      Isa::store(m.outputs + at, Isa::load(m.outputs + at) * keep + Isa::load(outputs + at) * add);
    }
  }
}

// Every row's list is every key.
template <class T>
int attend_dense(const SaAttend& a, int64_t rows) {
  const int64_t lanes = round_up(rows, VL), of_head = ceil_div(a.rows, rows), blocks = a.heads * of_head;
  int64_t together = BlockMath<T>::kTogether;
  while (together > 1 && ceil_div(blocks, together) < 8 * a.threads) together /= 2;
  const int64_t bytes = bytes_of_blocks<T>(a.dim, lanes, kSegment / BlockMath<T>::kTile, together);
  // Heads of the same keys are neighbours, and so are blocks of the same rows of these: last rows first, which take longest.
  const auto block_at = [&](int64_t t) {
    int64_t first = t / of_head, end = first + 1;
    while (first && a.kv_head[first - 1] == a.kv_head[first]) --first;
    while (end < a.heads && a.kv_head[end] == a.kv_head[end - 1]) ++end;
    const int64_t within = t - first * of_head, heads = end - first;
    const int64_t from = (of_head - 1 - within / heads) * rows, count = min_of(rows, a.rows - from);
    return Block{first + within % heads, count, from, nullptr, nullptr, 0, a.positions[from + count - 1] + 1, round_up(count, VL)};
  };
  return run_queue(ceil_div(blocks, together), a.threads, bytes, [&](int64_t t, char* scratch) {
    Block some[BlockMath<T>::kTogether];
    int64_t count = 0;
    Laps laps;
    for (int64_t i = t * together; i < min_of((t + 1) * together, blocks); ++i) {
      some[count++] = block_at(i);
      if (count == 1 || a.kv_head[some[count - 1].head] == a.kv_head[some[0].head]) continue;
      attend_together<T>(a, some, count - 1, scratch, &laps);
      some[0] = some[count - 1], count = 1;
    }
    attend_together<T>(a, some, count, scratch, &laps);
    laps.end(SA_TOGETHER);
  });
}

template <class T>
int attend_blocks(const SaAttend& a) {
  const int64_t shared = a.indices ? a.query_block : min_of(BlockMath<T>::kDenseRows, a.rows);  // lanes without rows only cost
  const int64_t rows = min_of(shared, kMaxRows), pieces = ceil_div(shared, rows), lists = ceil_div(a.rows, shared);
  const int64_t blocks = a.heads * lists * pieces, lanes = round_up(rows, VL);
  // A decode step on a list has one block a group: the list is cut in parts, so that all threads have work.
  const int64_t longest = a.keys / 256 + 1;
  const int64_t parts = blocks >= 2 * a.threads ? 1 : min_of(ceil_div(2 * a.threads, blocks), longest);
  if constexpr (BlockMath<T>::kTogether > 1)
    if (!a.indices && parts == 1) return attend_dense<T>(a, rows);
  const int64_t part_floats = BlockMemory<T>::floats_of_part(a.dim, lanes);
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
  const int64_t scratch_bytes = bytes_of_blocks<T>(a.dim, lanes);
  int failed = run_queue(blocks * parts, a.threads, scratch_bytes, [&](int64_t t, char* scratch) {
    Block b = block_at(t / parts);
    if (b.rows <= 0) return;
    const int64_t part = t % parts, keys = b.to;
    b.from = keys * part / parts;
    b.to = keys * (part + 1) / parts;
    Laps laps;
    const BlockMemory<T> m = attend_block<T>(a, b, scratch, &laps);
    if (partial) memcpy(partial + t * part_floats, m.outputs, static_cast<size_t>(part_floats) * 4);  // top and total are behind them
    else write_block(a, b, m);
    laps.end(SA_TOGETHER);
  });
  if (partial && !failed) {
    failed = run_queue(blocks, a.threads, scratch_bytes, [&](int64_t t, char* scratch) {
      const Block b = block_at(t);
      if (b.rows <= 0) return;
      const BlockMemory<T> m(scratch, a.dim, lanes);
      const float* first = partial + t * parts * part_floats;
      memcpy(m.outputs, first, static_cast<size_t>(part_floats) * 4);
      for (int64_t part = 1; part < parts; ++part) merge_parts(a, lanes, m, first + part * part_floats);
      write_block(a, b, m);
    });
  }
  free(partial);
  return failed;
}

}  // namespace
