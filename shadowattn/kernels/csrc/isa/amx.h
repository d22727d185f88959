// Level `amx`, also AMX tiles: the INT8 products that rows choose their keys by, where D is a multiple of 64, and the bfloat16
// products of attention in blocks. All else is that of avx512_bf16.h.
#pragma once
#include "avx512_bf16.h"

namespace {

struct Amx : Avx512Bf16 {
  static constexpr bool kTiles = true;

  // The shapes of the tiles, for as long as it lives: 8 rows of products and of q, and 16 keys of 64 dimensions.
  struct Tiles {
    Tiles() {
      alignas(64) uint8_t config[64] = {1};
      for (int tile = 0; tile < 6; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = tile < 4 ? 8 : 16;
      asm volatile("" ::: "memory");  // all 64 bytes are read
      _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
  };

  // Bytes (product + bias) >> shift, saturated, of 8 rows of q for the keys 0 … `keys`, every `step`-th 32 of them.
  static void mapped_bytes(const uint8_t* packed, int64_t keys, int64_t step, int64_t quads, const int8_t* q, int64_t q_stride,
                           const int32_t* biases, const int* shifts, int8_t* bytes, int64_t stride) {
    if (quads == 16) return mapped_bytes_of<1>(packed, keys, step, quads, q, q_stride, biases, shifts, bytes, stride);
    if (quads == 32) return mapped_bytes_of<2>(packed, keys, step, quads, q, q_stride, biases, shifts, bytes, stride);
    return mapped_bytes_of<0>(packed, keys, step, quads, q, q_stride, biases, shifts, bytes, stride);
  }

  static bool all_ones(vf x) { return _mm512_cmp_ps_mask(x, set1(1), _CMP_EQ_OQ) == 0xffff; }

  // The shapes of the tiles of tile_products(), for as long as it lives: all of them whole.
  struct WholeTiles {
    WholeTiles() {
      alignas(64) uint8_t config[64] = {1};
      for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
      asm volatile("" ::: "memory");  // all 64 bytes are read
      _tile_loadconfig(config);
    }
    ~WholeTiles() { _tile_release(); }
    WholeTiles(const WholeTiles&) = delete;
    WholeTiles& operator=(const WholeTiles&) = delete;
  };

  // A tile of 16 rows of 64 bytes, one after another. Rows that lie apart, as in a matrix, take a product several times as long where
  // they are not in the first-level cache.
  static constexpr int64_t kTileBytes = 1024;

  // sums[m][n] = (ADD: +=) Σ over s of x[m][s] · y[s][n], of tiles: m < 2 and n < N, `steps` tiles of 32 bfloat16 numbers a row, of
  // which a lane of y holds two. The tiles of x[m] and of y[n] follow one another, those of sums[m][n] lie at sums[n] + m.
  template <int N, bool ADD>
  static void tile_products(const void* const* x, const void* const* y, int64_t steps, float* const* sums) {
    const char *x0 = static_cast<const char*>(x[0]), *x1 = static_cast<const char*>(x[1]);
    const char *y0 = static_cast<const char*>(y[0]), *y1 = static_cast<const char*>(y[N - 1]);
    float *s0 = sums[0], *s1 = sums[N - 1];
    asm volatile("" ::: "memory");  // the tiles' loads are not seen as reads
    if constexpr (ADD) {
      _tile_loadd(0, s0, 64);
      _tile_loadd(2, s0 + 256, 64);
      if constexpr (N > 1) _tile_loadd(1, s1, 64);
      if constexpr (N > 1) _tile_loadd(3, s1 + 256, 64);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; ++s, x0 += kTileBytes, x1 += kTileBytes, y0 += kTileBytes, y1 += kTileBytes) {
      _tile_loadd(4, x0, 64);
      _tile_loadd(6, y0, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (N > 1) _tile_loadd(7, y1, 64);
      if constexpr (N > 1) _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, x1, 64);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, s0, 64);
    _tile_stored(2, s0 + 256, 64);
    if constexpr (N > 1) _tile_stored(1, s1, 64);
    if constexpr (N > 1) _tile_stored(3, s1 + 256, 64);
    asm volatile("" ::: "memory");
  }

 private:
  // CHUNKS: of 64 dimensions, whose tiles of q stay where they are; 0: they do not. The products of some keys are on their way while
  // those of the keys before them become bytes.
  template <int CHUNKS>
  static void mapped_bytes_of(const uint8_t* packed, int64_t keys, int64_t step, int64_t quads, const int8_t* q, int64_t q_stride,
                              const int32_t* biases, const int* shifts, int8_t* bytes, int64_t stride) {
    alignas(64) int32_t out[2][2][8][16];
    asm volatile("" ::: "memory");  // the tiles' loads are not seen as reads
    if constexpr (CHUNKS > 0) _tile_loadd(2, q, q_stride);
    if constexpr (CHUNKS > 1) _tile_loadd(3, q + 64, q_stride);
    const auto bytes_of = [&](const int32_t (*from)[8][16], int64_t at) {
      asm volatile("" ::: "memory");  // the tiles' stores are not seen as writes to `out`
#pragma GCC unroll 4
      for (int r = 0; r < 8; r += 2) store_two(from[0][r], from[1][r], biases + r, shifts + r, bytes + r * stride + at, stride);
    };
    int64_t at = 0;
    for (int64_t key = 0; key < keys; key += 32 * step, at += 32) {
      const uint8_t *low = packed + key * 4 * quads, *high = low + 64 * quads;
      int32_t(*to)[8][16] = out[at / 32 % 2];
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(4, low, 64);
      _tile_loadd(5, high, 64);
      if constexpr (CHUNKS == 0) _tile_loadd(2, q, q_stride);
      _tile_dpbsud(0, 2, 4);
      _tile_dpbsud(1, 2, 5);
      if constexpr (CHUNKS == 2) {
        _tile_loadd(4, low + kTileBytes, 64);
        _tile_loadd(5, high + kTileBytes, 64);
        _tile_dpbsud(0, 3, 4);
        _tile_dpbsud(1, 3, 5);
      }
      if constexpr (CHUNKS == 0)
        for (int64_t d = 16; d < quads; d += 16) {
          _tile_loadd(2, q + 4 * d, q_stride);
          _tile_loadd(4, low + 64 * d, 64);
          _tile_loadd(5, high + 64 * d, 64);
          _tile_dpbsud(0, 2, 4);
          _tile_dpbsud(1, 2, 5);
        }
      if (at) bytes_of(out[(at / 32 + 1) % 2], at - 32);
      _tile_stored(0, to[0], 64);
      _tile_stored(1, to[1], 64);
    }
    if (at) bytes_of(out[(at / 32 + 1) % 2], at - 32);
  }

  // Two rows' products with 16 keys and 16 more; three packs and a permutation, where each row alone takes two conversions of two steps.
  static void store_two(const int32_t* low, const int32_t* high, const int32_t* biases, const int* shifts, int8_t* to, int64_t stride) {
    const auto shifted = [&](const int32_t* x, int r) {
      return _mm512_srav_epi32(_mm512_add_epi32(_mm512_load_si512(x + 16 * r), _mm512_set1_epi32(biases[r])), _mm512_set1_epi32(shifts[r]));
    };
    const __m512i first = _mm512_packs_epi32(shifted(low, 0), shifted(high, 0));
    const __m512i second = _mm512_packs_epi32(shifted(low, 1), shifted(high, 1));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // of four keys each
    const __m512i both = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + stride), _mm512_extracti64x4_epi64(both, 1));
  }
};

}  // namespace
