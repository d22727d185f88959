// Level `avx512_vnni`, also VNNI: INT8 products of four bytes a lane. Operations as portable.h describes them.
#pragma once
#include "avx512.h"

namespace {

struct Avx512Vnni : Avx512 {
  static constexpr bool kSignedKeys = false;

  template <int R>
  static void products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                       vi (*sums)[kProductKeys / kLanes]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = (vi)_mm512_set1_epi32(biases[r]);
    const uint8_t* second = keys + quads * 64;
    for (int64_t d = 0; d < quads; ++d) {
      const __m512i a = _mm512_loadu_si512(keys + d * 64), b = _mm512_loadu_si512(second + d * 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i x = set1_quad(q + r * q_stride + d * 4);
        sums[r][0] = (vi)_mm512_dpbusd_epi32((__m512i)sums[r][0], a, x);
        sums[r][1] = (vi)_mm512_dpbusd_epi32((__m512i)sums[r][1], b, x);
      }
    }
  }

  static int32_t key_product(const uint8_t* packed, int64_t key, int64_t quads, const int8_t* q) {
    const uint8_t* quad = packed + key / 16 * quads * 64 + key % 16 * 4;
    const __m512i places = _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 6);
    __m512i sums = _mm512_setzero_si512();
    for (int64_t d = 0; d < quads; d += 16) {
      const __mmask16 lanes = static_cast<__mmask16>(quads - d < 16 ? (1 << (quads - d)) - 1 : 0xffff);
      const __m512i k = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, places, quad + d * 64, 1);
      sums = _mm512_dpbusd_epi32(sums, k, _mm512_maskz_loadu_epi32(lanes, q + d * 4));
    }
    return _mm512_reduce_add_epi32(sums);
  }
};

}  // namespace
