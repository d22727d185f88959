// The k best keys of each of some rows of a head by INT8 products, as bits: estimate and selection in one pass.
//
// Eight rows meet the packed keys, and a product becomes a byte while it is in a register, or on tiles while the next ones are made:
// (product − centre) >> shift, saturated.
// Centre and shift come from the k-th products of the eight rows before, so that the k-th one of these rows is within the bytes'
// range and a byte is a few keys wide. Counts of bytes find the byte of the k-th product; of the few keys with that very byte the
// products are computed again and compared. Where the k-th product lies outside of the range, the row's bytes are made again, first
// for the whole range of products and then for the part of it that holds the k-th one: the result is exact whatever the guess was.
// They are also made again, for the products of that very byte, where many keys have it: as where one large dimension makes the
// products of all keys nearly alike. A byte that stands for a single product needs no comparison.
#pragma once
#include "abi.h"
#include "estimate.h"
#include "select.h"
#include "stage_times.h"

namespace {

constexpr int kByteBits = 7;      // how much narrower than a byte of the whole range the bytes within it are
// Keys with the byte of the k-th product are compared one by one where they are at most so many, or at most this part of the keys: a
// pass over all keys is cheaper than more comparisons.
constexpr int64_t kFewTies = 64, kFewTiesPart = 64;
constexpr int64_t kSampleStep = 8;  // the first guess looks at every eighth step of keys

// byte = (product − centre) >> shift.
struct Mapping {
  int32_t centre;
  int shift;
};

// The whole range of products of D dimensions in −127 … 126.
inline Mapping whole_range(int64_t dim) {
  int shift = 0;
  while (dim * 127 * 127 >> shift > kForced - 1) ++shift;
  return {0, shift};
}

// The part of a mapping's range that has byte `at`, with `wider` more bits on both sides.
inline Mapping part_of(const Mapping& whole, int at, int wider) {
  const int shift = max_of(0, whole.shift - kByteBits + wider);
  return {whole.centre + static_cast<int32_t>(static_cast<uint32_t>(at) << whole.shift) + (1 << whole.shift >> 1), shift};
}

// Bits of some rows over keys, 64 keys a word.
struct RowBits {
  uint64_t* words;
  int64_t stride;  // words of a row

  uint64_t* row(int64_t r) const { return words + r * stride; }
};

// Bytes of 8 rows for the keys 0 … `keys`, every `step`-th 32 of them; products by tiles where the level has them.
template <class I>
inline void mapped_products(const uint8_t* packed, int64_t keys, int64_t step, int64_t quads, const QuantisedRows& x,
                            const Mapping* mappings, int8_t* bytes, int64_t stride) {
  constexpr int N = kKeysAtOncePacked / VL;
  int32_t biases[kRowsAtOnce];
  int shifts[kRowsAtOnce];
  for (int r = 0; r < kRowsAtOnce; ++r) biases[r] = x.biases[r] - mappings[r].centre, shifts[r] = mappings[r].shift;
  if constexpr (I::kTiles) return I::mapped_bytes(packed, keys, step, quads, x.q, x.stride, biases, shifts, bytes, stride);
  for (int64_t key = 0, at = 0; key < keys; key += step * kKeysAtOncePacked, at += kKeysAtOncePacked) {
    vi sums[kRowsAtOnce][N];
    I::template products<kRowsAtOnce>(packed + key / 16 * quads * 64, quads, x.q, x.stride, biases, sums);
#pragma GCC unroll 8
    for (int r = 0; r < kRowsAtOnce; ++r) I::store_shifted(bytes + r * stride + at, sums[r], shifts[r]);
  }
}

struct Threshold {
  int at;
  int64_t from_it, above;  // how many bytes reach it, and how many are larger; `above` is not known where exactly k reach it
};

// The byte in −127 … 126 that at least k bytes reach and fewer than k exceed; or that exactly k reach. False: it is none of them.
// `slope` is how many keys have one byte there, a guess that is made better.
inline bool find_threshold(const int8_t* bytes, int64_t padded, int64_t k, double* slope, Threshold* found) {
  int low = kNever, high = kForced, at = 0;
  int64_t low_count = -1, high_count = -1;
  for (int looks = 0; high - low > 1; ++looks) {
    const int64_t count = Isa::count_from(bytes, padded, at);
    if (count == k) {
      *found = {at, k, 0};
      return true;
    }
    if (count > k) low = at, low_count = count;
    else high = at, high_count = count;
    if (low_count >= 0 && high_count >= 0) *slope = max_of(static_cast<double>(low_count - high_count) / (high - low), 0.125);
    const double distance = static_cast<double>(count - k) / *slope;
    const int steps = static_cast<int>(min_of(max_of(distance, -254.0), 254.0));
    at = looks < 5 ? at + (count > k ? max_of(steps, 1) : min_of(steps, -1)) : (low + high) >> 1;
    at = max_of(min_of(at, high - 1), low + 1);
  }
  if (low == kNever) return false;
  if (high_count < 0 && (high_count = Isa::count_from(bytes, padded, high)) >= k) return false;
  *found = {low, low_count, high_count};
  return true;
}

// The bits of the k best where each byte stands for one product: those above the threshold, and the first ones that have its byte.
inline void mark_first(const int8_t* bytes, int64_t padded, int64_t k, const Threshold& t, uint64_t* words) {
  int64_t ties = k - t.above;
  for (int64_t j = 0; j < padded; j += 64) {
    const uint64_t equal = Isa::bits_of<true>(bytes + j, t.at);
    words[j / 64] = Isa::bits_of<false>(bytes + j, t.at);
    uint64_t last = equal;  // those of them that do not count
    for (; ties && last; --ties) last &= last - 1;
    words[j / 64] &= ~last;
  }
}

// The bits of the k best: those above the threshold and, of the keys with its byte, the best, ties to the lower key.
inline void mark_best(const int8_t* bytes, int64_t padded, int64_t k, const Threshold& t, const uint8_t* packed, int64_t quads,
                      const int8_t* q, uint64_t* words, int32_t* candidates) {
  if (t.from_it == k) {
    for (int64_t j = 0; j < padded; j += 64) words[j / 64] = Isa::bits_of<false>(bytes + j, t.at);
    return;
  }
  int64_t count = 0;
  for (int64_t j = 0; j < padded; j += 64) {
    words[j / 64] = Isa::bits_of<false>(bytes + j, t.at);
    const uint64_t equal = Isa::bits_of<true>(bytes + j, t.at);
    if (equal) count += Isa::list_bits(equal, static_cast<int32_t>(j), candidates + count);
  }
  int32_t* products = candidates + padded + Isa::kListStep;
  for (int64_t i = 0; i < count; ++i) products[i] = Isa::key_product(packed, candidates[i], quads, q);
  int64_t above;
  const int32_t limit = nth_rank(products, count, k - t.above, &above);
  int64_t ties = k - t.above - above;
  for (int64_t i = 0; i < count; ++i)
    if (products[i] < limit || (products[i] == limit && ties-- <= 0)) words[candidates[i] / 64] &= ~(uint64_t{1} << candidates[i] % 64);
}

inline void set_bits(uint64_t* words, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j) words[j / 64] |= uint64_t{1} << j % 64;
}

