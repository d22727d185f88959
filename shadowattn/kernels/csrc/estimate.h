// INT8 Q·K on the CPU, and the selection from it while the products are still in the cache.
//
// Eight rows meet the packed keys of their head, 32 keys at a time; their products, exact in int32, fill a scratch of 8 × K
// numbers that stays in the second-level cache, and each row's list is chosen from there: no score matrix ever exists.
// Blocks that pool their rows' products hold K numbers only.
#pragma once
#include "abi.h"
#include "exp2.h"
#include "isa.h"
#include "parallel.h"
#include "select.h"

namespace {

constexpr int kRowsAtOnce = 8;
constexpr int64_t kKeysAtOncePacked = Isa::kProductKeys;
constexpr int64_t kKeysPerPass = 512;  // of pooled rows: packed keys that stay in the first-level cache from row to row

inline int8_t to_int8(float x, float scale) {
  x = x / scale;
  x = x < 127.0f ? x : 127.0f;
  x = x > -127.0f ? x : -127.0f;  // also NaN, which is refused where scales are measured, and passes by fixed ones
  return rounded_byte(x);
}

// The same, a vector at a time; D is a multiple of 8.
template <class T>
inline void quantise_row(const T* x, int64_t dim, float scale, int8_t* to) {
  int64_t d = 0;
  for (; d + VL <= dim; d += VL) {
    const vf y = Isa::max(Isa::min(Isa::load(x + d) / Isa::set1(scale), Isa::set1(127)), Isa::set1(-127));
    Isa::store_bytes(to + d, y);
  }
  for (; d < dim; ++d) to[d] = to_int8(to_float(x[d]), scale);
}

template <class T>
int pack_keys(const SaPack& a) {
  const int64_t quads = a.dim / 4;
  constexpr int64_t kKeysPerTask = 256;
  const int64_t tasks = ceil_div(a.rows, kKeysPerTask);
  return run_queue(a.heads * tasks, a.threads, 64, [&](int64_t t, char*) {
    const int64_t head = t / tasks, from = t % tasks * kKeysPerTask;
    uint8_t* packed = a.packed + head * a.packed_head_stride;
    for (int64_t r = from; r < min_of(from + kKeysPerTask, a.rows); ++r) {
      const T* k = static_cast<const T*>(a.k.data) + head * a.k.head_stride + r * a.k.row_stride;
      const int64_t key = a.first_key + r;
      uint8_t* to = packed + key / 16 * quads * 64 + key % 16 * 4;
      int8_t quantised[256];
      quantise_row(k, a.dim, a.scales[head], quantised);
      for (int64_t d = 0; d < a.dim; d += 4) {
        uint32_t quad;
        memcpy(&quad, quantised + d, 4);
        quad ^= 0x80808080u;  // + 128 in each byte
        memcpy(to + d * 16, &quad, 4);
        if (a.by_key) memcpy(a.by_key + head * a.by_key_head_stride + key * a.dim + d, &quad, 4);
      }
    }
  });
}

int pack(const SaPack* a) { return a->bfloat16 ? pack_keys<bf16>(*a) : pack_keys<float>(*a); }

// Products of R rows of q (int8, `quads` · 4 long, rows `q_stride` apart) with 32 packed keys. SA_ROWS: out[r][32]; SA_MAX and
// SA_SUM: out[32] takes the larger or the sum of what it holds and all R rows' products.
template <int R, int POOLING>
inline void products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases, int32_t* out,
                     int64_t out_stride) {
  constexpr int N = kKeysAtOncePacked / VL;
  vi sums[R][N];
  Isa::products<R>(keys, quads, q, q_stride, biases, sums);
  if (POOLING == SA_ROWS) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) Isa::store(out + r * out_stride + i * VL, sums[r][i]);
    return;
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    vi pooled = Isa::load(out + i * VL);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) pooled = POOLING == SA_MAX ? Isa::max(pooled, sums[r][i]) : (vi)((vu)pooled + (vu)sums[r][i]);
    Isa::store(out + i * VL, pooled);
  }
}

