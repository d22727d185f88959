// Exact attention where every row chooses its own keys by INT8 products: estimate, selection and attention of up to 256 rows of a
// head in one task. Neither scores nor lists reach memory, unless the caller asks for the lists.
//
// What a row chose is kept as bits. The rows of a block attend together to the keys that many of them keep (common_keys.h). To the rest
// each attends on its own: the rows go through K and V together, in windows of keys that stay in a near cache from row to row, with an
// online softmax, and neither lists nor weights of these are ever kept, so that many rows share what is read from a far cache. Which
// keys a row keeps is no pattern that hardware foresees. Where the rows together keep as many keys as there are, or more, each has a
// part of the next window fetched.
#pragma once
#include "abi.h"
#include "attend_blocks.h"
#include "attend_rows.h"
#include "choose_rows.h"
#include "common_keys.h"
#include "row_lists.h"
#include "softmax.h"

namespace {

constexpr int64_t kBitBytes = 8 << 20;  // of all rows of a task, about; read once, and fetched ahead
constexpr int64_t kFusedRows = 256;
constexpr int64_t kMostWindowWords = 16;
constexpr int64_t kVisitKeys = 144;  // of a list in a window: rows that find few keys there do not pay for going there
constexpr int64_t kRowsAhead = 4;    // whose bits are fetched
// Rows that make reading a key for a block of 64 lanes pay: on tiles a block takes about half as long.
template <class T>
constexpr int64_t kLeastKeepers = Isa::kTiles && sizeof(T) == 2 ? 12 : 24;
constexpr int64_t kFewestCommon = 64;  // keys that make beginning with them pay
constexpr int64_t kCopyReads = 2;      // of each key, by kCommonRows rows, that make converting it for them pay

// The keys of `words` words, ascending, the last one repeated up to a multiple of 4.
inline int64_t list_window(const uint64_t* words, int64_t count, int64_t first, int32_t* keys) {
  int64_t n = 0;
  for (int64_t w = 0; w < count; ++w) n += Isa::list_bits(words[w], static_cast<int32_t>(first + 64 * w), keys + n);
  if (n)
    for (int64_t j = n; j < round_up(n, 4); ++j) keys[j] = keys[n - 1];
  return n;
}

// The rows of a block begin with what they attended to together.
template <class T>
void begin_rows(const SaAttend& a, const Block& b, const BlockMemory<T>& m, RowSoftmax* state, float* outputs, int64_t padded) {
  for (int64_t r = 0; r < b.rows; ++r) {
    state[r].top = m.top[r];
    state[r].totals[0] = m.total[r];
    for (int64_t d = 0; d < a.dim; ++d)
      outputs[r * padded + RowMath<T>::place(d)] = m.outputs[BlockMath<T>::output_at(d, r, a.dim, b.lanes)];
  }
}

// What rows go through: the first `visible` keys, in windows of `words` words of bits. A row has `fetched` keys of the next one fetched.
// Where there are `copies`, each window is converted to float32 in there before its rows read it.
struct Windows {
  int64_t visible, words, fetched;
  float* copies;
};

// Whether each read of a bfloat16 number would convert it.
template <class T>
constexpr bool kConverts = sizeof(T) == 2 && !Isa::kBf16Dot;

// Keys and values of a head from some key on, rows of `k_stride` and `v_stride` numbers.
template <class T>
struct KeysFrom {
  const T *k, *v;
  int64_t k_stride, v_stride;
};

// `count` keys and values in float32, one after another.
template <class T>
KeysFrom<float> copied_window(const KeysFrom<T>& x, int64_t count, int64_t dim, float* to) {
  float* values = to + count * dim;
  for (int64_t j = 0; j < count; ++j)
    for (int64_t d = 0; d < dim; ++d) {
      to[j * dim + d] = to_float(x.k[j * x.k_stride + d]);
      values[j * dim + d] = to_float(x.v[j * x.v_stride + d]);
    }
  return {to, values, dim, dim};
}

template <class T, int DIM>
void attend_chosen(const SaAttend& a, int64_t head, int64_t from, int64_t rows, const RowBits& bits, const Windows& windows,
                   RowSoftmax* state, char* scratch) {
  const int64_t dim = DIM ? DIM : a.dim, padded = round_up(dim, 32), group = a.kv_head[head];
  const T* q = static_cast<const T*>(a.q.data) + head * a.q.head_stride;
  const KeysFrom<T> all{static_cast<const T*>(a.k.data) + group * a.k.head_stride, static_cast<const T*>(a.v.data) + group * a.v.head_stride,
                        DIM ? DIM : a.k.row_stride, DIM ? DIM : a.v.row_stride};
  float* outputs = reinterpret_cast<float*>(scratch);
  float* queries = outputs + rows * padded;
  for (int64_t r = 0; r < rows; ++r)
    RowMath<T>::load_query(q + (from + r) * a.q.row_stride, dim, queries + r * padded, a.scale < 0);
  const vf factor = weight_factor(a.scale);
  alignas(64) int32_t keys[64 * kMostWindowWords + Isa::kListStep];
  alignas(64) float weights[64 * kMostWindowWords + Isa::kListStep];
  const int64_t words = ceil_div(windows.visible, 64), window = windows.words;

  // A row attends to `n` keys more.
  const auto attend = [&](auto math, const auto& x, int64_t r, int64_t n) {
    using Math = decltype(math);
    Math::template score<DIM>(queries + r * padded, x.k, x.k_stride, keys, n, dim, weights);
    weigh(weights, n, factor, &state[r], outputs + r * padded, padded);
    Math::round_weights(weights, n);
    Math::template add_values<DIM>(outputs + r * padded, weights, 0, x.v, x.v_stride, keys, n, dim);
  };
  for (int64_t w = 0; w < words; w += window) {
    const int64_t first = 64 * w, next = first + 64 * window, next_end = min_of(next + 64 * window, windows.visible);
    KeysFrom<float> copied{};
    if (kConverts<T> && windows.copies) {
      const KeysFrom<T> these{all.k + first * all.k_stride, all.v + first * all.v_stride, all.k_stride, all.v_stride};
      copied = copied_window(these, min_of(next, windows.visible) - first, dim, windows.copies);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = next + r * windows.fetched;
      for (int64_t j = begin; j < min_of(begin + windows.fetched, next_end); ++j) {
        fetch_bytes(all.k + j * all.k_stride, dim * static_cast<int64_t>(sizeof(T)));
        fetch_bytes(all.v + j * all.v_stride, dim * static_cast<int64_t>(sizeof(T)));
      }
      fetch_bytes(bits.row(min_of(r + kRowsAhead, rows - 1)) + w, 8 * window);
      const int64_t n = list_window(bits.row(r) + w, min_of(window, words - w), copied.k ? 0 : first, keys);
      if (!n) continue;
      if constexpr (kConverts<T>)
        if (copied.k) {
          attend(RowFloats<float>(), copied, r, n);
          continue;
        }
      attend(RowMath<T>(), all, r, n);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    T* out = static_cast<T*>(a.out.data) + head * a.out.head_stride + (from + r) * a.out.row_stride;
    const float inverse_total = 1 / Isa::lanes_sum(Isa::load(state[r].totals));
    for (int64_t d = 0; d < dim; ++d) from_float(outputs[r * padded + RowMath<T>::place(d)] * inverse_total, out + d);
  }
}

// Each row's list, for who asked for lists.
inline void write_list(const uint64_t* words, int64_t count, int32_t* to) {
  int32_t rest[64 + Isa::kListStep];
  for (int64_t w = 0; w < count; ++w) {
    const int64_t n = Isa::list_bits(words[w], static_cast<int32_t>(64 * w), rest);
    memcpy(to, rest, static_cast<size_t>(n) * 4);
    to += n;
  }
}

// Rows of one head that choose from all keys: how many of them a task takes at most, and what it does with them. What it is made
// of has to outlive it.
template <class T>
class FusedRows {
 public:
  const int64_t rows;
  // Whether a task that begins at a multiple of `rows` may attend in blocks: these then begin at the same rows, and sums are rounded
  // alike, however many threads there are.
  const bool whole_blocks;

  FusedRows(const SaEstimate& choose, const SaAttend& attend)
      : rows(rows_of_task(choose, attend.threads)),
        whole_blocks(choose.rows >= kCommonRows && rows % kCommonRows == 0),
        choose_(choose),
        attend_(attend),
        window_(words_of_window(choose)),
        copy_bytes_(copy_bytes(choose, window_)),
        bit_bytes_(rows * words_of(choose) * 8),
        choice_bytes_(round_up(max_of(ChoiceMemory::bytes_needed(choose.keys, choose.dim), common_bytes(choose)), 64)) {}

  int64_t bytes_needed() const {
    return bit_bytes_ + choice_bytes_ + copy_bytes_ + rows * (2 * round_up(choose_.dim, 32) * 4 + static_cast<int64_t>(sizeof(RowSoftmax)));
  }

  // `count` rows from row `from` on, up to `rows`; in blocks, where `from` is a multiple of kCommonRows however many threads there are.
  void run(int64_t head, int64_t from, int64_t count, bool in_blocks, char* scratch, Laps laps) const {
    const SaLists& to = choose_.to;
    const RowBits bits{reinterpret_cast<uint64_t*>(scratch), words_of(choose_)};
    char* choice = scratch + bit_bytes_;
    const ChoiceMemory memory(choice, choose_.keys, choose_.dim);
    float* copies = copy_bytes_ ? reinterpret_cast<float*>(scratch + bit_bytes_ + choice_bytes_) : nullptr;
    scratch += bit_bytes_ + choice_bytes_ + copy_bytes_;
    RowSoftmax* state = reinterpret_cast<RowSoftmax*>(scratch + rows * 2 * round_up(choose_.dim, 32) * 4);
    Seed seed;
    for (int64_t r = 0; r < count; r += kRowsAtOnce) {
      const RowBits of_rows{bits.row(r), bits.stride};
      choose_rows<T>(choose_, head, from + r, min_of<int64_t>(kRowsAtOnce, count - r), &seed, of_rows, memory, &laps);
    }
    for (int64_t r = 0; r < count; ++r)
      if (to.indices) write_list(bits.row(r), bits.stride, to.indices + to.indptr[head * choose_.rows + from + r]);
    laps.end(SA_CHOOSE);
    if (!attend_.out.data) return;
    const int64_t visible = to.candidates[from + count - 1], dim = choose_.dim, padded = round_up(dim, 32);
    const int64_t* ends = to.indptr + head * choose_.rows + from;
    float* outputs = reinterpret_cast<float*>(scratch);
    for (int64_t r = 0; r < count; ++r) state[r] = {};
    memset(outputs, 0, static_cast<size_t>(count * padded) * 4);
    int64_t left = ends[count] - ends[0];  // to be attended to row by row
    CommonKeys common(choice, choose_.keys);
    const SaTensor& v = attend_.v;
    const Values<T> values{static_cast<const T*>(v.data) + attend_.kv_head[head] * v.head_stride, v.row_stride, dim};
    for (int64_t r = 0; in_blocks && r < count; r += kCommonRows) {
      const int64_t block_rows = min_of(kCommonRows, count - r), lanes = round_up(block_rows, VL);
      const int64_t least = ceil_div(kLeastKeepers<T> * lanes, kCommonRows);
      common.take({bits.row(r), bits.stride}, block_rows, ceil_div(visible, 64), least, kFewestCommon, values);
      if (!common.count) continue;
      const Block block{head, block_rows, from + r, common.keys, common.members, 0, common.count, lanes};
      const auto made = attend_block<T>(attend_, block, choice + CommonKeys::bytes_needed(choose_.keys), &laps);
      begin_rows(attend_, block, made, state + r, outputs + r * padded, padded);
      for (int64_t i = 0; i < common.count; ++i) left -= __builtin_popcountll(common.members[i]);
    }
    laps.end(SA_TOGETHER);
    const Windows windows{visible, window_, left < visible ? 0 : ceil_div(64 * window_, count), copies};
    const bool dense_rows = attend_.k.row_stride == dim && attend_.v.row_stride == dim;
    if (dim == 64 && dense_rows) attend_chosen<T, 64>(attend_, head, from, count, bits, windows, state, scratch);
    else if (dim == 128 && dense_rows) attend_chosen<T, 128>(attend_, head, from, count, bits, windows, state, scratch);
    else attend_chosen<T, 0>(attend_, head, from, count, bits, windows, state, scratch);
    laps.end(SA_ALONE);
  }

 private:
  // With a cache line more, so that the rows' words of a window do not share a set of the caches where the keys are a power of two.
  static int64_t words_of(const SaEstimate& choose) { return padded_bytes(choose.keys) / 64 + 8; }

  static int64_t rows_of_task(const SaEstimate& choose, int64_t threads) {
    const int64_t fit = min_of<int64_t>(kBitBytes / (padded_bytes(choose.keys) / 8), kFusedRows);
    const int64_t least = fit < kCommonRows || choose.rows < kCommonRows ? kRowsAtOnce : kCommonRows;
    int64_t rows = max_of(fit / least * least, least);
    while (rows > least && choose.heads * ceil_div(choose.rows, rows) < 4 * threads) rows = max_of(rows / 2 / least * least, least);
    return rows;
  }

  // Of common keys and the blocks that attend to them, once choosing is done.
  static int64_t common_bytes(const SaEstimate& choose) {
    return CommonKeys::bytes_needed(choose.keys) + bytes_of_blocks<T>(choose.dim, kCommonRows);
  }

  // Of a converted window; none where rows read too few of its keys. The same however many threads there are: a compiler may round the
  // same sums of either kind of numbers in two ways.
  static int64_t copy_bytes(const SaEstimate& choose, int64_t window) {
    const int64_t lists = choose.heads * choose.rows, kept = lists ? choose.to.indptr[lists] / lists : 0;
    const bool pays = kept * min_of(choose.rows, kCommonRows) >= kCopyReads * choose.keys;
    return kConverts<T> && pays ? 2 * 64 * window * choose.dim * static_cast<int64_t>(sizeof(float)) : 0;
  }

  // The same however many threads there are, since sums are rounded window by window: it goes by lists, and not by what is left of them
  // in a task.
  static int64_t words_of_window(const SaEstimate& choose) {
    const int64_t* ends = choose.to.indptr;
    int64_t longest = 1;
    for (int64_t list = 0; list < choose.heads * choose.rows; ++list) longest = max_of(longest, ends[list + 1] - ends[list]);
    const int64_t near = max_of<int64_t>(kWindowBytes / (2 * 64 * choose.dim * static_cast<int64_t>(sizeof(T))), 1);
    return min_of(max_of(near, kVisitKeys * choose.keys / (64 * longest)), kMostWindowWords);
  }

  const SaEstimate& choose_;
  const SaAttend& attend_;
  const int64_t window_, copy_bytes_, bit_bytes_, choice_bytes_;
};

template <class T>
int fused_rows_of(const SaFusedRows& a) {
  const RowLists lists(a.choose, a.attend.positions, a.budgets);
  if (lists.failed) return lists.failed;
  const SaEstimate& e = lists.choose;
  const FusedRows<T> fused(e, a.attend);
  const int64_t blocks = ceil_div(e.rows, fused.rows);
  return run_queue(e.heads * blocks, a.attend.threads, fused.bytes_needed(), [&](int64_t t, char* scratch) {
    const int64_t from = (blocks - 1 - t % blocks) * fused.rows;  // last ones first: they take longest
    fused.run(t / blocks, from, min_of(fused.rows, e.rows - from), fused.whole_blocks, scratch, Laps());
  });
}

int fused_rows(const SaFusedRows* a) { return a->choose.bfloat16 ? fused_rows_of<bf16>(*a) : fused_rows_of<float>(*a); }

}  // namespace