struct ChoiceMemory {
  QuantisedRows rows;  // room for 8
  int8_t* bytes;
  int32_t* candidates;
  int64_t stride;  // bytes of a row

  static int64_t bytes_needed(int64_t keys, int64_t dim) {
    return kRowsAtOnce * padded_bytes(keys) + 8 * (padded_bytes(keys) + Isa::kListStep) + kRowsAtOnce * dim + 64;
  }
  ChoiceMemory(char* memory, int64_t keys, int64_t dim) {
    stride = padded_bytes(keys);
    bytes = reinterpret_cast<int8_t*>(memory);
    candidates = reinterpret_cast<int32_t*>(memory + kRowsAtOnce * padded_bytes(keys));
    rows.biases = candidates + 2 * (padded_bytes(keys) + Isa::kListStep);
    rows.q = reinterpret_cast<int8_t*>(rows.biases + 16);
    rows.stride = dim;
  }

  void clear() const {
    memset(rows.q, 0, static_cast<size_t>(kRowsAtOnce * rows.stride));
    memset(rows.biases, 0, kRowsAtOnce * 4);
  }
};

// What the rows so far say of the next ones' k-th products.
struct Seed {
  bool known = false;
  Mapping mapping;
  double slope = 4;
};

// What is wanted of up to 8 rows: of its first `visible` keys each keeps the `kept` best, and the first `sinks` and the last `recent`
// of them whatever their products.
struct Wanted {
  int64_t rows;
  int64_t visible[kRowsAtOnce], kept[kRowsAtOnce], sinks[kRowsAtOnce], recent[kRowsAtOnce];
};

// Which stages products and the choice by them are of.
struct ChoiceStages {
  SaStage products = SA_ESTIMATE, choice = SA_CHOOSE;
};

