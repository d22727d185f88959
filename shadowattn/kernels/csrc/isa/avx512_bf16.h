// Level `avx512_bf16`, also BF16: bfloat16 products. Operations of avx512_vbmi2.h, and those of bfloat16 pairs, which no level before
// this one has.
#pragma once
#include "avx512_vbmi2.h"

namespace {

struct Avx512Bf16 : Avx512Vbmi2 {
  static constexpr bool kBf16Dot = true;

  typedef __m512i pairs;  // two bfloat16 numbers a lane

  static pairs load_pairs(const void* p) { return _mm512_loadu_si512(p); }
  static pairs load_pairs(const void* p, int64_t n) {  // of n numbers, zeros behind them
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1), p);
  }
  static pairs set1_pair(const void* p) { return set1_quad(p); }
  static void store_pairs(void* p, pairs x) { _mm512_storeu_si512(p, x); }

  // sums + both products of each lane.
  static vf add_dots(vf sums, pairs a, pairs b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }

  // Pairs of a's and b's number in the same place, within 128-bit lanes: `low` holds the first four of each eight places.
  static pairs interleave_low(pairs a, pairs b) { return _mm512_unpacklo_epi16(a, b); }
  static pairs interleave_high(pairs a, pairs b) { return _mm512_unpackhi_epi16(a, b); }
  // Where number d of 32, and of each 32 that follow, lies in `low` and then `high`.
  static int64_t interleaved_at(int64_t d) {
    const int64_t lane = d % 32 / 8, within = d % 8;
    return d / 32 * 32 + (within < 4 ? 4 * lane + within : 16 + 4 * lane + within - 4);
  }

  static void store_rounded(uint16_t* p, vf x) {  // half to even
    const __m256bh rounded = _mm512_cvtneps_pbh(x);
    memcpy(p, &rounded, sizeof rounded);
  }
  static pairs rounded_pairs(vf a, vf b) {  // half up: cheaper
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(a), half), 16);
    return _mm512_mask_mov_epi16(low, 0xaaaaaaaau, _mm512_add_epi32(_mm512_castps_si512(b), half));
  }
};

}  // namespace
