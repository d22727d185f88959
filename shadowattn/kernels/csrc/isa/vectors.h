// Operations that the compiler's vector extensions express at any width: the base of every level.
//
// A level adds what depends on its instructions: set1, max and min, sums_of, store_sums, products, count_from and list_bytes; and it
// hides operations of this base that it does faster.
#pragma once
#include "../numbers.h"

namespace {

// The vector types have as many lanes each. GCC takes no vector_size that depends on a template's argument, hence types as arguments.
template <class Floats, class Integers, class Halves>
struct Vectors {
  using vf = Floats;    // float
  using vi = Integers;  // int32_t
  using vh = Halves;    // uint16_t

  static constexpr int kLanes = sizeof(vf) / sizeof(float);
  static constexpr int kRegisters = 16;          // of vectors: the kernels keep their sums in half of them
  static constexpr bool kBf16Dot = false;        // products of bfloat16 pairs; see avx512_bf16.h for what comes with them
  static constexpr bool kTiles = false;          // mapped_bytes(), eight_products(), tile_products()
  static constexpr bool kSignedKeys = false;     // products are with the keys, and not with their bytes, which are 128 more
  static constexpr bool kScalesByFloor = false;
  static constexpr float kLeastExponent = -127;  // scale() gives 0 there
  static constexpr int kProductKeys = 32;        // packed keys of one products()
  static constexpr int64_t kListStep = 64;       // the most that list_bytes() lists, or writes past what it lists, at once

  static vf load(const float* p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
  }
  static vi load(const int32_t* p) {
    vi x;
    memcpy(&x, p, sizeof x);
    return x;
  }
  static vf load(const bf16* p) {
    vh half;
    memcpy(&half, p, sizeof half);
    const vi wide = __builtin_convertvector(half, vi) << 16;
    vf x;
    memcpy(&x, &wide, sizeof x);
    return x;
  }
  // Half as many elements and zeros behind them: D is a multiple of 8, and vectors of 16 lanes have a row's end that is half full.
  template <class T>
  static vf load_half(const T* p) {
    T full[kLanes];
    memset(full, 0, sizeof full);
    memcpy(full, p, sizeof full / 2);
    return load(full);
  }
  static void store(float* p, vf x) { memcpy(p, &x, sizeof x); }
  static void store(int32_t* p, vi x) { memcpy(p, &x, sizeof x); }
  static void store_bytes(int8_t* p, vf x) {  // rounded; for −128 ≤ x ≤ 127
    const vi rounded = __builtin_convertvector(whole(x), vi);
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(rounded[i]);
  }

  static vf whole(vf x) { return (x + kRounder) - kRounder; }  // rounded
  static vf scale(vf x, vf whole) {                            // x · 2^whole
    const vi exponent = (__builtin_convertvector(whole, vi) + 127) << 23;
    vf power;
    memcpy(&power, &exponent, sizeof power);
    return x * power;
  }

  // x in the lanes whose bit is set, −∞ in the others.
  static vf kept(vf x, uint64_t bits) {
    vi numbers, lane_bit;
    memcpy(&numbers, &x, sizeof x);
    for (int i = 0; i < kLanes; ++i) lane_bit[i] = 1 << i;
    const vi set = (lane_bit & (vi{} + static_cast<int32_t>(bits))) != 0;
    const vi chosen = (numbers & set) | (~set & static_cast<int32_t>(0xff800000));
    memcpy(&x, &chosen, sizeof x);
    return x;
  }

  static float lanes_max(vf x) {
    float m = x[0];
    for (int i = 1; i < kLanes; ++i) m = x[i] > m ? x[i] : m;
    return m;
  }
  static float lanes_sum(vf x) {
    float sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += x[i];
    return sum;
  }

  // What holds for as long as mapped products are wanted.
  struct Tiles {
    explicit Tiles(int64_t) {}
    ~Tiles() {}  // not trivial: else an object that nobody names would be unused
  };

  // bytes = x >> shift, saturated, for the products of a row with kProductKeys keys.
  static void store_shifted(int8_t* bytes, const vi* x, int shift) {
    for (int key = 0; key < kProductKeys; ++key)
      bytes[key] = static_cast<int8_t>(max_of(min_of(x[key / kLanes][key % kLanes] >> shift, 127), -128));
  }

  // Which of 64 bytes are at least t (or equal t), a bit each.
  template <bool EQUAL>
  static uint64_t bits_of(const int8_t* bytes, int t) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) bits |= static_cast<uint64_t>(EQUAL ? bytes[i] == t : bytes[i] >= t) << i;
    return bits;
  }

  // first + the places of a word's bits, ascending; may write kListStep numbers. Returns how many there are.
  static int64_t list_bits(uint64_t bits, int32_t first, int32_t* to) {
    int64_t n = 0;
    for (; bits; bits &= bits - 1) to[n++] = first + __builtin_ctzll(bits);
    return n;
  }

  // The product of one row of q with one packed key as it is.
  static int32_t key_product(const uint8_t* packed, int64_t key, int64_t quads, const int8_t* q) {
    const uint8_t* quad = packed + key / 16 * quads * 64 + key % 16 * 4;
    int32_t sum = 0;
    for (int64_t d = 0; d < 4 * quads; d += 4, quad += 64)
      for (int i = 0; i < 4; ++i) sum += quad[i] * q[d + i];
    return sum;
  }

  // 16 keys of D = 4 · `quads` bytes each, which lie one after another in `by_key`, as 16 packed ones.
  static void pack_16(const uint8_t* by_key, int64_t quads, const int32_t* keys, uint8_t* to) {
    for (int64_t d = 0; d < quads; ++d)
      for (int i = 0; i < 16; ++i) memcpy(to + 64 * d + 4 * i, by_key + 4 * (keys[i] * quads + d), 4);
  }

  // bytes[j] = (s[j] − centre) >> shift, clamped to ±limit, for as many of n as it does at once; returns how many.
  static int64_t shifted_bytes(const int32_t*, int64_t, int32_t, int, int, int8_t*) { return 0; }
};

}  // namespace
