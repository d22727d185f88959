// Level `avx512_vbmi2`, also VBMI2: compression of bytes. All else is that of avx512_vnni.h.
#pragma once
#include "avx512_vnni.h"

namespace {

struct Avx512Vbmi2 : Avx512Vnni {
  alignas(64) static constexpr uint8_t kPlaces[64] = {
        0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
        32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

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
};

}  // namespace
