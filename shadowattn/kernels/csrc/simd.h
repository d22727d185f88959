// Vectors of one instruction-set level. The compiler's vector extensions carry most of it; intrinsics only where they pay.
//
// Included by level.cpp alone, which is compiled once a level. Everything here and in the kernels has internal linkage: a
// function shared between the levels could be linked from the wrong one and meet a processor that cannot run it. For the
// same reason the kernels use no header of the C++ library that defines functions.
#pragma once
#include <cstdint>
#include <cstring>
#if SA_LEVEL > 0
#include <immintrin.h>
#endif

namespace {

#if SA_LEVEL >= 2
constexpr int VL = 16;  // float lanes of a vector
#elif SA_LEVEL == 1
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));

struct bf16 {
  uint16_t bits;
};

template <class T>
inline T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max_of(T a, T b) {
  return a < b ? b : a;
}
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline void from_float(float x, float* to) { *to = x; }
inline void from_float(float x, bf16* to) {  // round half to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) {
    to->bits = static_cast<uint16_t>(bits >> 16 | 0x40);
    return;
  }
  to->bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline vf set1(float x) {
#if SA_LEVEL >= 2
  return _mm512_set1_ps(x);
#elif SA_LEVEL == 1
  return _mm256_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}

inline vf load(const float* p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline vf load(const bf16* p) {
  vh half;
  memcpy(&half, p, sizeof half);
  const vi wide = __builtin_convertvector(half, vi) << 16;
  vf x;
  memcpy(&x, &wide, sizeof x);
  return x;
}
inline void store(float* p, vf x) { memcpy(p, &x, sizeof x); }

// The 8 elements at p and zeros behind them: the end of a row whose length is a multiple of 8, not of 16.
template <class T>
inline vf load_half(const T* p) {
#if SA_LEVEL >= 2
  T full[16];
  memset(full, 0, sizeof full);
  memcpy(full, p, sizeof full / 2);
  return load(full);
#else
  return load(p);  // never reached: eight elements fill whole vectors
#endif
}
#if SA_LEVEL >= 2
template <>
inline vf load_half<float>(const float* p) {
  return _mm512_maskz_loadu_ps(0xff, p);
}
template <>
inline vf load_half<bf16>(const bf16* p) {
  const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(0xff, p)), 16);
  return _mm512_castsi512_ps(wide);
}
#endif

// The larger of each lane; b where one is NaN.
inline vf vmax(vf a, vf b) {
#if SA_LEVEL >= 2
  return _mm512_max_ps(a, b);
#elif SA_LEVEL == 1
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// The smaller of each lane; b where one is NaN.
inline vf vmin(vf a, vf b) {
#if SA_LEVEL >= 2
  return _mm512_min_ps(a, b);
#elif SA_LEVEL == 1
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// 2^t for t ≤ 0, to about 2 units in the last place; exactly 0 for t ≤ −150 (−127 without AVX-512), NaN for NaN.
// Base 2 because log2(e) then goes into the scale of the scores once, and the reduction of the range is a subtraction.
template <int DEGREE = 6>
inline vf exp2_nonpositive(vf t) {
  constexpr float c[] = {1.0f,          0.693147181f,   0.240226507f, 0.0555041087f,
                         0.00961812911f, 0.00133335581f, 0.000154035304f};  // (ln 2)^i / i!
#if SA_LEVEL >= 2
  t = _mm512_max_ps(set1(-200.0f), t);
  const vf whole = _mm512_roundscale_ps(t, 0);
#else
  t = vmax(set1(-127.0f), t);
  const vf magic = set1(12582912.0f);  // 1.5 · 2^23: adding it leaves no bits for a fraction
  const vf whole = (t + magic) - magic;
#endif
  const vf part = t - whole;
  vf p = set1(c[DEGREE]);
#pragma GCC unroll 8
  for (int i = DEGREE - 1; i >= 0; --i) p = p * part + set1(c[i]);
#if SA_LEVEL >= 2
  return _mm512_scalef_ps(p, whole);
#else
  const vi exponent = (__builtin_convertvector(whole, vi) + 127) << 23;
  vf scale;
  memcpy(&scale, &exponent, sizeof scale);
  return p * scale;
#endif
}

inline float lanes_max(vf x) {
  float m = x[0];
  for (int i = 1; i < VL; ++i) m = x[i] > m ? x[i] : m;
  return m;
}
inline float lanes_sum(vf x) {
  float sum = 0;
  for (int i = 0; i < VL; ++i) sum += x[i];
  return sum;
}

// Sums of neighbours: a's in the lower half, b's in the upper one.
inline vf add_pairs(vf a, vf b) {
#if SA_LEVEL >= 2
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif SA_LEVEL == 1
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// One vector of the sums over the lanes of each of VL vectors, in their order.
inline vf sums_of(vf* x) {
#if SA_LEVEL >= 2
  // Transposes 4 × 4 within 128-bit lanes, then the lanes: each step adds what it brings together.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = x[4 * i], b = x[4 * i + 1], c = x[4 * i + 2], d = x[4 * i + 3];
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x88), _mm512_shuffle_f32x4(x[2], x[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
#endif
#pragma GCC unroll 4
  for (int left = VL / 2; left > 0; left /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < left; ++i) x[i] = add_pairs(x[2 * i], x[2 * i + 1]);
  return x[0];
}

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLowest = -3.402823466e38f;

}  // namespace
