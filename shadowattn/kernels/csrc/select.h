// The exact k best of n scores, ties to the lower key, as an ascending list of keys.
//
// A full sort, a heap or torch.topk costs more than the attention it saves. Here scores are mapped linearly to bytes; a bisection
// over byte values, each step one compare-and-count over n bytes, finds the byte at which the k-th best lies. Only the few keys
// with that very byte are then compared in full. The mapping never changes an order, so the result is exact whatever its range.
#pragma once
#include "abi.h"
#include "parallel.h"
#include "isa.h"

namespace {

// Scores map to −126 … 126. Keys that are always in get 127, the padding and the losers of a tie −128.
constexpr int kForced = 127, kNever = -128, kWorst = -126;

constexpr int64_t padded_bytes(int64_t n) { return (n + 63) / 64 * 64; }

// Each kind of scores has to_bytes(), which never turns an order around, and rank(), which orders like the scores do.
struct FloatScores {
  const float* s;

  int32_t rank(int64_t j) const {
    const float x = s[j] + 0.0f;  // −0 is 0
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ static_cast<int32_t>(static_cast<uint32_t>(bits >> 31) >> 1);
  }

  void to_bytes(int64_t n, int8_t* bytes) const {
    float low = s[0], high = s[0];
    const int64_t whole = n / VL * VL;
    if (whole) {
      vf lows[4], highs[4];
      for (int i = 0; i < 4; ++i) lows[i] = highs[i] = Isa::load(s);
      int64_t j = 0;
      for (; j + 4 * VL <= whole; j += 4 * VL)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          lows[i] = Isa::min(Isa::load(s + j + i * VL), lows[i]);
          highs[i] = Isa::max(Isa::load(s + j + i * VL), highs[i]);
        }
      for (; j < whole; j += VL) {
        lows[0] = Isa::min(Isa::load(s + j), lows[0]);
        highs[0] = Isa::max(Isa::load(s + j), highs[0]);
      }
      for (int i = 0; i < 4; ++i) {
        low = min_of(low, -Isa::lanes_max(-lows[i]));
        high = max_of(high, Isa::lanes_max(highs[i]));
      }
    }
    for (int64_t j = whole; j < n; ++j) {
      low = min_of(low, s[j]);
      high = max_of(high, s[j]);
    }
    const float range = high - low;
    if (!(range <= -kLowest)) {  // infinite: full comparisons decide
      memset(bytes, 0, static_cast<size_t>(n));
      return;
    }
    const float factor = range > 1e-30f ? -2 * kWorst / range : 0;  // of denormal numbers it would be infinite
    for (int64_t j = 0; j < whole; j += VL) {
      const vf x = Isa::min((Isa::load(s + j) - Isa::set1(low)) * Isa::set1(factor) + Isa::set1(kWorst), Isa::set1(-kWorst));
      Isa::store_bytes(bytes + j, x);
    }
    for (int64_t j = whole; j < n; ++j) bytes[j] = rounded_byte(min_of((s[j] - low) * factor + kWorst, static_cast<float>(-kWorst)));
  }
};

// Every how-many-th vector is looked at where a guess is enough; what it misses costs time, never exactness.
inline int64_t sample_step(int64_t n) { return n >= 2048 ? 8 : 1; }

// A shift is enough of a mapping. The range comes from a sample, and what lies outside of it saturates.
template <class T>
struct IntegerScores {
  const T* s;

  int32_t rank(int64_t j) const { return s[j]; }

  void sample_range(int64_t n, int32_t* low, int32_t* high) const {
    vi lows, highs;
    for (int i = 0; i < VL; ++i) lows[i] = highs[i] = s[0];
    int64_t j = 0;
    for (; j + VL <= n; j += VL * sample_step(n)) {
      vi x;
      if constexpr (sizeof(T) == 4) x = Isa::load(s + j);
      else
        for (int i = 0; i < VL; ++i) x[i] = s[j + i];
      lows = x < lows ? x : lows;
      highs = x > highs ? x : highs;
    }
    for (j = n / VL * VL; j < n; ++j) {
      lows[0] = min_of<int32_t>(lows[0], s[j]);
      highs[0] = max_of<int32_t>(highs[0], s[j]);
    }
    *low = lows[0];
    *high = highs[0];
    for (int i = 1; i < VL; ++i) {
      *low = min_of<int32_t>(*low, lows[i]);
      *high = max_of<int32_t>(*high, highs[i]);
    }
  }

