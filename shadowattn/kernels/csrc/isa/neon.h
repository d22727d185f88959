// Level `neon`, AArch64 with the INT8 products of Armv8.2 (dotprod): 128-bit vectors. Operations as portable.h describes them.
#pragma once
#include <arm_neon.h>

#include "portable.h"

namespace {

struct Neon : Vectors<f32x4, i32x4, u16x4> {
  static constexpr int kRegisters = 32;
  static constexpr bool kSignedKeys = true;

  using Vectors::load;
  static vf load(const bf16* p) {
    uint16x4_t half;
    memcpy(&half, p, sizeof half);
    return (vf)vshll_n_u16(half, 16);
  }
  static vf set1(float x) { return (vf)vdupq_n_f32(x); }

  // FMAX would give NaN where one is NaN.
  static vf max(vf a, vf b) { return Portable::max(a, b); }
  static vf min(vf a, vf b) { return Portable::min(a, b); }
  static vi max(vi a, vi b) { return (vi)vmaxq_s32((int32x4_t)a, (int32x4_t)b); }

  static vf whole(vf x) { return (vf)vrndnq_f32((float32x4_t)x); }
  static vf kept(vf x, uint64_t bits) {
    static constexpr uint32_t kLaneBits[4] = {1, 2, 4, 8};
    const uint32x4_t set = vtstq_u32(vdupq_n_u32(static_cast<uint32_t>(bits)), vld1q_u32(kLaneBits));
    return (vf)vbslq_f32(set, (float32x4_t)x, vdupq_n_f32(-__builtin_inff()));
  }

  static vf sums_of(const vf* x) { return (vf)vpaddq_f32(add_pairs(x[0], x[1]), add_pairs(x[2], x[3])); }
  static void store_sums(const vf* x, float* to) { store(to, sums_of(x)); }

  static void store_bytes(int8_t* p, vf x) { store_narrowed(p, vcvtnq_s32_f32((float32x4_t)x)); }
  static void store_shifted(int8_t* bytes, const vi* x, int shift) {
    const int32x4_t count = vdupq_n_s32(-shift);
    const auto part = [&](int i) { return vqmovn_s32(vshlq_s32((int32x4_t)x[i], count)); };
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      const int8x8_t low = vqmovn_s16(vcombine_s16(part(i), part(i + 1)));
      const int8x8_t high = vqmovn_s16(vcombine_s16(part(i + 2), part(i + 3)));
      vst1q_s8(bytes + 4 * i, vcombine_s8(low, high));
    }
  }

  // Four rows meet 16 keys at a time: 16 sums and 4 vectors of keys in registers. SDOT takes signed bytes.
  template <int R>
  static void products(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                       vi (*sums)[kProductKeys / kLanes]) {
    constexpr int kRows = R < 4 ? R : 4;
    static_assert(R % kRows == 0);
    for (int r = 0; r < R; r += kRows)
      for (int half = 0; half < 2; ++half)
        products_16<kRows>(keys + half * quads * 64, quads, q + r * q_stride, q_stride, biases + r, sums + r, 4 * half);
  }

  static int32_t key_product(const uint8_t* packed, int64_t key, int64_t quads, const int8_t* q) {
    const uint8_t* quad = packed + key / 16 * quads * 64 + key % 16 * 4;
    int32x2_t sums = vdup_n_s32(0);
    for (int64_t d = 0; d < quads; d += 2, quad += 128) {
      int32_t both[2];
      memcpy(both, quad, 4);
      memcpy(both + 1, quad + 64, 4);
      const int8x8_t x = vld1_s8(q + 4 * d);
      sums = vdot_s32(sums, veor_s8(vreinterpret_s8_s32(vld1_s32(both)), vdup_n_s8(-128)), x);
    }
    return vaddv_s32(sums);
  }

