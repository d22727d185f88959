// A decoding step on shared lists: the heads of a key head share one, by the sum of their INT8 products with the keys, where each
// head's products are divided by the standard deviation of these over the keys.
//
// One parallel region, since waking threads up takes as long as a stage of a step. Its tasks follow one another: products with some
// keys of a key head; by whoever finishes a key head's last ones, the choice of its list; attention to some keys of a list. A task
// of attention waits until its list is there, which another thread is about to finish.
#pragma once
#include <cmath>
#include <cstdlib>

#include "abi.h"
#include "attend_steps.h"
#include "estimate.h"
#include "largest.h"

namespace {

constexpr double kAlike = 1e-6;  // of the largest magnitude: a head whose products differ less has no say
constexpr int64_t kPartKeys = 2048;  // of a task that multiplies
constexpr int64_t kProductsAThread = 1 << 20;  // multiplications from which on another thread is woken

// Exact sums of some products of a head and of their squares, which 64 bits hold for 2^19 keys at any D, and their range.
struct Spread {
  int64_t sum, squares;
  int32_t low, high;

  static Spread of(const int32_t* products, int64_t keys) {
    Spread s{0, 0, products[0], products[0]};
    for (int64_t j = 0; j < keys; ++j) {
      s.sum += products[j];
      s.squares += static_cast<int64_t>(products[j]) * products[j];
    }
    for (int64_t j = 0; j < keys; ++j) s.low = min_of(s.low, products[j]), s.high = max_of(s.high, products[j]);
    return s;
  }
};

// 1 / the standard deviation of products in some parts; 0 where they are alike.
inline float weight_of(const Spread* parts, int64_t count, int64_t keys) {
  __int128 sum = 0, squares = 0;
  int32_t low = parts[0].low, high = parts[0].high;
  for (int64_t p = 0; p < count; ++p) {
    sum += parts[p].sum, squares += parts[p].squares;
    low = min_of(low, parts[p].low), high = max_of(high, parts[p].high);
  }
  const double spread = std::sqrt(static_cast<double>(squares * keys - sum * sum)) / static_cast<double>(keys);
  return spread <= kAlike * max_of(static_cast<double>(high), -static_cast<double>(low)) ? 0.0f : static_cast<float>(1 / spread);
}

template <class T>
class SharedStep {
 public:
  explicit SharedStep(const SaRows& x)
      : a_(x.choose), b_(x.attend), heads_(a_.query_block), groups_(a_.heads / heads_),
        rows_(heads_ < 3 ? heads_ : round_up(heads_, 4)), width_(round_up(a_.keys, kKeysAtOncePacked)),
        parts_(ceil_div(a_.keys, kPartKeys)), padded_(round_up(a_.dim, 32)), floats_(StepPart::floats(heads_, padded_)) {
    int64_t longest = 0;
    if (attends())
      for (int64_t g = 0; g < groups_; ++g) longest = max_of(longest, a_.to.indptr[g + 1] - a_.to.indptr[g]);
    pieces_ = attends() ? parts_of_step(b_, longest) : 0;
  }

  // Returns what a kernel returns: 1 where memory ran out, 2 where there is no scale (largest.h).
  int run() {
    const int64_t product_bytes = round_up(groups_ * rows_ * width_ * 4, 64), made_bytes = groups_ * pieces_ * floats_ * 4;
    const int64_t spread_bytes = a_.heads * parts_ * static_cast<int64_t>(sizeof(Spread)), counts = 3 * groups_;
    const int64_t bytes = round_up(product_bytes + made_bytes + spread_bytes + counts * 8 + a_.heads * 4, 64);
    char* memory = static_cast<char*>(aligned_alloc(64, static_cast<size_t>(bytes)));
    if (!memory) return 1;
    products_ = reinterpret_cast<int32_t*>(memory);
    made_ = reinterpret_cast<float*>(memory + product_bytes);
    spreads_ = reinterpret_cast<Spread*>(memory + product_bytes + made_bytes);
    estimated_ = reinterpret_cast<int64_t*>(memory + product_bytes + made_bytes + spread_bytes);
    chosen_ = estimated_ + groups_, attended_ = chosen_ + groups_;
    memset(estimated_, 0, static_cast<size_t>(counts) * 8);
    if (!a_.q_scales) {
      float* measured = reinterpret_cast<float*>(estimated_ + counts);
      a_.q_scales = measured;
      if (const int failed = measure_scales(a_, measured)) {
        free(memory);
        return failed;
      }
    }
    const int64_t estimates = groups_ * parts_, threads = max_of<int64_t>(a_.heads * a_.keys * a_.dim / kProductsAThread, 1);
    const int64_t scratch = max_of(max_of(q_bytes() + rows_ * 4, width_ * 4 + select_bytes(width_)), step_scratch(b_));
    const int failed = run_queue(estimates + groups_ * pieces_, min_of(a_.threads, threads), scratch, [&](int64_t t, char* mine) {
      if (t < estimates) estimate(t / parts_, t % parts_, mine);
      else attend((t - estimates) / pieces_, (t - estimates) % pieces_, mine);
    });
    free(memory);
    return failed;
  }