  void to_bytes(int64_t n, int8_t* bytes) const {
    int32_t low, high;
    sample_range(n, &low, &high);
    const uint32_t range = static_cast<uint32_t>(high) - static_cast<uint32_t>(low);
    const int32_t centre = low + static_cast<int32_t>(range / 2);
    int shift = 0;
    while (range >> shift > 200) ++shift;  // −100 … 100, and room for what the sample missed
    int64_t j = 0;
    if constexpr (sizeof(T) == 4) j = Isa::shifted_bytes(s, n, centre, shift, -kWorst, bytes);
    for (; j < n; ++j) bytes[j] = static_cast<int8_t>(max_of(min_of((s[j] - centre) >> shift, -kWorst), kWorst));
  }
};

// The need-th largest of `ranks`, 1 ≤ need ≤ count, by bisection; *above: how many are larger.
inline int32_t nth_rank(const int32_t* ranks, int64_t count, int64_t need, int64_t* above) {
  int64_t low = ranks[0], high = ranks[0];
  for (int64_t j = 1; j < count; ++j) {
    low = min_of<int64_t>(low, ranks[j]);
    high = max_of<int64_t>(high, ranks[j]);
  }
  *above = 0;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    const int32_t limit = static_cast<int32_t>(middle);
    int32_t n = 0;
    for (int64_t j = 0; j < count; ++j) n += ranks[j] >= limit;
    if (n >= need) {
      low = middle;
    } else {
      high = middle - 1;
      *above = n;
    }
  }
  return static_cast<int32_t>(low);
}

// Scratch of one selection: bytes, then candidates (with room for whole vectors) and their ranks.
inline int64_t select_bytes(int64_t n) { return padded_bytes(n) + 8 * (padded_bytes(n) + Isa::kListStep); }

// Keeps of the keys with byte t the `need` best, ties to the lower key; the others lose their byte.
template <class Scores>
inline void break_ties(const Scores& scores, int8_t* bytes, int64_t n, int t, int64_t need, int32_t* candidates) {
  int64_t next = 0;
  const int64_t count = Isa::list_bytes<true>(bytes, padded_bytes(n), t, &next, candidates, padded_bytes(n) + Isa::kListStep);
  int32_t* ranks = candidates + padded_bytes(n) + Isa::kListStep;
  for (int64_t i = 0; i < count; ++i) ranks[i] = t == kForced ? 0 : scores.rank(candidates[i]);
  int64_t above;
  const int32_t limit = nth_rank(ranks, count, need, &above);
  int64_t ties = need - above, tied = 0;
  for (int64_t i = 0; i < count; ++i) tied += ranks[i] == limit;
  if (tied == ties) {  // the usual case, kept without branches: which candidates win cannot be predicted
    for (int64_t i = 0; i < count; ++i) bytes[candidates[i]] = static_cast<int8_t>(ranks[i] < limit ? kNever : t);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const bool in = ranks[i] > limit || (ranks[i] == limit && ties-- > 0);
    bytes[candidates[i]] = static_cast<int8_t>(in ? t : kNever);
  }
}

// The largest byte that at least k bytes reach, by bisection. *from_it: how many reach it, *above: how many are larger; where
// exactly k reach some byte, that one will do. The first steps count a sample, which tells where to look.
inline int threshold(const int8_t* bytes, int64_t padded, int64_t k, int64_t* from_it, int64_t* above) {
  int low = kWorst, high = kForced;
  *from_it = -1;
  *above = 0;
  const auto look = [&](int at) {
    const int64_t count = Isa::count_from(bytes, padded, at);
    if (count >= k) {
      low = at;
      *from_it = count;
    } else {
      high = at - 1;
      *above = count;
    }
  };
  if (padded >= 4096) {
    constexpr int64_t kPart = 256;
    int first = kWorst, last = kForced;
    while (first < last) {
      const int middle = (first + last + 1) >> 1;
      int64_t count = 0;
      for (int64_t j = 0; j + kPart <= padded; j += 8 * kPart) count += Isa::count_from(bytes + j, kPart, middle);
      if (8 * count >= k) first = middle;
      else last = middle - 1;
    }
    // The sample is a few bytes off: steps of 2, 4, 8 … around its answer, until both sides are known.
    for (int step = 2, at = max_of(first, kWorst + 1); low < high && *from_it != k; step *= 2) {
      const bool too_high = (look(at), high < at);
      if (too_high && low > kWorst) break;
      if (!too_high && high < kForced) break;
      at = too_high ? max_of(at - step, kWorst + 1) : min_of(at + step, kForced);
      if (at <= low || at > high) break;
    }
  }
  while (low < high && *from_it != k) look((low + high + 1) >> 1);
  if (*from_it < 0) *from_it = Isa::count_from(bytes, padded, low);
  return low;
}