  static int64_t shifted_bytes(const int32_t* s, int64_t n, int32_t centre, int shift, int limit, int8_t* bytes) {
    const int32x4_t middle = vdupq_n_s32(centre), count = vdupq_n_s32(-shift);
    const int8x16_t worst = vdupq_n_s8(static_cast<int8_t>(-limit)), best = vdupq_n_s8(static_cast<int8_t>(limit));
    const auto part = [&](int64_t at) { return vqmovn_s32(vshlq_s32(vsubq_s32(vld1q_s32(s + at), middle), count)); };
    int64_t j = 0;
    for (; j + 16 <= n; j += 16) {
      const int8x8_t low = vqmovn_s16(vcombine_s16(part(j), part(j + 4)));
      const int8x8_t high = vqmovn_s16(vcombine_s16(part(j + 8), part(j + 12)));
      vst1q_s8(bytes + j, vmaxq_s8(vminq_s8(vcombine_s8(low, high), best), worst));
    }
    return j;
  }

  template <bool EQUAL>
  static uint64_t bits_of(const int8_t* bytes, int t) {
    static constexpr uint8_t kPlaces[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const int8x16_t limit = vdupq_n_s8(static_cast<int8_t>(t));
    const uint8x16_t places = vld1q_u8(kPlaces);
    const auto hits = [&](int at) {
      const int8x16_t x = vld1q_s8(bytes + at);
      return vandq_u8(EQUAL ? vceqq_s8(x, limit) : vcgeq_s8(x, limit), places);
    };
    const uint8x16_t pairs = vpaddq_u8(vpaddq_u8(hits(0), hits(16)), vpaddq_u8(hits(32), hits(48)));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(pairs, pairs)), 0);
  }

  static int64_t count_from(const int8_t* bytes, int64_t padded, int t) {
    const int8x16_t limit = vdupq_n_s8(static_cast<int8_t>(t));
    int64_t count = 0;
    for (int64_t j = 0; j < padded;) {
      uint8x16_t within = vdupq_n_u8(0);
      for (const int64_t end = min_of(padded, j + 16 * 255); j < end; j += 16)  // a byte counts to 255
        within = vsubq_u8(within, vcgeq_s8(vld1q_s8(bytes + j), limit));
      count += vaddlvq_u8(within);
    }
    return count;
  }

  template <bool EQUAL>
  static int64_t list_bytes(const int8_t* bytes, int64_t padded, int t, int64_t* next, int32_t* to, int64_t room) {
    int64_t n = 0, j = *next;
    for (; j < padded && n + kListStep <= room; j += kListStep)
      n += list_bits(bits_of<EQUAL>(bytes + j, t), static_cast<int32_t>(j), to + n);
    *next = j;
    return n;
  }

 private:
  static float32x4_t add_pairs(vf a, vf b) { return vpaddq_f32((float32x4_t)a, (float32x4_t)b); }

  static void store_narrowed(int8_t* p, int32x4_t x) {  // saturated
    const int16x4_t half = vqmovn_s32(x);
    const int32x2_t bytes = vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(half, half)));
    memcpy(p, &bytes, 4);
  }

  template <int R>
  static void products_16(const uint8_t* keys, int64_t quads, const int8_t* q, int64_t q_stride, const int32_t* biases,
                          vi (*sums)[kProductKeys / kLanes], int first) {
    int32x4_t totals[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) totals[r][i] = vdupq_n_s32(biases[r]);
    for (int64_t d = 0; d < quads; d += 2) {  // D is a multiple of 8
      int8x8_t x[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) x[r] = vld1_s8(q + r * q_stride + 4 * d);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int8x16_t even = signed_keys(keys + 64 * d + 16 * i), odd = signed_keys(keys + 64 * d + 64 + 16 * i);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) totals[r][i] = vdotq_lane_s32(vdotq_lane_s32(totals[r][i], even, x[r], 0), odd, x[r], 1);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][first + i] = (vi)totals[r][i];
  }

  static int8x16_t signed_keys(const uint8_t* keys) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(keys), vdupq_n_u8(128))); }
};

}  // namespace
