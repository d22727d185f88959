// The largest magnitude of each head: floats without their sign are in the order of their bits, NaN last.
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
    static_cast<Bits*>(a.largest)[head] = top;
  });
}

int largest(const SaLargest* a) { return a->bfloat16 ? largest_of<int16_t>(*a) : largest_of<int32_t>(*a); }

}  // namespace
