// Level `avx512_vnni`, also VNNI, VBMI and VBMI2: INT8 products of four bytes a lane, compression of bytes. Operations as portable.h
// describes them.
#pragma once
#include "avx512.h"

namespace {

struct Avx512Vnni : Avx512 {
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
        const __m512i x = set1_lanes(q + r * q_stride + d * 4);
        sums[r][0] = (vi)_mm512_dpbusd_epi32((__m512i)sums[r][0], a, x);
        sums[r][1] = (vi)_mm512_dpbusd_epi32((__m512i)sums[r][1], b, x);
      }
    }
  }

  alignas(64) static constexpr uint8_t kPlaces[64] = {
        0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
        32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

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

  static int64_t list_bits(uint64_t bits, int32_t first, int32_t* to) {
    const int64_t count = __builtin_popcountll(bits);
    const __m512i chosen = _mm512_maskz_compress_epi8(bits, _mm512_load_si512(kPlaces)), base = _mm512_set1_epi32(first);
    const auto write = [&](int at, __m128i quarter) {
      _mm512_storeu_si512(to + at, _mm512_add_epi32(_mm512_cvtepu8_epi32(quarter), base));
    };
    write(0, _mm512_castsi512_si128(chosen));
    write(16, _mm512_extracti32x4_epi32(chosen, 1));
    if (count > 32) {
      write(32, _mm512_extracti32x4_epi32(chosen, 2));
      write(48, _mm512_extracti32x4_epi32(chosen, 3));
    }
    return count;
  }

  // Hits of 64 bytes are compressed as bytes and widened; whole vectors are written, the next ones overwriting what was too
  // much. Which of the first two stores are needed is not worth a mispredicted branch.
  template <bool EQUAL>
  static int64_t list_bytes(const int8_t* bytes, int64_t padded, int t, int64_t* next, int32_t* to, int64_t room) {
    int64_t n = 0, j = *next;
    const __m512i limit = _mm512_set1_epi8(static_cast<char>(t)), places = _mm512_load_si512(kPlaces);
    for (; j < padded && n + kListStep <= room; j += kListStep) {
      const uint64_t hit = hits<EQUAL>(bytes + j, limit);
      const int64_t count = __builtin_popcountll(hit);
      const __m512i chosen = _mm512_maskz_compress_epi8(hit, places), base = _mm512_set1_epi32(static_cast<int32_t>(j));
      const auto write = [&](int at, __m128i quarter) {
        _mm512_storeu_si512(to + n + at, _mm512_add_epi32(_mm512_cvtepu8_epi32(quarter), base));
      };
      write(0, _mm512_castsi512_si128(chosen));
      if (!EQUAL) write(16, _mm512_extracti32x4_epi32(chosen, 1));
      if (count > (EQUAL ? 16 : 32)) {
        if (EQUAL) write(16, _mm512_extracti32x4_epi32(chosen, 1));
        write(32, _mm512_extracti32x4_epi32(chosen, 2));
        write(48, _mm512_extracti32x4_epi32(chosen, 3));
      }
      n += count;
    }
    *next = j;
    return n;
  }

 protected:
  // Four bytes in every lane.
  static __m512i set1_lanes(const void* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
};

}  // namespace
