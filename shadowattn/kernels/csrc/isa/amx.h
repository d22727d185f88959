// Level `amx`, also AMX tiles: the INT8 products that rows choose their keys by, where D is a multiple of 64, and the bfloat16
// products of attention in blocks. All else is that of avx512_bf16.h.
#pragma once
#include "avx512_bf16.h"

namespace {

struct Amx : Avx512Bf16 {
  static constexpr bool kTiles = true;

  // The shapes of the tiles, for as long as it lives: 8 rows of q and their products, and 16 keys of 64 dimensions.
  struct Tiles {
    Tiles() {
      alignas(64) uint8_t config[64] = {1};
      for (int tile = 0; tile < 5; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = tile < 3 ? 8 : 16;
      asm volatile("" ::: "memory");  // all 64 bytes are read
      _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
  };

  static void eight_products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                             vi (*sums)[kProductKeys / kLanes]) {
    if (quads % 16) return products<8>(keys, quads, q, q_stride, biases, sums);
    alignas(64) int32_t out[2][8][16];
    asm volatile("" ::: "memory");  // the tiles' loads are not seen as reads
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < quads; d += 16) {
      _tile_loadd(2, q + 4 * d, q_stride);
      _tile_loadd(3, keys + 64 * d, 64);
      _tile_loadd(4, keys + 64 * (quads + d), 64);
      _tile_dpbsud(0, 2, 3);
      _tile_dpbsud(1, 2, 4);
    }
    _tile_stored(0, out[0], 64);
    _tile_stored(1, out[1], 64);
    asm volatile("" ::: "memory");  // the tiles' stores are not seen as writes to `out`
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) sums[r][half] = load(out[half][r]) + (vi)_mm512_set1_epi32(biases[r]);
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

  // sums[m][n] = (ADD: +=) Σ over s of x[m][s] · y[s][n]: 32 rows of x, `steps` bfloat16 numbers a row, a multiple of 32, and N · 16
  // columns of y, in which a lane holds the numbers of two steps. Strides are in bytes.
  template <int N, bool ADD>
  static void tile_products(const void* x, int64_t x_stride, const void* y, int64_t y_stride, int64_t steps, float* sums,
                            int64_t sums_stride) {
    const char *x0 = static_cast<const char*>(x), *x1 = x0 + 16 * x_stride, *y0 = static_cast<const char*>(y), *y1 = y0 + 64;
    char *s0 = reinterpret_cast<char*>(sums), *s1 = s0 + 16 * sums_stride;
    asm volatile("" ::: "memory");  // the tiles' loads are not seen as reads
    if constexpr (ADD) {
      _tile_loadd(0, s0, sums_stride);
      _tile_loadd(2, s1, sums_stride);
      if constexpr (N > 1) _tile_loadd(1, s0 + 64, sums_stride);
      if constexpr (N > 1) _tile_loadd(3, s1 + 64, sums_stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; s += 32, x0 += 64, x1 += 64, y0 += 16 * y_stride, y1 += 16 * y_stride) {
      _tile_loadd(4, x0, x_stride);
      _tile_loadd(6, y0, y_stride);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (N > 1) _tile_loadd(7, y1, y_stride);
      if constexpr (N > 1) _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, x1, x_stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, s0, sums_stride);
    _tile_stored(2, s1, sums_stride);
    if constexpr (N > 1) _tile_stored(1, s0 + 64, sums_stride);
    if constexpr (N > 1) _tile_stored(3, s1 + 64, sums_stride);
    asm volatile("" ::: "memory");
  }
};

}  // namespace