// What makes products of a row with packed keys those with the keys.
inline int32_t bias_of(int64_t sum_of_row) { return Isa::kSignedKeys ? 0 : static_cast<int32_t>(-128 * sum_of_row); }

// Quantised rows of one head, and their biases.
struct QuantisedRows {
  int8_t* q;
  int32_t* biases;
  int64_t stride;
};

template <class T>
inline void quantise_rows(const SaEstimate& a, int64_t head, int64_t from, int64_t to, const QuantisedRows& x) {
  for (int64_t r = from; r < to; ++r) {
    const T* q = static_cast<const T*>(a.q.data) + head * a.q.head_stride + r * a.q.row_stride;
    int8_t* out = x.q + (r - from) * x.stride;
    int32_t sum = 0;
    quantise_row(q, a.dim, a.q_scales[head], out);
    for (int64_t d = 0; d < a.dim; ++d) sum += out[d];
    x.biases[r - from] = bias_of(sum);
  }
}

// Any number of rows up to 8, with all of `keys` (rounded up to 32). Where the level has tiles they make products of eight rows that
// are not pooled, with so many keys that configuring the tiles pays.
template <int POOLING, class I = Isa>
inline void products_of(int64_t rows, const uint8_t* packed, int64_t from_key, int64_t to_key, int64_t quads, const int8_t* q,
                        int64_t q_stride, const int32_t* biases, int32_t* out, int64_t out_stride) {
  if constexpr (I::kTiles && POOLING == SA_ROWS)
    if (rows == kRowsAtOnce && to_key - from_key >= 4 * kKeysAtOncePacked)
      return I::eight_products(packed, from_key, to_key, quads, q, q_stride, biases, out, out_stride);
  for (int64_t key = from_key; key < to_key; key += kKeysAtOncePacked) {
    const uint8_t* keys = packed + key / 16 * quads * 64;
    int32_t* to = out + key;
    int64_t r = 0;
    const auto step = [&](int64_t n) {
      r += n;
      return q + (r - n) * q_stride;
    };
    const auto at = [&](int64_t row) { return POOLING == SA_ROWS ? to + row * out_stride : to; };
    if (rows == kRowsAtOnce) {
      products<8, POOLING>(keys, quads, q, q_stride, biases, to, out_stride);
      continue;
    }
    if (rows - r >= 4) products<4, POOLING>(keys, quads, q + r * q_stride, q_stride, biases + r, at(r), out_stride), step(4);
    if (rows - r >= 2) products<2, POOLING>(keys, quads, q + r * q_stride, q_stride, biases + r, at(r), out_stride), step(2);
    if (rows - r >= 1) products<1, POOLING>(keys, quads, q + r * q_stride, q_stride, biases + r, at(r), out_stride);
  }
}

// Pooled products of a block of rows over the keys that each of them sees.
template <int POOLING>
inline void pool_rows(const SaEstimate& a, const QuantisedRows& x, int64_t first_query, int64_t rows, const uint8_t* packed,
                      int32_t* pooled) {
  const int64_t quads = a.dim / 4, first = a.visible[first_query], last = a.visible[first_query + rows - 1];
  const int64_t shared = first / kKeysAtOncePacked * kKeysAtOncePacked;  // keys that all rows see, whole passes of them
  const int64_t end = round_up(last, kKeysAtOncePacked);
  for (int64_t j = 0; j < end; ++j) pooled[j] = POOLING == SA_MAX ? INT32_MIN : 0;
  for (int64_t key = 0; key < shared; key += kKeysPerPass)
    for (int64_t r = 0; r < rows; r += kRowsAtOnce)
      products_of<POOLING>(min_of<int64_t>(kRowsAtOnce, rows - r), packed, key, min_of(key + kKeysPerPass, shared), quads,
                           x.q + r * x.stride, x.stride, x.biases + r, pooled, 0);
  int32_t tile[kRowsAtOnce * kKeysAtOncePacked];
  for (int64_t key = shared; key < end; key += kKeysAtOncePacked)
    for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
      const int64_t n = min_of<int64_t>(kRowsAtOnce, rows - r);
      products_of<SA_ROWS>(n, packed + key / 16 * quads * 64, 0, kKeysAtOncePacked, quads, x.q + r * x.stride, x.stride, x.biases + r,
                           tile, kKeysAtOncePacked);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = key; j < min_of(key + kKeysAtOncePacked, a.visible[first_query + r + i]); ++j) {
          const int32_t product = tile[i * kKeysAtOncePacked + j - key];
          pooled[j] = POOLING == SA_MAX ? max_of(pooled[j], product) : pooled[j] + product;
        }
    }
}