 private:
  bool attends() const { return b_.out.data != nullptr; }
  int64_t q_bytes() const { return round_up(rows_ * a_.dim, 64); }
  // Whether this was the last of some tasks of a key head.
  static bool last_of(int64_t tasks, int64_t* done) { return __atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) == tasks; }

  void estimate(int64_t group, int64_t part, char* scratch) {
    const int64_t from = part * kPartKeys, to = min_of(from + kPartKeys, a_.keys);
    const QuantisedRows x{reinterpret_cast<int8_t*>(scratch), reinterpret_cast<int32_t*>(scratch + q_bytes()), a_.dim};
    // Rows past the last head are 0: products_of() reads the keys once for four rows, and twice for three.
    memset(scratch, 0, static_cast<size_t>(q_bytes() + rows_ * 4));
    for (int64_t h = 0; h < heads_; ++h) quantise_rows<T>(a_, group * heads_ + h, 0, 1, {x.q + h * a_.dim, x.biases + h, a_.dim});
    const uint8_t* packed = a_.packed + group * a_.packed_head_stride;
    int32_t* products = products_ + group * rows_ * width_;
    for (int64_t pass = from; pass < to; pass += kKeysPerPass)
      for (int64_t h = 0; h < rows_; h += kRowsAtOnce)
        products_of<SA_ROWS>(min_of<int64_t>(kRowsAtOnce, rows_ - h), packed, pass, min_of(pass + kKeysPerPass, to), a_.dim / 4,
                             x.q + h * a_.dim, a_.dim, x.biases + h, products + h * width_, width_);
    for (int64_t h = 0; h < heads_; ++h)
      spreads_[(group * heads_ + h) * parts_ + part] = Spread::of(products + h * width_ + from, to - from);
    if (last_of(parts_, estimated_ + group)) choose(group, scratch);
  }

  void choose(int64_t group, char* scratch) {
    float* scores = reinterpret_cast<float*>(scratch);
    memset(scores, 0, static_cast<size_t>(width_) * 4);
    for (int64_t h = 0; h < heads_; ++h) {
      const int32_t* of_head = products_ + (group * rows_ + h) * width_;
      const vf weight = Isa::set1(weight_of(spreads_ + (group * heads_ + h) * parts_, parts_, a_.keys));
      for (int64_t j = 0; j < width_; j += VL)
        Isa::store(scores + j, Isa::load(scores + j) + __builtin_convertvector(Isa::load(of_head + j), vf) * weight);
    }
    if (a_.scores) memcpy(a_.scores + group * a_.keys, scores, static_cast<size_t>(a_.keys) * 4);
    else select_list(FloatScores{scores}, a_.to, group, 0, a_.to.indices + a_.to.indptr[group], scratch + width_ * 4);
    __atomic_store_n(chosen_ + group, 1, __ATOMIC_RELEASE);
  }

  void attend(int64_t group, int64_t piece, char* scratch) {
    for (int64_t looks = 0; !__atomic_load_n(chosen_ + group, __ATOMIC_ACQUIRE); ++looks)
      if (looks > kLooks) sa_yield();
    const int32_t* list = a_.to.indices + a_.to.indptr[group];
    const int64_t keys = a_.to.indptr[group + 1] - a_.to.indptr[group];
    float* of_group = made_ + group * pieces_ * floats_;
    attend_step_part<T>(b_, group, list, keys * piece / pieces_, keys * (piece + 1) / pieces_,
                        StepPart(of_group + piece * floats_, heads_, padded_), scratch);
    if (last_of(pieces_, attended_ + group)) write_step<T>(b_, group, of_group, pieces_);
  }

  static constexpr int64_t kLooks = 1000;  // before the processor is left to others

  SaEstimate a_;
  const SaAttend& b_;
  const int64_t heads_, groups_;  // heads of a key head, and key heads
  const int64_t rows_, width_, parts_, padded_, floats_;
  int64_t pieces_;
  int32_t* products_;                         // [groups][rows][width]
  float* made_;                               // [groups][pieces][floats]
  Spread* spreads_;                           // [groups][heads][parts]
  int64_t *estimated_, *chosen_, *attended_;  // [groups] tasks that are done, and whether the list is there
};

int shared_step(const SaRows* x) {
  return x->choose.bfloat16 ? SharedStep<bf16>(*x).run() : SharedStep<float>(*x).run();
}

}  // namespace
