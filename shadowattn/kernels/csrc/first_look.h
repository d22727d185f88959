// Rows choose from what a first look at the keys lets through: that of one query for a block of rows, the mean of theirs.
//
// The mean query's INT8 products with every key are one row of products instead of a block's. The keys that they let through are
// packed anew, and each row of the block meets those alone: products, counts and comparisons are of that many keys. Neighbouring
// rows rank alike, so that a few times their budget holds most of what they would choose.
#pragma once
#include "choose_rows.h"
#include "row_lists.h"

namespace {

// A first look, and how many of the keys that a block's first row sees it lets through; `failed()`: there was no memory for that.
struct FirstLook : SaFirstLook {
  int64_t* through;  // [H, blocks]

  FirstLook(const SaFirstLook& look, const SaEstimate& a) : SaFirstLook(look) {
    const int64_t blocks = ceil_div(a.rows, rows);
    through = static_cast<int64_t*>(malloc(static_cast<size_t>(a.heads * blocks) * sizeof(int64_t)));
    if (!through) return;
    for (int64_t head = 0; head < a.heads; ++head)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t last = head * a.rows + min_of((b + 1) * rows, a.rows) - 1, seen = a.to.candidates[b * rows];
        const int64_t kept = a.to.indptr[last + 1] - a.to.indptr[last];
        const float wanted = static_cast<float>(kept) * candidates;  // may be beyond all integers
        const bool every = spared[head] || wanted >= static_cast<float>(seen);
        through[head * blocks + b] = every ? seen : min_of(max_of(least_above(wanted), kept), seen);
      }
  }
  ~FirstLook() { free(through); }
  FirstLook(const FirstLook&) = delete;
  FirstLook& operator=(const FirstLook&) = delete;

  bool failed() const { return !through; }
};

// The mean of some rows' integers in the range of an int8, as large as it can be; half up. Only its direction matters.
template <class T>
void mean_query(const SaEstimate& a, int64_t head, int64_t from, int64_t to, int8_t* mean, int32_t* bias) {
  int32_t sums[256] = {};
  int8_t row[256];
  for (int64_t r = from; r < to; ++r) {
    const T* q = static_cast<const T*>(a.q.data) + head * a.q.head_stride + r * a.q.row_stride;
    quantise_row(q, a.dim, a.q_scales[head], row);
    for (int64_t d = 0; d < a.dim; ++d) sums[d] += row[d];
  }
  int64_t largest = 1, total = 0;
  for (int64_t d = 0; d < a.dim; ++d) largest = max_of<int64_t>(largest, sums[d] < 0 ? -sums[d] : sums[d]);
  for (int64_t d = 0; d < a.dim; ++d) {
    const int64_t shifted = 2 * 127 * static_cast<int64_t>(sums[d]) + 255 * largest;  // of ±127 and a half, not negative
    mean[d] = static_cast<int8_t>(shifted / (2 * largest) - 127);
    total += mean[d];
  }
  *bias = bias_of(total);
}

// Bits of the keys that mean queries let through, for up to 8 blocks of rows of a head from row `from` on.
template <class T>
void look_first(const SaEstimate& a, const FirstLook& look, int64_t head, int64_t from, int64_t rows, Seed* seed,
                const RowBits& through, const ChoiceMemory& memory, Laps* laps) {
  const int64_t* wanted_through = look.through + head * ceil_div(a.rows, look.rows) + from / look.rows;
  memory.clear();
  Wanted wanted{ceil_div(rows, look.rows), {}, {}, {}, {}};
  for (int64_t b = 0; b < wanted.rows; ++b) {
    const int64_t first = from + b * look.rows;
    int8_t* mean = memory.rows.q + b * memory.rows.stride;
    mean_query<T>(a, head, first, min_of(first + look.rows, from + rows), mean, memory.rows.biases + b);
    wanted.visible[b] = a.to.candidates[first];
    wanted.kept[b] = wanted_through[b];
  }
  choose_best(a.packed + a.kv_head[head] * a.packed_head_stride, a.dim, wanted, seed, through, memory, laps, {SA_LOOK, SA_LOOK});
}

constexpr int64_t kKeysAhead = 48;  // that are fetched before they are packed

// The keys let through: which they are, and packed one after another.
struct LetThrough {
  int32_t* keys;
  uint8_t* packed;
  int64_t count;

  static int64_t bytes_needed(int64_t most, int64_t dim) {
    return packed_bytes(most, dim) + (round_up(most, 32) + Isa::kListStep) * 4;
  }
  LetThrough(char* memory, int64_t most, int64_t dim)
      : keys(reinterpret_cast<int32_t*>(memory + packed_bytes(most, dim))), packed(reinterpret_cast<uint8_t*>(memory)), count(0) {}

  // Those whose bits are set among the first `seen`.
  void take(const uint64_t* bits, int64_t seen, const uint8_t* by_key, int64_t dim) {
    count = 0;
    for (int64_t w = 0; w < ceil_div(seen, 64); ++w) count += Isa::list_bits(bits[w], static_cast<int32_t>(64 * w), keys + count);
    for (int64_t j = count; j < round_up(count, 32); ++j) keys[j] = keys[count - 1];
    for (int64_t j = 0; j < round_up(count, 32); j += 16) {
      for (int64_t i = j + kKeysAhead; i < min_of(j + kKeysAhead + 16, count); ++i) fetch_bytes(by_key + keys[i] * dim, dim);
      Isa::pack_16(by_key, dim / 4, keys + j, packed + j * dim);
    }
  }

 private:
  static int64_t packed_bytes(int64_t most, int64_t dim) { return round_up(round_up(most, 32) * dim, 64); }
};

// Whether every block of a head lets every key through that its first row sees. Asked of whole heads, so that how rows are shared
// out over tasks, and with it the number of threads, changes no result.
inline bool lets_all_through(const SaEstimate& a, const FirstLook& look, int64_t head) {
  const int64_t blocks = ceil_div(a.rows, look.rows);
  for (int64_t b = 0; b < blocks; ++b)
    if (look.through[head * blocks + b] < a.to.candidates[b * look.rows]) return false;
  return true;
}

// The most keys that any block's first look lets through, of heads that look first.
inline int64_t most_through(const SaEstimate& a, const FirstLook& look) {
  int64_t most = 0;
  const int64_t blocks = ceil_div(a.rows, look.rows);
  for (int64_t i = 0; i < a.heads * blocks; ++i) {
    if (lets_all_through(a, look, i / blocks)) continue;
    const int64_t first = i % blocks * look.rows, last = min_of(first + look.rows, a.rows) - 1;
    most = max_of(most, look.through[i] + a.to.sinks + look.near + a.to.candidates[last] - a.to.candidates[first]);
  }
  return min_of(most, a.keys);
}

}  // namespace