// Adds the softmax of one row's products to `pooled`. Overwrites the products, and what follows them up to a whole vector.
inline void add_probabilities(int32_t* products, int64_t keys, float exponent, float* pooled) {
  int32_t top = products[0];
  for (int64_t j = 1; j < keys; ++j) top = max_of(top, products[j]);
  float* weights = reinterpret_cast<float*>(products);
  vf sums = Isa::set1(0);
  for (int64_t j = 0; j < keys; j += VL) {
    const vi x = Isa::load(products + j);
    Isa::store(weights + j, exp2_nonpositive(__builtin_convertvector(x - top, vf) * Isa::set1(exponent)));
    for (int64_t past = keys; past < j + VL; ++past) weights[past] = 0;
    sums = sums + Isa::load(weights + j);
  }
  const vf share = Isa::set1(1 / Isa::lanes_sum(sums));
  for (int64_t j = 0; j < keys; j += VL) Isa::store(pooled + j, Isa::load(pooled + j) + Isa::load(weights + j) * share);
}

// The probabilities that a block's rows give to each key, summed; `products` has room for 8 rows of `width`.
inline void pool_probabilities(const SaEstimate& a, const QuantisedRows& x, int64_t first_query, int64_t rows, const uint8_t* packed,
                               float exponent, float* pooled, int32_t* products, int64_t width) {
  const int64_t end = round_up(a.visible[first_query + rows - 1], kKeysAtOncePacked);
  memset(pooled, 0, static_cast<size_t>(end) * 4);
  for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
    const int64_t n = min_of<int64_t>(kRowsAtOnce, rows - r);
    products_of<SA_ROWS>(n, packed, 0, end, a.dim / 4, x.q + r * x.stride, x.stride, x.biases + r, products, width);
    for (int64_t i = 0; i < n; ++i) add_probabilities(products + i * width, a.visible[first_query + r + i], exponent, pooled);
  }
}

// How lists are scored and chosen, some in a task: one of a block whose rows are pooled, or up to 8 that have one row each.
template <class T>
class ListTasks {
 public:
  const int64_t lists;    // of a head
  const int64_t at_once;  // lists of a task
  const int64_t count;    // tasks of a head

  explicit ListTasks(const SaEstimate& a, int64_t most_at_once = kRowsAtOnce)
      : lists(pools(a) ? ceil_div(a.rows, a.query_block) : a.rows),
        at_once(pools(a) ? 1 : most_at_once),
        count(ceil_div(lists, at_once)),
        a_(a),
        width_(round_up(a.keys, kKeysAtOncePacked)),
        score_rows_(!pools(a) ? kRowsAtOnce : a.pooling == SA_PROBABILITY ? 1 + kRowsAtOnce : 1),
        q_bytes_(round_up(rows_of_task() * a.dim, 64)) {}

  int64_t bytes_needed() const {
    return score_rows_ * width_ * 4 + q_bytes_ + round_up(rows_of_task() * 4, 64) + select_bytes(width_);
  }

