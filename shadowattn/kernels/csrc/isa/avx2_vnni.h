// Level `avx2_vnni`, also AVX-VNNI, as Intel's Core Ultra has it beside its NPU: INT8 products of four bytes a lane. All else is that of
// avx2.h.
#pragma once
#include "avx2.h"

namespace {

struct Avx2Vnni : Avx2 {
  static constexpr bool kSignedKeys = false;

  // Three rows meet 32 keys at a time: 12 sums in registers, since each has to wait for its last product.
  template <int R>
  static void products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                       vi (*sums)[kProductKeys / kLanes]) {
    constexpr int kRows = R == 4 ? 2 : R < 3 ? R : 3;  // no row alone, which would wait
    some_products<kRows>(keys, quads, q, q_stride, biases, sums);
    if constexpr (R > kRows) products<R - kRows>(keys, quads, q + kRows * q_stride, q_stride, biases + kRows, sums + kRows);
  }

  static int32_t key_product(const uint8_t* packed, int64_t key, int64_t quads, const int8_t* q) {
    const uint8_t* quad = packed + key / 16 * quads * 64 + key % 16 * 4;
    __m256i sums = _mm256_setzero_si256();
    for (int64_t d = 0; d < quads; d += 8) {
      const __m256i within = first_lanes(quads - d);
      const __m256i x = _mm256_maskload_epi32(reinterpret_cast<const int*>(q + d * 4), within);
      sums = _mm256_dpbusd_avx_epi32(sums, gather_quads(quad + d * 64, within), x);
    }
    return lanes_total(sums);
  }

 private:
  // sums += the products of bytes without a sign and with one, four to a lane. GCC 12 moves the sums of its intrinsic to other registers
  // and back.
  static void add_products(__m256i* sums, __m256i keys, __m256i x) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(*sums) : "x"(keys), "x"(x));
  }

  template <int R>
  static void some_products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                            vi (*sums)[kProductKeys / kLanes]) {
    __m256i totals[R][4];
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) totals[r][i] = _mm256_set1_epi32(biases[r]);
    const uint8_t* second = keys + quads * 64;
    for (int64_t d = 0; d < quads; ++d) {
      __m256i x[R];
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) x[r] = set1_quad(q + r * q_stride + d * 4);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m256i k = _mm256_loadu_si256(reinterpret_cast<const __m256i*>((i < 2 ? keys : second) + d * 64 + i % 2 * 32));
#pragma GCC unroll 3
        for (int r = 0; r < R; ++r) add_products(&totals[r][i], k, x[r]);
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][i] = (vi)totals[r][i];
  }
};

}  // namespace
