// Level `amx`, also AMX tiles: the INT8 products of eight rows with many keys that are not pooled as they are made, and the bfloat16
// products of attention in blocks. All else is that of avx512_bf16.h.
#pragma once
#include "avx512_bf16.h"

#define SA_INLINE __attribute__((always_inline))  // of what is called in the innermost loop, and would be called in memory

namespace {

struct Amx : Avx512Bf16 {
  static constexpr bool kTiles = true;

  // The shapes of the tiles, for as long as it lives: 8 rows of products and of q, and 16 keys, of 64 dimensions or of those that are
  // left behind the last 64 of `quads` · 4.
  struct Tiles {
    explicit Tiles(int64_t quads) {
      alignas(64) uint8_t config[64] = {1};
      const uint8_t left = static_cast<uint8_t>(quads % 16 ? quads % 16 : 16);
      const uint8_t rows[] = {8, 8, 8, 8, 16, 16, left, 8};
      for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = rows[tile];
      config[16 + 2 * 7] = static_cast<uint8_t>(4 * left);
      asm volatile("" ::: "memory");  // all 64 bytes are read
      _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
  };

  // Bytes (product + bias) >> shift, saturated, of 8 rows of q for the keys 0 … `keys`, every `step`-th 32 of them. The products of some
  // keys are on their way while those of the keys before them become bytes.
  static void mapped_bytes(const uint8_t* packed, int64_t keys, int64_t step, int64_t quads, const int8_t* q, int64_t q_stride,
                           const int32_t* biases, const int* shifts, int8_t* bytes, int64_t stride) {
    alignas(64) int32_t out[2][2][8][16];
    int64_t made = 0;  // times 32 keys
    const auto last_bytes = [&]() SA_INLINE {
      if (!made) return;
      const auto from = out[made % 2 ^ 1];
      asm volatile("" ::: "memory");  // the tiles' stores are not seen as writes to `out`
#pragma GCC unroll 4
      for (int r = 0; r < 8; r += 2)
        store_two(from[0][r], from[1][r], biases + r, shifts + r, bytes + r * stride + 32 * (made - 1), stride);
    };
    eight_rows<false>(packed, keys, step, quads, q, q_stride, nullptr, [&](int64_t) SA_INLINE {
      last_bytes();
      const auto to = out[made++ % 2];
      _tile_stored(0, to[0], 64);
      _tile_stored(1, to[1], 64);
    });
    last_bytes();
  }

  // Products + biases of 8 rows of q with the keys `from` … `to`, of 32 at a time: out[r][key]. `from` is a multiple of 32; `packed` and
  // each row of `out` have room for `to` rounded up to one.
  static void eight_products(const uint8_t* packed, int64_t from, int64_t to, int64_t quads, const int8_t* q, int64_t q_stride,
                             const int32_t* biases, int32_t* out, int64_t out_stride) {
    const Tiles tiles(quads);
    alignas(64) int32_t initial[8][16];
    for (int r = 0; r < 8; ++r)
      for (int i = 0; i < 16; ++i) initial[r][i] = biases[r];
    eight_rows<true>(packed + 4 * quads * from, to - from, 1, quads, q, q_stride, initial[0], [&](int64_t key) SA_INLINE {
      _tile_stored(0, out + from + key, 4 * out_stride);
      _tile_stored(1, out + from + key + 16, 4 * out_stride);
    });
    asm volatile("" ::: "memory");  // the tiles' stores are not seen as writes to `out`
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

  // So many products of tiles that are full of zeros, in fours.
  static void multiply_tiles(bool bfloat16, int64_t products) {
    for (int64_t i = 0; i < products; i += 4) {
      if (bfloat16) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      } else {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    }
  }

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
  // Makes the products of 8 rows of q with 16 keys and 16 more, in tiles 0 and 1, and calls take(first key), for the keys 0 … `keys`,
  // every `step`-th 32 of them. STARTS: sums begin with `initial` [8][16].
  template <bool STARTS, class Take>
  SA_INLINE static void eight_rows(const uint8_t* packed, int64_t keys, int64_t step, int64_t quads, const int8_t* q, int64_t q_stride,
                                   const int32_t* initial, const Take& take) {
    if (quads == 16) return eight_rows_of<STARTS, 1, false>(packed, keys, step, quads, q, q_stride, initial, take);
    if (quads == 32) return eight_rows_of<STARTS, 2, false>(packed, keys, step, quads, q, q_stride, initial, take);
    if (quads / 16 == 2) return eight_rows_of<STARTS, 2, true>(packed, keys, step, quads, q, q_stride, initial, take);
    return eight_rows_of<STARTS, 0, true>(packed, keys, step, quads, q, q_stride, initial, take);
  }

  // CHUNKS: whole 64 dimensions, whose tiles of q stay where they are; 0: they do not. TAIL: there are, or may be, dimensions left.
  template <bool STARTS, int CHUNKS, bool TAIL, class Take>
  SA_INLINE static void eight_rows_of(const uint8_t* packed, int64_t keys, int64_t step, int64_t quads, const int8_t* q,
                                      int64_t q_stride, const int32_t* initial, const Take& take) {
    const int64_t whole = quads / 16 * 16;
    const bool tail = TAIL && quads > whole;
    asm volatile("" ::: "memory");  // the tiles' loads are not seen as reads
    if constexpr (CHUNKS > 0) _tile_loadd(2, q, q_stride);
    if constexpr (CHUNKS > 1) _tile_loadd(3, q + 64, q_stride);
    if (tail) _tile_loadd(7, q + 4 * whole, q_stride);
    for (int64_t key = 0; key < keys; key += 32 * step) {
      const uint8_t *low = packed + key * 4 * quads, *high = low + 64 * quads;
      if constexpr (STARTS) {
        _tile_loadd(0, initial, 64);
        _tile_loadd(1, initial, 64);
      } else {
        _tile_zero(0);
        _tile_zero(1);
      }
      if constexpr (CHUNKS > 0) {
        _tile_loadd(4, low, 64);
        _tile_loadd(5, high, 64);
        _tile_dpbsud(0, 2, 4);
        _tile_dpbsud(1, 2, 5);
      }
      if constexpr (CHUNKS > 1) {
        _tile_loadd(4, low + kTileBytes, 64);
        _tile_loadd(5, high + kTileBytes, 64);
        _tile_dpbsud(0, 3, 4);
        _tile_dpbsud(1, 3, 5);
      }
      for (int64_t d = 16 * CHUNKS; d < whole; d += 16) {
        _tile_loadd(2, q + 4 * d, q_stride);
        _tile_loadd(4, low + 64 * d, 64);
        _tile_loadd(5, high + 64 * d, 64);
        _tile_dpbsud(0, 2, 4);
        _tile_dpbsud(1, 2, 5);
      }
      if (tail) {
        _tile_loadd(6, low + 64 * whole, 64);
        _tile_dpbsud(0, 7, 6);
        _tile_loadd(6, high + 64 * whole, 64);
        _tile_dpbsud(1, 7, 6);
      }
      take(key);
    }
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
