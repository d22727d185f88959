// Exact attention where a first look says for a block of rows which keys they choose from: all of it in one task for some blocks.
//
// A row keeps the best of those keys by its own INT8 products. All rows of the block attend together, as with a shared list of the
// keys let through, in which the scores of keys that a row does not keep become −∞: reading a key once for the block costs less than
// a row's reading its own alone, where a row keeps no less than a third of them or so. Where every key is let through there is
// nothing to look at first, and rows choose and read as they do without a first look.
#pragma once
#include "attend_blocks.h"
#include "first_look.h"
#include "fused_rows.h"

namespace {

// For each of `count` keys the rows whose bits are set.
inline void members_of(const RowBits& chosen, int64_t rows, int64_t count, uint64_t* members) {
  for (int64_t w = 0; w < ceil_div(count, 64); ++w) members_of_word(chosen, rows, w, members + 64 * w);
}

// A row's list: the keys let through whose bits are set.
inline void write_through(const uint64_t* chosen, const LetThrough& through, int32_t* to) {
  int32_t places[64 + Isa::kListStep];
  for (int64_t w = 0; w < ceil_div(through.count, 64); ++w) {
    const int64_t n = Isa::list_bits(chosen[w], static_cast<int32_t>(64 * w), places);
    for (int64_t i = 0; i < n; ++i) *to++ = through.keys[places[i]];
  }
}

// The heads in the order that they are worked on: first those that let every key through, whose tasks take longest.
inline int64_t head_at(const SaEstimate& e, const FirstLook& look, int64_t place) {
  for (int spared = 1; spared >= 0; --spared)
    for (int64_t head = 0; head < e.heads; ++head)
      if (lets_all_through(e, look, head) == static_cast<bool>(spared) && place-- == 0) return head;
  return 0;
}

template <class T>
int looked_rows_of(const SaLookedRows& a) {
  const RowLists lists(a.choose, a.attend.positions, a.budgets);
  if (lists.failed) return lists.failed;
  const SaEstimate& e = lists.choose;
  const FirstLook look(a.first, e);
  if (look.failed()) return 1;
  const int64_t words = padded_bytes(e.keys) / 64, most = most_through(e, look), lanes = round_up(look.rows, VL);
  const int64_t all_blocks = ceil_div(e.rows, look.rows);
  int64_t at_once = kRowsAtOnce;  // blocks of a task: their mean queries meet the keys together
  while (at_once > 1 && e.heads * ceil_div(all_blocks, at_once) < 8 * a.attend.threads) at_once /= 2;
  const int64_t tasks = ceil_div(all_blocks, at_once), chosen_words = ceil_div(most, 64) + 1;
  const int64_t bit_bytes = (kRowsAtOnce * words + look.rows * chosen_words + 64 * chosen_words) * 8;
  const int64_t choice_bytes = round_up(ChoiceMemory::bytes_needed(e.keys, e.dim), 64);
  const int64_t through_bytes = round_up(LetThrough::bytes_needed(most, e.dim), 64);
  const FusedRows<T> flat(e, a.attend);
  const int64_t bytes =
      max_of(round_up(bit_bytes, 64) + choice_bytes + through_bytes + bytes_of_blocks<T>(e.dim, lanes), flat.bytes_needed());
  return run_queue(e.heads * tasks, a.attend.threads, bytes, [&](int64_t t, char* scratch) {
    const int64_t head = head_at(e, look, t / tasks);
    const int64_t from = (tasks - 1 - t % tasks) * at_once * look.rows;  // last ones first: they take longest
    const int64_t rows = min_of(at_once * look.rows, e.rows - from);
    if (lets_all_through(e, look, head)) {
      const bool in_blocks = flat.whole_blocks && look.rows % kCommonRows == 0;
      for (int64_t r = 0; r < rows; r += flat.rows)
        flat.run(head, from + r, min_of(flat.rows, rows - r), in_blocks, scratch, Laps(SA_SPARED));
      return;
    }
    const RowBits looked{reinterpret_cast<uint64_t*>(scratch), words}, chosen{looked.row(kRowsAtOnce), chosen_words};
    uint64_t* members = chosen.row(look.rows);
    const ChoiceMemory memory(scratch += round_up(bit_bytes, 64), e.keys, e.dim);
    LetThrough through(scratch += choice_bytes, most, e.dim);
    char* block_scratch = scratch + through_bytes;
    const uint8_t* by_key = look.by_key + e.kv_head[head] * look.by_key_head_stride;
    Laps laps;
    Seed mean_seed, seed;
    look_first<T>(e, look, head, from, rows, &mean_seed, looked, memory, &laps);
    laps.end(SA_LOOK);
    for (int64_t first = from; first < from + rows; first += look.rows) {
      const int64_t count = min_of(look.rows, from + rows - first), seen = e.to.candidates[first + count - 1];
      uint64_t* bits = looked.row((first - from) / look.rows);
      set_bits(bits, 0, min_of(e.to.sinks, seen));
      set_bits(bits, max_of<int64_t>(0, e.to.candidates[first] - look.near), seen);
      through.take(bits, seen, by_key, e.dim);
      laps.end(SA_LET_THROUGH);
      for (int64_t r = 0; r < count; r += kRowsAtOnce) {
        Wanted wanted = wanted_rows<T>(e, head, first + r, min_of<int64_t>(kRowsAtOnce, count - r), memory);
        for (int64_t i = 0; i < wanted.rows; ++i) wanted.visible[i] -= seen - through.count;  // all later keys are let through
        choose_best(through.packed, e.dim, wanted, &seed, {chosen.row(r), chosen_words}, memory, &laps);
      }
      if (e.to.indices)
        for (int64_t r = 0; r < count; ++r)
          write_through(chosen.row(r), through, e.to.indices + e.to.indptr[head * e.rows + first + r]);
      members_of(chosen, count, through.count, members);
      laps.end(SA_CHOOSE);
      const Block block{head, count, first, through.keys, members, 0, through.count, lanes};
      write_block(a.attend, block, attend_block<T>(a.attend, block, block_scratch, &laps));
      laps.end(SA_TOGETHER);
    }
  });
}

int looked_rows(const SaLookedRows* a) { return a->choose.bfloat16 ? looked_rows_of<bf16>(*a) : looked_rows_of<float>(*a); }

}  // namespace
