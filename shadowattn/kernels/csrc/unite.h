// Unions of per-row lists: the keys that any row of a tile keeps, ascending, and for each of them the rows that keep it.
//
// A tile's lists go through the keys together, a window at a time. Each row sets its bit in the words of its keys; the words that
// are not 0 then follow one another. Nothing is sorted or merged, and the words of a window stay in the first-level cache.
#pragma once
#include "abi.h"
#include "numbers.h"
#include "parallel.h"

namespace {

constexpr int64_t kUniteKeys = 2048;  // of a window: 16 KiB of words
constexpr int64_t kUniteRows = 64;    // of a tile: one bit each

inline void unite_tile(const SaUnite& u, int64_t tile, uint64_t* words) {
  const int64_t tiles = ceil_div(u.rows, u.query_block), first_query = tile % tiles * u.query_block;
  const int64_t rows = min_of(u.query_block, u.rows - first_query);
  const int64_t* indptr = u.row_indptr + tile / tiles * u.rows + first_query;
  const int32_t* next[kUniteRows];
  int64_t last_key = 0, at = indptr[0];
  for (int64_t r = 0; r < rows; ++r) {
    next[r] = u.row_indices + indptr[r];
    last_key = max_of<int64_t>(last_key, u.row_indices[indptr[r + 1] - 1]);
  }
  for (int64_t first = 0; first <= last_key; first += kUniteKeys) {
    memset(words, 0, kUniteKeys * sizeof(uint64_t));
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t *key = next[r], *end = u.row_indices + indptr[r + 1];
      for (; key < end && *key < first + kUniteKeys; ++key) words[*key - first] |= uint64_t{1} << r;
      next[r] = key;
    }
    for (int64_t j = 0; j < kUniteKeys; j += 64) {
      uint64_t hits = 0;
      for (int64_t i = 0; i < 64; ++i) hits |= static_cast<uint64_t>(words[j + i] != 0) << i;
      for (; hits; hits &= hits - 1, ++at) {
        const int64_t place = j + __builtin_ctzll(hits);
        u.indices[at] = static_cast<int32_t>(first + place);
        u.members[at] = words[place];
      }
    }
  }
  u.ends[tile] = at;
}

int unite(const SaUnite* u) {
  const int64_t tiles = u->heads * ceil_div(u->rows, u->query_block), bytes = kUniteKeys * sizeof(uint64_t);
  return run_queue(tiles, u->threads, bytes, [&](int64_t t, char* scratch) { unite_tile(*u, t, reinterpret_cast<uint64_t*>(scratch)); });
}

}  // namespace