// Bits of the keys that the quantised rows of `memory` keep, of those in `packed`.
void choose_best(const uint8_t* packed, int64_t dim, const Wanted& wanted, Seed* seed, const RowBits& bits,
                 const ChoiceMemory& memory, Laps* laps, const ChoiceStages& stages = {}) {
  const int64_t quads = dim / 4, rows = wanted.rows, stride = memory.stride;
  const QuantisedRows& x = memory.rows;
  int64_t pending = 0, longest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t n = wanted.visible[r], kept = wanted.kept[r], sinks = wanted.sinks[r], recent = wanted.recent[r];
    memset(bits.row(r), 0, static_cast<size_t>(bits.stride) * 8);
    if (kept >= n) set_bits(bits.row(r), 0, n);
    else if (sinks + recent == kept) set_bits(bits.row(r), 0, sinks), set_bits(bits.row(r), n - recent, n);
    else pending |= 1 << r, longest = max_of(longest, n);
  }
  laps->end(stages.products);  // quantising too
  const Isa::Tiles tiles(quads);
  const Mapping whole = whole_range(dim);
  Mapping mappings[kRowsAtOnce];
  for (Mapping& mapping : mappings) mapping = seed->known ? seed->mapping : whole;
  if (pending && !seed->known && longest >= 4096) {  // a sample says where to look
    const int64_t steps = longest / kKeysAtOncePacked / kSampleStep, sampled = steps * kKeysAtOncePacked / 64 * 64;
    mapped_products<Isa>(packed, steps * kSampleStep * kKeysAtOncePacked, kSampleStep, quads, x, mappings, memory.bytes, stride);
    laps->end(stages.products);
    for (int64_t r = 0; r < rows; ++r) {
      Threshold found;
      double slope = 100;
      const int64_t k = max_of<int64_t>(wanted.kept[r] * sampled / longest, 1);
      if (pending >> r & 1 && find_threshold(memory.bytes + r * stride, sampled, k, &slope, &found))
        mappings[r] = part_of(whole, found.at, 1);
    }
    laps->end(stages.choice);
  }
  int32_t lowest = INT32_MAX, highest = INT32_MIN;
  while (pending) {
    mapped_products<Isa>(packed, longest, 1, quads, x, mappings, memory.bytes, stride);
    laps->end(stages.products);
    for (int64_t r = 0; r < rows; ++r) {
      if (!(pending >> r & 1)) continue;
      const int64_t n = wanted.visible[r], k = wanted.kept[r], recent = wanted.recent[r], padded = padded_bytes(n);
      int8_t* bytes = memory.bytes + r * stride;
      memset(bytes + n, kNever, static_cast<size_t>(padded - n));
      memset(bytes, kForced, static_cast<size_t>(wanted.sinks[r]));
      memset(bytes + n - recent, kForced, static_cast<size_t>(recent));
      Mapping& mapping = mappings[r];
      Threshold found;
      double slope = seed->slope;
      if (!find_threshold(bytes, padded, k, &slope, &found)) {
        mapping = whole;
        continue;
      }
      const bool tied = found.from_it != k, many = tied && found.from_it - found.above > max_of(kFewTies, padded / kFewTiesPart);
      if (mapping.shift && (many || (tied && mapping.shift == whole.shift))) {
        mapping = part_of(mapping, found.at, 0);
        continue;
      }
      seed->slope = slope;
      if (tied && !mapping.shift) mark_first(bytes, padded, k, found, bits.row(r));
      else mark_best(bytes, padded, k, found, packed, quads, x.q + r * x.stride, bits.row(r), memory.candidates);
      const int32_t at = mapping.centre + found.at * (1 << mapping.shift);
      lowest = min_of(lowest, at);
      highest = max_of(highest, at);
      pending &= ~(int64_t{1} << r);
    }
    laps->end(stages.choice);
  }
  if (lowest > highest) return;
  const int32_t margin = (highest - lowest) * 3 / 2 + 64;
  int shift = 0;
  while (127 << shift < margin && shift < whole.shift - 1) ++shift;
  *seed = {true, {lowest + (highest - lowest) / 2, shift}, seed->slope};
}

// Quantises up to 8 rows from `from` on into `memory`, and says what is wanted of them.
template <class T>
Wanted wanted_rows(const SaEstimate& a, int64_t head, int64_t from, int64_t rows, const ChoiceMemory& memory) {
  memory.clear();
  quantise_rows<T>(a, head, from, from + rows, memory.rows);
  Wanted wanted{rows, {}, {}, {}, {}};
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t list = head * a.rows + from + r, kept = a.to.indptr[list + 1] - a.to.indptr[list];
    wanted.visible[r] = a.to.candidates[from + r];
    wanted.kept[r] = kept;
    // As in select_list(): as many of the sinks and then of the window as the list holds.
    wanted.sinks[r] = min_of(a.to.sinks, max_of<int64_t>(0, kept - a.to.self_first));
    wanted.recent[r] = min_of(a.to.recent, kept - wanted.sinks[r]);
  }
  return wanted;
}

// Bits of up to 8 rows from `from` on; `bits.row(0)` is that of row `from`.
template <class T>
void choose_rows(const SaEstimate& a, int64_t head, int64_t from, int64_t rows, Seed* seed, const RowBits& bits,
                 const ChoiceMemory& memory, Laps* laps) {
  const Wanted wanted = wanted_rows<T>(a, head, from, rows, memory);
  choose_best(a.packed + a.kv_head[head] * a.packed_head_stride, a.dim, wanted, seed, bits, memory, laps);
}

}  // namespace