// One list, into `out`: the k best of the first n scores, then the tail keys. 0 ≤ k ≤ n.
template <class Scores>
inline void select_list(const Scores& scores, const SaLists& to, int64_t list, int64_t at, int32_t* out, char* scratch) {
  const int64_t n = to.candidates[at], tail = to.tail[at];
  const int64_t k = to.indptr[list + 1] - to.indptr[list] - tail;
  for (int64_t i = 0; i < tail; ++i) out[k + i] = static_cast<int32_t>(n + i);
  if (k >= n) {
    for (int64_t j = 0; j < n; ++j) out[j] = static_cast<int32_t>(j);
    return;
  }
  if (k == 0) return;
  int8_t* bytes = reinterpret_cast<int8_t*>(scratch);
  const int64_t padded = padded_bytes(n);
  scores.to_bytes(n, bytes);
  memset(bytes + n, kNever, static_cast<size_t>(padded - n));
  // As many of the sinks, and then of the window, as k holds: never more than k keys are forced, so that none of them tie.
  const int64_t sinks = min_of(to.sinks, max_of<int64_t>(0, k - to.self_first)), recent = min_of(to.recent, k - sinks);
  for (int64_t j = 0; j < sinks; ++j) bytes[j] = kForced;
  for (int64_t j = n - recent; j < n; ++j) bytes[j] = kForced;
  int64_t from_low, from_above;
  const int low = threshold(bytes, padded, k, &from_low, &from_above);
  if (from_low != k) break_ties(scores, bytes, n, low, k - from_above, reinterpret_cast<int32_t*>(bytes + padded));
  int64_t next = 0, listed = Isa::list_bytes<false>(bytes, padded, low, &next, out, k);
  int32_t rest[2 * Isa::kListStep];  // the last steps write past the end of the list, which is another list's beginning
  while (listed < k) {
    const int64_t found = Isa::list_bytes<false>(bytes, padded, low, &next, rest, 2 * Isa::kListStep);
    memcpy(out + listed, rest, static_cast<size_t>(found) * 4);
    listed += found;
  }
}

// float16 to float32, exact: subnormal numbers by a subtraction, whatever the thread does to them. Infinities become ±65536, which
// no finite float16 reaches, so that all keep their order. Plain loops, which every level's compiler makes vectors of.
inline void widen(const uint16_t* from, int64_t n, float* to) {
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t magnitude = static_cast<uint32_t>(from[j] & 0x7fff) << 13, sign = static_cast<uint32_t>(from[j] & 0x8000) << 16;
    const uint32_t normal_bits = magnitude + (112u << 23), low_bits = magnitude + (113u << 23);
    float normal, low;
    memcpy(&normal, &normal_bits, 4);
    memcpy(&low, &low_bits, 4);
    low -= 0x1p-14f;
    const float value = magnitude < (1u << 23) ? low : normal;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(to + j, &bits, 4);
  }
}

int select(const SaSelect* a) {
  int64_t longest = 1;
  for (int64_t b = 0; b < a->lists; ++b) longest = max_of(longest, a->to.candidates[b]);
  constexpr int64_t kListsPerTask = 8;
  const int64_t tasks = ceil_div(a->lists, kListsPerTask);
  const int64_t wide_bytes = a->dtype == SA_FLOAT16 ? 4 * padded_bytes(longest) : 0;
  return run_queue(a->heads * tasks, a->threads, wide_bytes + select_bytes(longest), [&](int64_t t, char* scratch) {
    const int64_t head = t / tasks, from = (tasks - 1 - t % tasks) * kListsPerTask;
    for (int64_t b = from; b < min_of(from + kListsPerTask, a->lists); ++b) {
      const int64_t list = head * a->lists + b, at = head * a->scores.head_stride + b * a->scores.row_stride;
      int32_t* out = a->to.indices + a->to.indptr[list];
      if (a->dtype == SA_INT8) {
        select_list(IntegerScores<int8_t>{static_cast<const int8_t*>(a->scores.data) + at}, a->to, list, b, out, scratch);
      } else if (a->dtype == SA_FLOAT16) {
        float* wide = reinterpret_cast<float*>(scratch);
        widen(static_cast<const uint16_t*>(a->scores.data) + at, a->to.candidates[b], wide);
        select_list(FloatScores{wide}, a->to, list, b, out, scratch + wide_bytes);
      } else {
        select_list(FloatScores{static_cast<const float*>(a->scores.data) + at}, a->to, list, b, out, scratch);
      }
    }
  });
}

}  // namespace
