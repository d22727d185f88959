// Exact attention of a few rows on every key: a decoding step, whose rows are the heads of one key head, or a few drafted tokens.
// Its parts also serve a step on a list (shared_step.h).
//
// The time goes into reading K and V once. So the keys are cut in parts, which give all threads work, and a part goes through tiles
// of keys that stay in a near cache while every row multiplies them: scores with D in the lanes, an online softmax, values. In the
// end the parts are added up.
#pragma once
#include <cstdlib>

#include "abi.h"
#include "attend_rows.h"
#include "parallel.h"
#include "row_math.h"
#include "softmax.h"
#include "stage_times.h"

namespace {

constexpr int64_t kStepTile = 64;      // keys
constexpr int64_t kMostStepRows = 8;
constexpr int64_t kLeastPartKeys = 256;
constexpr int64_t kPartsPerThread = 4;  // parts end at different times

// What a part of the keys makes of some rows: weighted sums of V in RowMath's order, and of what weights.
struct StepPart {
  float* sums;       // [rows][padded]
  RowSoftmax* rows;  // [rows]

  static int64_t floats(int64_t rows, int64_t padded) {
    return round_up(rows * (padded + static_cast<int64_t>(sizeof(RowSoftmax) / 4)), 16);
  }
  StepPart(float* memory, int64_t count, int64_t padded) : sums(memory), rows(reinterpret_cast<RowSoftmax*>(memory + count * padded)) {}
};

// Some neighbours of the keys, or of a `list` of keys that every row keeps.
template <class T, int DIM>
void attend_step_part_of(const SaAttend& a, int64_t head, const int32_t* list, int64_t from, int64_t to, const StepPart& part,
                         char* scratch) {
  const int64_t dim = DIM ? DIM : a.dim, padded = round_up(dim, 32);
  const int64_t group = a.kv_head[head], k_stride = a.k.row_stride, v_stride = a.v.row_stride;
  const T* q = static_cast<const T*>(a.q.data) + head * a.q.head_stride;
  const T* k = static_cast<const T*>(a.k.data) + group * a.k.head_stride;
  const T* v = static_cast<const T*>(a.v.data) + group * a.v.head_stride;
  float* queries = reinterpret_cast<float*>(scratch);
  float* scores = queries + a.rows * padded;
  alignas(64) int32_t places[kStepTile];
  for (int64_t j = 0; j < kStepTile; ++j) places[j] = static_cast<int32_t>(j);
  for (int64_t r = 0; r < a.rows; ++r) {
    RowMath<T>::load_query(q + r * a.q.row_stride, dim, queries + r * padded, a.scale < 0);
    part.rows[r] = {};
  }
  memset(part.sums, 0, static_cast<size_t>(a.rows * padded) * 4);
  const vf factor = weight_factor(a.scale);
  for (int64_t start = from; start < to; start += kStepTile) {
    const T *tile_k = list ? k : k + start * k_stride, *tile_v = list ? v : v + start * v_stride;
    const int32_t* keys = list ? list + start : places;
    // The keys of other heads lie between two of these, which no hardware prefetcher sees through.
    for (int64_t j = start + kStepTile; j < min_of(start + 2 * kStepTile, to); ++j) {
      const int64_t key = list ? list[j] : j;
      fetch_bytes(k + key * k_stride, dim * static_cast<int64_t>(sizeof(T)));
      fetch_bytes(v + key * v_stride, dim * static_cast<int64_t>(sizeof(T)));
    }
    for (int64_t r = 0; r < a.rows; ++r) {
      const int64_t n = min_of((list ? to : min_of(to, a.positions[r] + 1)) - start, kStepTile);
      if (n <= 0) continue;
      for (int64_t j = 0; j < n; j += VL)
        score_keys<T, DIM>(queries + r * padded, tile_k, k_stride, keys + j, n - j, dim, scores + j);
      float* sums = part.sums + r * padded;
      weigh(scores, n, factor, part.rows + r, sums, padded);
      RowMath<T>::round_weights(scores, n);
      RowMath<T>::template add_values<DIM>(sums, scores, 0, tile_v, v_stride, keys, n, dim);
    }
  }
}

template <class T>
void attend_step_part(const SaAttend& a, int64_t head, const int32_t* list, int64_t from, int64_t to, const StepPart& part,
                      char* scratch) {
  if (a.dim == 64) attend_step_part_of<T, 64>(a, head, list, from, to, part, scratch);
  else if (a.dim == 128) attend_step_part_of<T, 128>(a, head, list, from, to, part, scratch);
  else attend_step_part_of<T, 0>(a, head, list, from, to, part, scratch);
}

inline int64_t step_scratch(const SaAttend& a) { return (a.rows * round_up(a.dim, 32) + kStepTile + 64) * 4; }

// In how many parts some keys of each head are shared out.
inline int64_t parts_of_step(const SaAttend& a, int64_t keys) {
  return max_of<int64_t>(min_of(ceil_div(kPartsPerThread * a.threads, a.heads), ceil_div(keys, kLeastPartKeys)), 1);
}

// Softmax over the union of a row's parts, written out.
template <class T>
void write_step(const SaAttend& a, int64_t head, float* memory, int64_t parts) {
  const int64_t padded = round_up(a.dim, 32), floats = StepPart::floats(a.rows, padded);
  const vf factor = weight_factor(a.scale);
  for (int64_t r = 0; r < a.rows; ++r) {
    float top = kLowest;
    for (int64_t p = 0; p < parts; ++p) top = max_of(top, StepPart(memory + p * floats, a.rows, padded).rows[r].top);
    vf totals = Isa::set1(0);
    alignas(64) float sums[1 << 9] = {};
    for (int64_t p = 0; p < parts; ++p) {
      const StepPart part(memory + p * floats, a.rows, padded);
      const vf keep = exp2_nonpositive((Isa::set1(part.rows[r].top) - Isa::set1(top)) * factor);
      totals += Isa::load(part.rows[r].totals) * keep;
      for (int64_t d = 0; d < padded; d += VL) Isa::store(sums + d, Isa::load(sums + d) + Isa::load(part.sums + r * padded + d) * keep);
    }
    T* out = static_cast<T*>(a.out.data) + head * a.out.head_stride + r * a.out.row_stride;
    const float inverse = 1 / Isa::lanes_sum(totals);
    for (int64_t d = 0; d < a.dim; ++d) from_float(sums[RowMath<T>::place(d)] * inverse, out + d);
  }
}

template <class T>
int attend_steps(const SaAttend& a) {
  const int64_t padded = round_up(a.dim, 32), floats = StepPart::floats(a.rows, padded);
  const int64_t keys = a.positions[a.rows - 1] + 1, parts = parts_of_step(a, keys);
  float* made = static_cast<float*>(aligned_alloc(64, static_cast<size_t>(round_up(a.heads * parts * floats * 4 + 64, 64))));
  if (!made) return 1;
  int failed = run_queue(a.heads * parts, a.threads, step_scratch(a), [&](int64_t t, char* scratch) {
    const int64_t head = t / parts, p = t % parts, from = keys * p / parts, to = keys * (p + 1) / parts;
    Laps laps;
    attend_step_part<T>(a, head, nullptr, from, to, StepPart(made + t * floats, a.rows, padded), scratch);
    laps.end(SA_TOGETHER);
  });
  if (!failed)
    for (int64_t head = 0; head < a.heads; ++head) write_step<T>(a, head, made + head * parts * floats, parts);
  free(made);
  return failed;
}

}  // namespace
