// Level `portable`, any processor: 128-bit vectors, which every compiler maps to what there is (SSE2, NEON).
#pragma once
#include "vectors.h"

namespace {

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint16_t u16x4 __attribute__((vector_size(8)));

struct Portable : Vectors<f32x4, i32x4, u16x4> {
  static vf set1(float x) { return vf{x, x, x, x}; }

  // b where one is NaN.
  static vf max(vf a, vf b) { return a > b ? a : b; }
  static vf min(vf a, vf b) { return a < b ? a : b; }
  static vi max(vi a, vi b) { return a > b ? a : b; }

  // One vector of the sums over the lanes of each of 4 vectors, in their order.
  static vf sums_of(const vf* x) { return add_pairs(add_pairs(x[0], x[1]), add_pairs(x[2], x[3])); }

  // biases[r] + the products of R rows of q (int8, `quads` · 4 long, rows `q_stride` apart) with 32 packed keys as they are, 128 too
  // large: with −128 · the sum of a row its bias, they are those of the keys. Levels with signed keys undo the 128 themselves.
  template <int R>
  static void products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                       vi (*sums)[kProductKeys / kLanes]) {
    for (int r = 0; r < R; ++r) {
      for (int half = 0; half < 2; ++half) {
        int32_t total[16] = {};
        for (int64_t d = 0; d < quads; ++d) {
          const int8_t* x = q + r * q_stride + d * 4;
          const uint8_t* y = keys + half * quads * 64 + d * 64;
          for (int i = 0; i < 16; ++i) total[i] += y[4 * i] * x[0] + y[4 * i + 1] * x[1] + y[4 * i + 2] * x[2] + y[4 * i + 3] * x[3];
        }
        for (int i = 0; i < 16; ++i) total[i] += biases[r];
        memcpy(&sums[r][4 * half], total, sizeof total);
      }
    }
  }

  // Σ over the lanes of each of 4 vectors.
  static void store_sums(const vf* x, float* to) { store(to, sums_of(x)); }

  // How many of `padded` bytes (a multiple of 64) are at least t, for t > −128.
  static int64_t count_from(const int8_t* bytes, int64_t padded, int t) {
    int64_t count = 0;
    for (int64_t j = 0; j < padded; j += 64) {  // one byte can count 64
      int8_t within[16] = {};
      for (int part = 0; part < 64; part += 16)
        for (int i = 0; i < 16; ++i) within[i] = static_cast<int8_t>(within[i] + (bytes[j + part + i] >= t));
      for (int i = 0; i < 16; ++i) count += within[i];
    }
    return count;
  }

  // Lists keys from *next on whose byte is ≥ t (or == t), ascending, while `to` has room for one more step; returns how many.
  template <bool EQUAL>
  static int64_t list_bytes(const int8_t* bytes, int64_t padded, int t, int64_t* next, int32_t* to, int64_t room) {
    int64_t n = 0, j = *next;
    for (; j < padded && n + kListStep <= room; ++j) {
      to[n] = static_cast<int32_t>(j);
      n += EQUAL ? bytes[j] == t : bytes[j] >= t;
    }
    *next = j;
    return n;
  }

 private:
  // Sums of neighbours: a's in the lower half, b's in the upper one.
  static vf add_pairs(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7); }
};

}  // namespace
