// The lists of a decoding step: the heads of a key head share one, by the sum of their INT8 products with the keys, where each head's
// products are divided by the standard deviation of these over the keys. First products, some keys a task, so that several threads
// read packed keys; then a task for a key head makes scores of its heads' products and chooses from them.
#pragma once
#include <cmath>
#include <cstdlib>

#include "abi.h"
#include "estimate.h"

namespace {

constexpr double kAlike = 1e-6;  // of the largest magnitude: a head whose products differ less has no say
constexpr int64_t kPartKeys = 2048;  // of a task that multiplies
constexpr int64_t kProductsAThread = 8 << 20;  // multiplications from which on another thread is woken

// 1 / the standard deviation of products; 0 where they are alike. Sums of integers, of differences from the first product.
inline float weight_of(const int32_t* products, int64_t keys) {
  constexpr int64_t kAtOnce = 1024;  // whose squares a 64-bit sum holds at any D
  double sum = 0, squares = 0;
  int32_t low = products[0], high = low;
  for (int64_t from = 0; from < keys; from += kAtOnce) {
    const int64_t to = min_of(from + kAtOnce, keys);
    int64_t some = 0, some_squares = 0;
    for (int64_t j = from; j < to; ++j) {
      const int32_t more = products[j] - products[0];
      some += more;
      some_squares += static_cast<int64_t>(more) * more;
    }
    for (int64_t j = from; j < to; ++j) low = min_of(low, products[j]), high = max_of(high, products[j]);
    sum += static_cast<double>(some);
    squares += static_cast<double>(some_squares);
  }
  const double count = static_cast<double>(keys), mean = sum / count, largest = max_of(high, -low);
  const double spread = std::sqrt(max_of(squares / count - mean * mean, 0.0));
  return spread <= kAlike * largest ? 0.0f : static_cast<float>(1 / spread);
}

template <class T>
int shared_lists_of(const SaEstimate& a) {
  const int64_t heads = a.query_block, groups = a.heads / heads, quads = a.dim / 4, rows = heads < 3 ? heads : round_up(heads, 4);
  const int64_t width = round_up(a.keys, kKeysAtOncePacked), parts = ceil_div(a.keys, kPartKeys);
  const int64_t q_bytes = round_up(rows * a.dim, 64);
  const int64_t threads = min_of(a.threads, max_of<int64_t>(a.heads * a.keys * a.dim / kProductsAThread, 1));
  int32_t* const products = static_cast<int32_t*>(malloc(static_cast<size_t>(groups * rows * width) * 4));
  if (!products) return 1;
  int failed = run_queue(groups * parts, threads, q_bytes + rows * 4, [&](int64_t t, char* scratch) {
    const int64_t group = t / parts, first = group * heads, from = t % parts * kPartKeys, to = min_of(from + kPartKeys, a.keys);
    const QuantisedRows x{reinterpret_cast<int8_t*>(scratch), reinterpret_cast<int32_t*>(scratch + q_bytes), a.dim};
    // Rows past the last head are 0: products_of() reads the keys once for four rows, and twice for three.
    memset(scratch, 0, static_cast<size_t>(q_bytes + rows * 4));
    for (int64_t h = 0; h < heads; ++h) quantise_rows<T>(a, first + h, 0, 1, {x.q + h * a.dim, x.biases + h, a.dim});
    const uint8_t* packed = a.packed + a.kv_head[first] * a.packed_head_stride;
    for (int64_t pass = from; pass < to; pass += kKeysPerPass)
      for (int64_t h = 0; h < rows; h += kRowsAtOnce)
        products_of<SA_ROWS>(min_of<int64_t>(kRowsAtOnce, rows - h), packed, pass, min_of(pass + kKeysPerPass, to), quads,
                             x.q + h * a.dim, a.dim, x.biases + h, products + (group * rows + h) * width, width);
  });
  if (!failed)
    failed = run_queue(groups, threads, width * 4 + select_bytes(width), [&](int64_t group, char* scratch) {
      float* scores = reinterpret_cast<float*>(scratch);
      memset(scores, 0, static_cast<size_t>(width) * 4);
      for (int64_t h = 0; h < heads; ++h) {
        const int32_t* of_head = products + (group * rows + h) * width;
        const vf weight = Isa::set1(weight_of(of_head, a.keys));
        for (int64_t j = 0; j < width; j += VL)
          Isa::store(scores + j, Isa::load(scores + j) + __builtin_convertvector(Isa::load(of_head + j), vf) * weight);
      }
      if (a.scores) {
        memcpy(a.scores + group * a.keys, scores, static_cast<size_t>(a.keys) * 4);
        return;
      }
      select_list(FloatScores{scores}, a.to, group, 0, a.to.indices + a.to.indptr[group], scratch + width * 4);
    });
  free(products);
  return failed;
}

int shared_lists(const SaEstimate* a) { return a->bfloat16 ? shared_lists_of<bf16>(*a) : shared_lists_of<float>(*a); }

}  // namespace
