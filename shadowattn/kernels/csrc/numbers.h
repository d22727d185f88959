// Single numbers: bfloat16, rounding, and integers; and fetching ahead. Nothing here depends on the instruction set.
//
// Like everything that is compiled once a level, this has internal linkage: a function shared between the levels could be linked
// from the wrong one and meet a processor that cannot run it. For the same reason the kernels use no header of the C++ library
// that defines functions.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
  uint16_t bits;
};

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLowest = -3.402823466e38f;
constexpr float kRounder = 12582912.0f;  // 1.5 · 2^23: adding it leaves no bits for a fraction

template <class T>
inline T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max_of(T a, T b) {
  return a < b ? b : a;
}
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline void from_float(float x, float* to) { *to = x; }
inline void from_float(float x, bf16* to) {  // round half to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) {
    to->bits = static_cast<uint16_t>(bits >> 16 | 0x40);
    return;
  }
  to->bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Into the second-level cache, soon.
inline void fetch_bytes(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

inline int8_t rounded_byte(float x) { return static_cast<int8_t>(static_cast<int32_t>((x + kRounder) - kRounder)); }

}  // namespace
