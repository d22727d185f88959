// The keys that many rows of a block keep, and which rows keep each.
//
// Neighbouring rows of a text keep much the same keys. Reading a key once for all rows of a block (attend_blocks.h) takes as long as
// some of them take to read it on their own, so that the rows attend together to what many keep, and each on its own to the rest.
#pragma once
#include "choose_rows.h"

namespace {

constexpr int64_t kCommonRows = 64;  // of a block: one bit each
constexpr int kCountBits = 7;        // of a number up to kCommonRows

typedef uint64_t vw __attribute__((vector_size(sizeof(vi))));
constexpr int64_t kWordsAtOnce = sizeof(vw) / sizeof(uint64_t);

// One step of a transposition of 64 × 64 bits: numbers that are `apart` × `step` words apart exchange the bits of `mask`, which are
// `step` bits apart.
inline void exchange_bits(uint64_t* words, int64_t apart, int step, uint64_t mask) {
  const int64_t distance = apart * step;
  for (int64_t first = 0; first < 64; first += 2 * distance)
    for (int64_t i = first; i < first + distance; i += kWordsAtOnce) {
      vw a, b;
      memcpy(&a, words + i, sizeof a);
      memcpy(&b, words + i + distance, sizeof b);
      const vw moved = ((a >> step) ^ b) & mask;
      a ^= moved << step;
      b ^= moved;
      memcpy(words + i, &a, sizeof a);
      memcpy(words + i + distance, &b, sizeof b);
    }
}

// For each key of word `w` the rows that keep it. What is eight words apart and more is exchanged whole vectors at a time; what is
// nearer lies as far apart once every eighth word follows the one before.
inline void members_of_word(const RowBits& bits, int64_t rows, int64_t w, uint64_t* members) {
  uint64_t by_row[64], by_eighth[64];
  for (int64_t r = 0; r < 64; ++r) by_row[r] = r < rows ? bits.row(r)[w] : 0;
  exchange_bits(by_row, 1, 32, 0x00000000ffffffff);
  exchange_bits(by_row, 1, 16, 0x0000ffff0000ffff);
  exchange_bits(by_row, 1, 8, 0x00ff00ff00ff00ff);
  for (int64_t i = 0; i < 64; ++i) by_eighth[i % 8 * 8 + i / 8] = by_row[i];
  exchange_bits(by_eighth, 8, 4, 0x0f0f0f0f0f0f0f0f);
  exchange_bits(by_eighth, 8, 2, 0x3333333333333333);
  exchange_bits(by_eighth, 8, 1, 0x5555555555555555);
  for (int64_t i = 0; i < 64; ++i) members[i] = by_eighth[i % 8 * 8 + i / 8];
}

// Of the words from `w` on, kWordsAtOnce of them, the keys that at least `least` of the rows keep. Rows are counted for all keys at
// once: vector b holds bit b of every key's number.
inline void common_words(const RowBits& bits, int64_t rows, int64_t w, int64_t least, uint64_t* common) {
  vw counts[kCountBits] = {};
  for (int64_t r = 0; r < rows; r += 2) {
    vw a, b = {};
    memcpy(&a, bits.row(r) + w, sizeof a);
    if (r + 1 < rows) memcpy(&b, bits.row(r + 1) + w, sizeof b);
    vw carry = (a & b) | (counts[0] & (a ^ b));
    counts[0] ^= a ^ b;
#pragma GCC unroll 8
    for (int bit = 1; bit < kCountBits; ++bit) {
      const vw next = counts[bit] & carry;
      counts[bit] ^= carry;
      carry = next;
    }
  }
  vw above = {}, equal = ~above;  // of the bits so far, from the highest
#pragma GCC unroll 8
  for (int bit = kCountBits - 1; bit >= 0; --bit) {
    if (least >> bit & 1) equal &= counts[bit];
    else above |= equal & counts[bit], equal &= ~counts[bit];
  }
  above |= equal;
  memcpy(common, &above, sizeof above);
}

// Vectors of a key head that the rows of a block read.
template <class T>
struct Values {
  const T* data;
  int64_t stride, dim;

  // Those of the keys of word `w` whose bits are set.
  bool all_finite(int64_t w, uint64_t keys) const {
    vf differences = Isa::set1(0);
    for (; keys; keys &= keys - 1) {
      const T* x = data + (64 * w + __builtin_ctzll(keys)) * stride;
      int64_t d = 0;
      for (; d + VL <= dim; d += VL) differences += Isa::load(x + d) - Isa::load(x + d);
      if (d < dim) differences += Isa::load_half(x + d) - Isa::load_half(x + d);
    }
    return Isa::lanes_sum(differences) == 0;
  }
};

struct CommonKeys {
  int32_t* keys;      // ascending
  uint64_t* members;  // of each, the rows that keep it
  int64_t count;

  static int64_t bytes_needed(int64_t keys) { return round_up(padded_bytes(keys) * 12 + words_of(keys) * 8 + Isa::kListStep * 4, 64); }
  CommonKeys(char* memory, int64_t most) {
    members = reinterpret_cast<uint64_t*>(memory);
    words_ = members + padded_bytes(most);
    keys = reinterpret_cast<int32_t*>(words_ + words_of(most));
  }

  // Of up to 64 rows with bits in `words` words: takes those that at least `least` keep, unless they are fewer than `fewest`, out of
  // the rows' bits, which hold the rest from then on. Not those with values that are not finite, which reach every row of a block: a
  // weight of 0 does not stop them.
  template <class T>
  void take(const RowBits& bits, int64_t rows, int64_t words, int64_t least, int64_t fewest, const Values<T>& values) {
    int64_t found = 0;
    for (int64_t w = 0; w < words; w += kWordsAtOnce) common_words(bits, rows, w, least, words_ + w);
    for (int64_t w = 0; w < words; ++w) found += __builtin_popcountll(words_[w]);
    count = 0;
    if (found < fewest) return;
    for (int64_t w = 0; w < words; ++w) {
      uint64_t of_word[64], left = words_[w];
      if (!values.all_finite(w, left))
        for (uint64_t some = left; some; some &= some - 1) {
          const uint64_t lowest = some & -some;
          if (!values.all_finite(w, lowest)) left &= ~lowest;
        }
      if (!left) continue;
      members_of_word(bits, rows, w, of_word);
      for (int64_t r = 0; r < rows; ++r) bits.row(r)[w] &= ~left;
      Isa::list_bits(left, static_cast<int32_t>(64 * w), keys + count);
      for (; left; left &= left - 1) members[count++] = of_word[__builtin_ctzll(left)];
    }
  }

 private:
  static int64_t words_of(int64_t keys) { return round_up(padded_bytes(keys) / 64, kWordsAtOnce); }

  uint64_t* words_;  // of those keys, as bits
};

}  // namespace
