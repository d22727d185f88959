// Level `amx`, also AMX tiles of INT8: the products that rows choose their keys by, where D is a multiple of 64. All else is that of
// avx512_bf16.h.
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
};

}  // namespace
