// The largest magnitude of each head, and the INT8 scale that it makes: floats without their sign are in the order of their bits, NaN last.
#pragma once
#include "abi.h"
#include "numbers.h"
#include "parallel.h"

namespace {

// Bits is signed, of as many bytes as the floats.
template <class Bits>
int largest_of(const SaLargest& a) {
  constexpr int64_t kLanes = 64 / sizeof(Bits);
  typedef Bits Lanes __attribute__((vector_size(64)));
  constexpr Bits kMagnitude = static_cast<Bits>(~(Bits{1} << (8 * sizeof(Bits) - 1)));
  return run_queue(a.heads, a.threads, 64, [&](int64_t head, char*) {
    const Bits* x = static_cast<const Bits*>(a.x.data) + head * a.x.head_stride;
    const bool whole = a.x.row_stride == a.dim;  // one row after another
    const int64_t rows = whole ? 1 : a.rows, count = whole ? a.rows * a.dim : a.dim;
    Lanes most = {};
    for (int64_t row = 0; row < rows; ++row, x += a.x.row_stride)
      for (int64_t at = 0; at < count; at += kLanes) {
        Lanes some = {};
        if (at + kLanes <= count) memcpy(&some, x + at, sizeof some);
        else memcpy(&some, x + at, static_cast<size_t>(count - at) * sizeof(Bits));
        some &= kMagnitude;
        most = some > most ? some : most;
      }
    Bits top = 0;
    for (int64_t i = 0; i < kLanes; ++i) top = max_of(top, static_cast<Bits>(most[i]));
    const uint32_t bits = static_cast<uint32_t>(top) << (32 - 8 * sizeof(Bits));  // a bfloat16 is the upper half of a float
    memcpy(a.largest + head, &bits, 4);
  });
}

int largest(const SaLargest* a) { return a->bfloat16 ? largest_of<int16_t>(*a) : largest_of<int32_t>(*a); }

// Numbers that one thread goes through in less time than a second one may need to wake up; as `native.py` has it for `largest`.
constexpr int64_t kOneThread = 1 << 18;

// The scales by which the heads' rows are quantised to ±127. Returns 1 where memory ran out, and 2 where a scale is not finite, or 0 as
// the processor may flush small numbers to.
inline int measure_scales(const SaEstimate& a, float* scales) {
  const int64_t threads = a.heads * a.rows * a.dim > kOneThread ? a.threads : 1;
  const SaLargest of_rows{threads, a.bfloat16, a.heads, a.rows, a.dim, a.q, scales};
  if (largest(&of_rows)) return 1;
  for (int64_t head = 0; head < a.heads; ++head) scales[head] = max_of(scales[head], __FLT_MIN__);  // NaN stays NaN
  asm volatile("" ::: "memory");  // a quotient that a compiler makes is not flushed to 0
  for (int64_t head = 0; head < a.heads; ++head) {
    scales[head] /= 127;
    if (!(scales[head] > 0 && scales[head] <= __FLT_MAX__)) return 2;
  }
  return 0;
}

}  // namespace
