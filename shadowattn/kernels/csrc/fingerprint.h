// By what packed keys are known again: as fast as K can be read, since it is asked once a chunk of all keys before it.
#pragma once
#include "abi.h"
#include "parallel.h"
#include "simd.h"

namespace {

template <class Word>
inline uint64_t row_sum(const Word* row, int64_t dim) {
  // An odd weight for each dimension: of plain sums, pairs of changed signs and exchanged elements would cancel out.
  uint64_t sum = 0;  // wraps, as a fingerprint may
  for (int64_t d = 0; d < dim; ++d) sum += row[d] * (static_cast<uint64_t>(2 * d + 1) * 0x9e3779b97f4a7c15u);
  return sum;
}

int fingerprint(const SaFingerprint* a) {
  constexpr int64_t kKeysPerTask = 1024;
  const int64_t tasks = ceil_div(a->rows, kKeysPerTask);
  return run_queue(a->heads * tasks, a->threads, 64, [&](int64_t t, char*) {
    const int64_t head = t / tasks, from = t % tasks * kKeysPerTask;
    uint64_t sum = 0;
    for (int64_t r = from; r < min_of(from + kKeysPerTask, a->rows); ++r) {
      const int64_t at = head * a->k.head_stride + r * a->k.row_stride;
      const uint64_t row = a->bfloat16 ? row_sum(static_cast<const uint16_t*>(a->k.data) + at, a->dim)
                                       : row_sum(static_cast<const uint32_t*>(a->k.data) + at, a->dim);
      sum += row * (2 * static_cast<uint64_t>(a->first_key + r) + 1);
    }
    __atomic_fetch_add(a->sums + head, static_cast<int64_t>(sum), __ATOMIC_RELAXED);
  });
}

}  // namespace
