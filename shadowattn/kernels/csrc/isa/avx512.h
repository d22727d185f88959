// Level `avx512`, AVX-512 F, BW, VL and DQ: 512-bit vectors, masks, compressing stores. Operations as portable.h describes them.
#pragma once
#include "avx2.h"

namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct Avx512 : Vectors<f32x16, i32x16, u16x16> {
  static constexpr bool kSignedKeys = true;
  static constexpr int kRegisters = 32;
  static constexpr float kLeastExponent = -200;  // scale() gives denormal numbers down to 2^−149

  static vf set1(float x) { return _mm512_set1_ps(x); }

  static vf load_half(const float* p) { return _mm512_maskz_loadu_ps(0xff, p); }
  static vf load_half(const bf16* p) {
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(0xff, p)), 16);
    return _mm512_castsi512_ps(wide);
  }
  static void store_bytes(int8_t* p, vf x) {
    const __m128i packed = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
    memcpy(p, &packed, 16);
  }

  static vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
  static vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
  static vi max(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }

  static vf kept(vf x, uint64_t bits) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), set1(-__builtin_inff()), x);
  }

  static vf whole(vf x) { return _mm512_roundscale_ps(x, 0); }
  // Lanes at the least exponent are masked: the processor takes hundreds of cycles for a product that is too small for a float.
  static vf scale(vf x, vf whole) {
    const __mmask16 large = _mm512_cmp_ps_mask(whole, set1(kLeastExponent), _CMP_NLE_UQ);  // and NaN
    return _mm512_maskz_scalef_ps(large, x, whole);
  }

  // x less the largest whole number that is not above it, and x · 2^(that of y), or 0 where y ≤ −126.
  static constexpr bool kScalesByFloor = true;
  static vf above_floor(vf x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF); }
  static vf scale_by_floor(vf x, vf y) {
    const __mmask16 large = _mm512_cmp_ps_mask(y, set1(-126), _CMP_NLE_UQ);  // and NaN
    return _mm512_maskz_scalef_ps(large, x, y);
  }

  // Transposes 4 × 4 within 128-bit lanes, then the lanes: each step adds what it brings together.
  static vf sums_of(vf* x) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 a = x[4 * i], b = x[4 * i + 1], c = x[4 * i + 2], d = x[4 * i + 3];
      const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
      const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
      x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x88), _mm512_shuffle_f32x4(x[2], x[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }

  static void store_sums(const vf* x, float* to) {
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1])));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3])));
    const __m512 sums = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }

  static void store_shifted(int8_t* bytes, const vi* x, int shift) {
    const __m512i count = _mm512_set1_epi32(shift);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16 * i), _mm512_cvtsepi32_epi8(_mm512_srav_epi32((__m512i)x[i], count)));
  }

  // Rows 0 … 15 of 16 lanes, and store(j, lane j of each row): 4 × 4 within 128-bit lanes, then those.
  template <class Row, class Store>
  static void transpose_16(const Row& row, const Store& store) {
    __m512i lanes[4][4];  // [four rows][a row's lane in each 128 bits]
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i a = row(4 * i), b = row(4 * i + 1), c = row(4 * i + 2), e = row(4 * i + 3);
      const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
      const __m512i ce_low = _mm512_unpacklo_epi32(c, e), ce_high = _mm512_unpackhi_epi32(c, e);
      lanes[i][0] = _mm512_unpacklo_epi64(ab_low, ce_low), lanes[i][1] = _mm512_unpackhi_epi64(ab_low, ce_low);
      lanes[i][2] = _mm512_unpacklo_epi64(ab_high, ce_high), lanes[i][3] = _mm512_unpackhi_epi64(ab_high, ce_high);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {  // lanes j, j + 4, j + 8 and j + 12
      const __m512i a = lanes[0][j], b = lanes[1][j], c = lanes[2][j], e = lanes[3][j];
      const __m512i low_a = _mm512_shuffle_i32x4(a, b, 0x88), low_b = _mm512_shuffle_i32x4(c, e, 0x88);
      const __m512i high_a = _mm512_shuffle_i32x4(a, b, 0xdd), high_b = _mm512_shuffle_i32x4(c, e, 0xdd);
      store(j, _mm512_shuffle_i32x4(low_a, low_b, 0x88));
      store(j + 4, _mm512_shuffle_i32x4(high_a, high_b, 0x88));
      store(j + 8, _mm512_shuffle_i32x4(low_a, low_b, 0xdd));
      store(j + 12, _mm512_shuffle_i32x4(high_a, high_b, 0xdd));
    }
  }

  static void pack_16(const uint8_t* by_key, int64_t quads, const int32_t* keys, uint8_t* to) {
    int64_t d = 0;
    for (; d + 16 <= quads; d += 16)
      transpose_16([&](int i) { return _mm512_loadu_si512(by_key + 4 * (keys[i] * quads + d)); },
                   [&](int j, __m512i x) { _mm512_storeu_si512(to + 64 * (d + j), x); });
    for (; d < quads; ++d)
      for (int i = 0; i < 16; ++i) memcpy(to + 64 * d + 4 * i, by_key + 4 * (keys[i] * quads + d), 4);
  }

  template <bool EQUAL>
  static uint64_t bits_of(const int8_t* bytes, int t) { return hits<EQUAL>(bytes, _mm512_set1_epi8(static_cast<char>(t))); }

  static int64_t list_bits(uint64_t bits, int32_t first, int32_t* to) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t n = 0;
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; ++quarter) {
      const __mmask16 mask = static_cast<__mmask16>(bits >> 16 * quarter);
      _mm512_storeu_si512(to + n, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lanes, _mm512_set1_epi32(first + 16 * quarter))));
      n += __builtin_popcount(mask);
    }
    return n;
  }

  // |q| · ±key, as in avx2.h.
  template <int R>
  static void products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                       vi (*sums)[kProductKeys / kLanes]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = (vi)_mm512_set1_epi32(biases[r]);
    const __m512i flip = _mm512_set1_epi8(-128), ones = _mm512_set1_epi16(1);
    const uint8_t* second = keys + quads * 64;
    for (int64_t d = 0; d < quads; ++d) {
      const __m512i a = _mm512_xor_si512(_mm512_loadu_si512(keys + d * 64), flip);
      const __m512i b = _mm512_xor_si512(_mm512_loadu_si512(second + d * 64), flip);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i x = set1_quad(q + r * q_stride + d * 4), size = _mm512_abs_epi8(x);
        const __mmask64 negative = _mm512_movepi8_mask(x);
        const auto add = [&](vi sum, __m512i k) {
          const __m512i turned = _mm512_mask_sub_epi8(k, negative, _mm512_setzero_si512(), k);
          return (vi)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(_mm512_maddubs_epi16(size, turned), ones));
        };
        sums[r][0] = add(sums[r][0], a);
        sums[r][1] = add(sums[r][1], b);
      }
    }
  }

  static int32_t key_product(const uint8_t* packed, int64_t key, int64_t quads, const int8_t* q) {
    return Avx2::key_product(packed, key, quads, q);
  }

  static int64_t shifted_bytes(const int32_t* s, int64_t n, int32_t centre, int shift, int limit, int8_t* bytes) {
    const __m512i middle = _mm512_set1_epi32(centre);
    const __m512i worst = _mm512_set1_epi8(static_cast<char>(-limit)), best = _mm512_set1_epi8(static_cast<char>(limit));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m128i count = _mm_cvtsi32_si128(shift);
    const auto part = [&](int64_t at) { return _mm512_sra_epi32(_mm512_sub_epi32(_mm512_loadu_si512(s + at), middle), count); };
    int64_t j = 0;
    for (; j + 64 <= n; j += 64) {  // the packing instructions work within 128-bit lanes, hence the permutation
      const __m512i first = _mm512_packs_epi32(part(j), part(j + 16)), second = _mm512_packs_epi32(part(j + 32), part(j + 48));
      const __m512i packed = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second));
      _mm512_storeu_si512(bytes + j, _mm512_max_epi8(_mm512_min_epi8(packed, best), worst));
    }
    return j;
  }

  static int64_t count_from(const int8_t* bytes, int64_t padded, int t) {
    const __m512i limit = _mm512_set1_epi8(static_cast<char>(t));
    int64_t count = 0, other = 0;
    int64_t j = 0;
    for (; j + 128 <= padded; j += 128) {
      count += __builtin_popcountll(_mm512_cmpge_epi8_mask(_mm512_loadu_si512(bytes + j), limit));
      other += __builtin_popcountll(_mm512_cmpge_epi8_mask(_mm512_loadu_si512(bytes + j + 64), limit));
    }
    if (j < padded) count += __builtin_popcountll(_mm512_cmpge_epi8_mask(_mm512_loadu_si512(bytes + j), limit));
    return count + other;
  }

  template <bool EQUAL>
  static int64_t list_bytes(const int8_t* bytes, int64_t padded, int t, int64_t* next, int32_t* to, int64_t room) {
    int64_t n = 0, j = *next;
    const __m512i limit = _mm512_set1_epi8(static_cast<char>(t));
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; j < padded && n + kListStep <= room; j += kListStep) {
      const uint64_t hit = hits<EQUAL>(bytes + j, limit);
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {
        const __mmask16 mask = static_cast<__mmask16>(hit >> 16 * quarter);
        const __m512i keys = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(j + 16 * quarter)));
        _mm512_storeu_si512(to + n, _mm512_maskz_compress_epi32(mask, keys));
        n += __builtin_popcount(mask);
      }
    }
    *next = j;
    return n;
  }

 protected:
  static __m512i set1_quad(const void* p) {
    int32_t quad;
    memcpy(&quad, p, 4);
    return _mm512_set1_epi32(quad);
  }
  template <bool EQUAL>
  static uint64_t hits(const int8_t* bytes, __m512i limit) {
    const __m512i x = _mm512_loadu_si512(bytes);
    return EQUAL ? _mm512_cmpeq_epi8_mask(x, limit) : _mm512_cmpge_epi8_mask(x, limit);
  }
};

}  // namespace