  // Scores the lists of task t, the last of a head first, and calls take(head, list, scores, scratch) for each. Pooled rows score
  // the keys that they see; others all keys, or where lists are made those that compete.
  template <class Take>
  void run(int64_t t, char* scratch, const Take& take) const {
    const int64_t head = t / count, first = (count - 1 - t % count) * at_once, end = min_of(first + at_once, lists);
    const int64_t step = pools(a_) ? a_.query_block : 1, from = first * step, to = min_of(end * step, a_.rows);
    int32_t* scores = reinterpret_cast<int32_t*>(scratch);
    scratch += score_rows_ * width_ * 4;
    const QuantisedRows x{reinterpret_cast<int8_t*>(scratch), reinterpret_cast<int32_t*>(scratch + q_bytes_), a_.dim};
    scratch += q_bytes_ + round_up(rows_of_task() * 4, 64);
    const uint8_t* packed = a_.packed + a_.kv_head[head] * a_.packed_head_stride;
    quantise_rows<T>(a_, head, from, to, x);
    if (a_.pooling == SA_MAX) pool_rows<SA_MAX>(a_, x, from, to - from, packed, scores);
    else if (a_.pooling == SA_SUM) pool_rows<SA_SUM>(a_, x, from, to - from, packed, scores);
    else if (a_.pooling == SA_PROBABILITY)
      pool_probabilities(a_, x, from, to - from, packed, a_.exponents[head], reinterpret_cast<float*>(scores), scores + width_,
                         width_);
    else products_of<SA_ROWS>(to - from, packed, 0, scored_keys(first, end), a_.dim / 4, x.q, x.stride, x.biases, scores, width_);
    for (int64_t b = first; b < end; ++b) take(head, b, scores + (b - first) * width_, scratch);
  }

  // The list b of a head from its scores, which it may overwrite, into `out`.
  void choose(int64_t head, int64_t b, int32_t* scores, int32_t* out, char* scratch) const {
    const int64_t list = head * lists + b;
    if (a_.pooling == SA_SUM) {  // sums exceed what float32 holds exactly: they are rounded as every other path rounds them
      float* rounded = reinterpret_cast<float*>(scores);
      for (int64_t j = 0; j < a_.to.candidates[b]; ++j) {
        const int32_t sum = scores[j];
        rounded[j] = static_cast<float>(sum);
      }
    }
    if (a_.pooling == SA_SUM || a_.pooling == SA_PROBABILITY)
      select_list(FloatScores{reinterpret_cast<const float*>(scores)}, a_.to, list, b, out, scratch);
    else select_list(IntegerScores<int32_t>{scores}, a_.to, list, b, out, scratch);
  }

  // The scores of list b as float32: those of keys that none of a block's rows sees are −∞, or 0 where probabilities are pooled.
  void write(int64_t b, const int32_t* scores, float* out) const {
    const int64_t seen = pools(a_) ? a_.visible[min_of((b + 1) * a_.query_block, a_.rows) - 1] : a_.keys;
    if (a_.pooling == SA_PROBABILITY) {
      memcpy(out, scores, static_cast<size_t>(seen) * 4);
      memset(out + seen, 0, static_cast<size_t>(a_.keys - seen) * 4);
      return;
    }
    for (int64_t j = 0; j < a_.keys; ++j) out[j] = j < seen ? static_cast<float>(scores[j]) : -__builtin_inff();
  }

 private:
  static bool pools(const SaEstimate& a) { return a.pooling != SA_ROWS; }

  int64_t rows_of_task() const { return pools(a_) ? a_.query_block : at_once; }

  int64_t scored_keys(int64_t first, int64_t end) const {
    if (a_.scores || !a_.to.candidates) return round_up(a_.keys, kKeysAtOncePacked);
    int64_t most = 0;
    for (int64_t b = first; b < end; ++b) most = max_of(most, a_.to.candidates[b]);
    return round_up(most, kKeysAtOncePacked);
  }

  const SaEstimate& a_;
  const int64_t width_, score_rows_, q_bytes_;
};

template <class T>
int estimate_rows(const SaEstimate& a) {
  const ListTasks<T> tasks(a);
  return run_queue(a.heads * tasks.count, a.threads, tasks.bytes_needed(), [&](int64_t t, char* scratch) {
    tasks.run(t, scratch, [&](int64_t head, int64_t b, int32_t* scores, char* rest) {
      const int64_t list = head * tasks.lists + b;
      if (a.scores) tasks.write(b, scores, a.scores + list * a.keys);
      else if (a.to.indices) tasks.choose(head, b, scores, a.to.indices + a.to.indptr[list], rest);
    });
  });
}

int estimate(const SaEstimate* a) { return a->bfloat16 ? estimate_rows<bf16>(*a) : estimate_rows<float>(*a); }

}  // namespace
