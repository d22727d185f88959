// Level `avx2`, AVX2 and FMA: 256-bit vectors, 16-bit products for the estimate. Operations as portable.h describes them.
#pragma once
#include <immintrin.h>

#include "vectors.h"

namespace {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

struct Avx2 : Vectors<f32x8, i32x8, u16x8> {
  static vf set1(float x) { return _mm256_set1_ps(x); }

  static vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
  static vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
  static vi max(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }

  static vf sums_of(vf* x) {
#pragma GCC unroll 4
    for (int left = kLanes / 2; left > 0; left /= 2)
#pragma GCC unroll 8
      for (int i = 0; i < left; ++i) x[i] = add_pairs(x[2 * i], x[2 * i + 1]);
    return x[0];
  }

  static void store_sums(const vf* x, float* to) {
    const vf halves = add_pairs(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
    _mm_storeu_ps(to, _mm256_castps256_ps128(add_pairs(halves, halves)));
  }

  template <bool EQUAL>
  static uint64_t bits_of(const int8_t* bytes, int t) {
    const __m256i limit = _mm256_set1_epi8(static_cast<char>(EQUAL ? t : t - 1));
    const auto half = [&](const int8_t* at) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
      return static_cast<uint32_t>(_mm256_movemask_epi8(EQUAL ? _mm256_cmpeq_epi8(x, limit) : _mm256_cmpgt_epi8(x, limit)));
    };
    return half(bytes) | static_cast<uint64_t>(half(bytes + 32)) << 32;
  }

  template <int R>
  static void products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                       vi (*sums)[kProductKeys / kLanes]) {
    for (int r = 0; r < R; ++r) row_products(keys, quads, q + r * q_stride, biases[r], reinterpret_cast<int32_t*>(sums[r]));
  }

  // One row's products with 32 keys. Bytes become 16-bit numbers: their products, added in pairs, cannot overflow as those of
  // the 8-bit instruction would.
  static void row_products(const uint8_t* keys, int64_t quads, const int8_t* q, int32_t bias, int32_t* sums) {
    for (int half = 0; half < 2; ++half) {
      const uint8_t* block = keys + half * quads * 64;
      __m256i pairs[4];
      for (int i = 0; i < 4; ++i) pairs[i] = _mm256_setzero_si256();
      for (int64_t d = 0; d < quads; ++d) {
        int32_t quad;
        memcpy(&quad, q + d * 4, 4);
        const __m256i x = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(quad)));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + d * 64 + i * 16));
          pairs[i] = _mm256_add_epi32(pairs[i], _mm256_madd_epi16(_mm256_cvtepu8_epi16(bytes), x));
        }
      }
      int32_t halves[32];
      for (int i = 0; i < 4; ++i) memcpy(halves + 8 * i, &pairs[i], 32);
      for (int i = 0; i < 16; ++i) sums[16 * half + i] = halves[2 * i] + halves[2 * i + 1] + bias;
    }
  }

  static int64_t count_from(const int8_t* bytes, int64_t padded, int t) {
    const __m256i limit = _mm256_set1_epi8(static_cast<char>(t - 1));
    int64_t count = 0;
    for (int64_t j = 0; j < padded; j += 32) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + j));
      count += __builtin_popcount(static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpgt_epi8(x, limit))));
    }
    return count;
  }

  template <bool EQUAL>
  static int64_t list_bytes(const int8_t* bytes, int64_t padded, int t, int64_t* next, int32_t* to, int64_t room) {
    int64_t n = 0, j = *next;
    const __m256i limit = _mm256_set1_epi8(static_cast<char>(EQUAL ? t : t - 1));
    for (; j < padded && n + kListStep <= room; j += 32) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + j));
      uint32_t hit = static_cast<uint32_t>(_mm256_movemask_epi8(EQUAL ? _mm256_cmpeq_epi8(x, limit) : _mm256_cmpgt_epi8(x, limit)));
      for (; hit; hit &= hit - 1) to[n++] = static_cast<int32_t>(j + __builtin_ctz(hit));
    }
    *next = j;
    return n;
  }

 private:
  static vf add_pairs(vf a, vf b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
  }
};

}  // namespace
