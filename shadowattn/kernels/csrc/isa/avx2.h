// Level `avx2`, AVX2 and FMA: 256-bit vectors; INT8 products are added in pairs of 16 bits. Operations as portable.h describes them.
#pragma once
#include <immintrin.h>

#include "vectors.h"

namespace {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

// Of each byte the places of its bits, ascending.
struct PlacesOfBits {
  uint8_t of[256][8];

  constexpr PlacesOfBits() : of{} {
    for (int bits = 0; bits < 256; ++bits)
      for (int place = 0, n = 0; place < 8; ++place)
        if (bits >> place & 1) of[bits][n++] = static_cast<uint8_t>(place);
  }
};
constexpr PlacesOfBits kPlacesOfBits;

struct Avx2 : Vectors<f32x8, i32x8, u16x8> {
  static constexpr bool kSignedKeys = true;

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

  // Two rows meet 32 keys at a time: 8 sums in registers. The instruction takes bytes without a sign times bytes with one, and adds
  // pairs of products in 16 bits, which 255 · 127 twice would overflow. Hence |q| · ±key: rows and keys are within ±127, so that a
  // pair is at most 2 · 127². Products with padding, whose bytes are 0, may be off; they are dropped.
  template <int R>
  static void products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                       vi (*sums)[kProductKeys / kLanes]) {
    constexpr int kRows = R < 2 ? R : 2;
    static_assert(R % kRows == 0);
    for (int r = 0; r < R; r += kRows) signed_products<kRows>(keys, quads, q + r * q_stride, q_stride, biases + r, sums + r);
  }

  static int32_t key_product(const uint8_t* packed, int64_t key, int64_t quads, const int8_t* q) {
    const uint8_t* quad = packed + key / 16 * quads * 64 + key % 16 * 4;
    __m256i sums = _mm256_setzero_si256();
    for (int64_t d = 0; d < quads; d += 8) {
      const __m256i within = first_lanes(quads - d);
      const __m256i k = _mm256_xor_si256(gather_quads(quad + d * 64, within), _mm256_set1_epi8(-128));
      sums = add_products(sums, _mm256_maskload_epi32(reinterpret_cast<const int*>(q + d * 4), within), k);
    }
    return lanes_total(sums);
  }

  static void store_shifted(int8_t* bytes, const vi* x, int shift) {
    const __m128i count = _mm_cvtsi32_si128(shift);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes), narrowed([&](int i) { return _mm256_sra_epi32((__m256i)x[i], count); }));
  }

  static int64_t shifted_bytes(const int32_t* s, int64_t n, int32_t centre, int shift, int limit, int8_t* bytes) {
    const __m256i middle = _mm256_set1_epi32(centre);
    const __m256i worst = _mm256_set1_epi8(static_cast<char>(-limit)), best = _mm256_set1_epi8(static_cast<char>(limit));
    const __m128i count = _mm_cvtsi32_si128(shift);
    int64_t j = 0;
    for (; j + 32 <= n; j += 32) {
      const __m256i packed = narrowed([&](int i) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + j + 8 * i));
        return _mm256_sra_epi32(_mm256_sub_epi32(x, middle), count);
      });
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + j), _mm256_max_epi8(_mm256_min_epi8(packed, best), worst));
    }
    return j;
  }

  static int64_t count_from(const int8_t* bytes, int64_t padded, int t) {
    const __m256i limit = _mm256_set1_epi8(static_cast<char>(t - 1)), zero = _mm256_setzero_si256();
    __m256i count = zero;
    for (int64_t j = 0; j < padded;) {
      __m256i even = zero, odd = zero;
      for (const int64_t end = min_of<int64_t>(padded, j + 64 * 255); j < end; j += 64) {  // a byte counts to 255
        const __m256i* at = reinterpret_cast<const __m256i*>(bytes + j);
        even = _mm256_sub_epi8(even, _mm256_cmpgt_epi8(_mm256_loadu_si256(at), limit));
        odd = _mm256_sub_epi8(odd, _mm256_cmpgt_epi8(_mm256_loadu_si256(at + 1), limit));
      }
      count = _mm256_add_epi64(count, _mm256_add_epi64(_mm256_sad_epu8(even, zero), _mm256_sad_epu8(odd, zero)));
    }
    return lanes_total(count);
  }

  // Eight bits at a time, whose places are looked up; whole vectors are written, the next ones overwriting what was too much.
  static int64_t list_bits(uint64_t bits, int32_t first, int32_t* to) {
    int64_t n = 0;
#pragma GCC unroll 8
    for (int byte = 0; byte < 8; ++byte) {
      const uint8_t some = static_cast<uint8_t>(bits >> 8 * byte);
      const __m128i places = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPlacesOfBits.of[some]));
      const __m256i keys = _mm256_add_epi32(_mm256_cvtepu8_epi32(places), _mm256_set1_epi32(first + 8 * byte));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + n), keys);
      n += __builtin_popcount(some);
    }
    return n;
  }

  template <bool EQUAL>
  static int64_t list_bytes(const int8_t* bytes, int64_t padded, int t, int64_t* next, int32_t* to, int64_t room) {
    int64_t n = 0, j = *next;
    for (; j < padded && n + kListStep <= room; j += kListStep)
      n += list_bits(bits_of<EQUAL>(bytes + j, t), static_cast<int32_t>(j), to + n);
    *next = j;
    return n;
  }

 protected:
  static __m256i set1_quad(const int8_t* p) {
    int32_t quad;
    memcpy(&quad, p, 4);
    return _mm256_set1_epi32(quad);
  }
  static __m256i first_lanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(min_of<int64_t>(count, 8))), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  // Of one packed key: every 64 bytes the next four dimensions.
  static __m256i gather_quads(const uint8_t* quad, __m256i within) {
    const __m256i places = _mm256_setr_epi32(0, 64, 128, 192, 256, 320, 384, 448);
    return _mm256_mask_i32gather_epi32(_mm256_setzero_si256(), reinterpret_cast<const int*>(quad), places, within, 1);
  }
  static int32_t lanes_total(__m256i x) {
    const __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i pairs = _mm_add_epi32(halves, _mm_shuffle_epi32(halves, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(pairs, _mm_shuffle_epi32(pairs, 0xb1)));
  }

 private:
  // sums + the products of q's bytes with keys, four to a lane.
  static __m256i add_products(__m256i sums, __m256i q, __m256i keys) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(keys, q));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }

  template <int R>
  static void signed_products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                              vi (*sums)[kProductKeys / kLanes]) {
    __m256i totals[R][4];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) totals[r][i] = _mm256_set1_epi32(biases[r]);
    const uint8_t* second = keys + quads * 64;
    for (int64_t d = 0; d < quads; ++d) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const uint8_t* at = (i < 2 ? keys : second) + d * 64 + i % 2 * 32;
        const __m256i k = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), _mm256_set1_epi8(-128));
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) totals[r][i] = add_products(totals[r][i], set1_quad(q + r * q_stride + d * 4), k);
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][i] = (vi)totals[r][i];
  }

  // Four vectors of integers as bytes, saturated. The packing instructions work within 128-bit lanes, hence the permutation.
  template <class Part>
  static __m256i narrowed(const Part& part) {
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(part(0), part(1)), _mm256_packs_epi32(part(2), part(3)));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }

  static vf add_pairs(vf a, vf b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
  }
};

}  // namespace
