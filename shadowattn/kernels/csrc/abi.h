// The C interface of the native kernels: plain structs and functions, no torch, no C++ types, no exceptions.
//
// Axes as in shadowattn/types.py: H query head, G key/value head, Q query row, K key, D head dimension, B index list.
// The caller (native.py) checks shapes and dtypes. All functions return 0, or 1 where scratch memory ran out.
#pragma once
#include <stdint.h>

#define SA_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// A [heads, rows, D] tensor; strides in elements, the last axis contiguous.
typedef struct {
  void* data;
  int64_t head_stride, row_stride;
} SaTensor;

// Exact attention of each row over its list. Rows b·query_block … share list b, indices[indptr[h·B + b] … indptr[h·B + b + 1]),
// ascending; a row uses the keys at or before its position. indices == NULL: every key up to the row's own (dense).
// members != NULL: list i is the union of the lists of up to 64 rows and ends at ends[i], not where list i + 1 starts. Row r of
// the block keeps the keys whose word has bit r set.
typedef struct {
  int64_t threads, bfloat16;
  int64_t heads, rows, keys, dim, query_block;
  SaTensor q, k, v, out;
  const int64_t* kv_head;    // [H]
  const int64_t* positions;  // [Q], ascending
  const int32_t* indices;
  const int64_t* indptr;  // [H·B + 1]; with members [H·B], where each list starts
  const int64_t* ends;    // [H·B], with members alone
  const uint64_t* members;
  float scale;
} SaAttend;

// Unions of per-row lists over blocks of `query_block` ≤ 64 rows, and the rows that keep each key; see unite.h. The union of a
// block is written from where the list of its first row starts: it is no longer than the lists of its rows together.
typedef struct {
  int64_t threads, heads, rows, query_block;
  const int32_t* row_indices;
  const int64_t* row_indptr;  // [H·Q + 1]
  int32_t* indices;           // of as many places as row_indices
  uint64_t* members;          // as many: bit r of a key's word, row r of the block
  int64_t* ends;              // [H·B], where each union ends
} SaUnite;

// Which keys an index list takes, from scores; see select.h. `indptr` gives each list's length and place.
typedef struct {
  const int64_t* candidates;  // [B] keys 0 … candidates[b] − 1 compete
  const int64_t* tail;        // [B] keys candidates[b] … candidates[b] + tail[b] − 1 follow the chosen ones
  const int64_t* indptr;      // [H·B + 1]
  int32_t* indices;
  int64_t sinks, recent;  // the first and the last of the candidates, which outrank all others
  int64_t self_first;     // 1: the very last one, the row's own key, comes before the sinks
} SaLists;

enum { SA_FLOAT32 = 0, SA_FLOAT16 = 1, SA_INT8 = 2 };

typedef struct {
  int64_t threads, dtype;  // of scores, one of the three
  int64_t heads, lists;
  SaTensor scores;  // [H, B, K]
  SaLists to;
} SaSelect;

// K as unsigned bytes (int8 + 128), packed [G][K / 16][D / 4][16][4]: 16 keys' quads of dimensions in one cache line. Where by_key is
// not NULL, also [G, K, D].
typedef struct {
  int64_t threads, bfloat16;
  int64_t heads, rows, dim;
  SaTensor k;           // the rows to append
  const float* scales;  // [G]
  uint8_t* packed;
  int64_t packed_head_stride, first_key;
  uint8_t* by_key;
  int64_t by_key_head_stride;
} SaPack;

enum { SA_ROWS = 0, SA_MAX = 1, SA_SUM = 2, SA_PROBABILITY = 3 };

// INT8 products of quantised Q with packed K, and what is chosen by them. `pooling` SA_ROWS: list b ranks by row b's
// products. SA_MAX, SA_SUM: by the largest or the sum over rows b·query_block … that see the key (visible[Q]). SA_PROBABILITY: by the
// sum of the rows' softmax, each over the keys it sees.
// scores != NULL: the products (of rows or pooled lists) are written there as float32, and nothing is selected. With neither
// scores nor to.indices they are computed and dropped: what the estimate alone costs.
typedef struct {
  int64_t threads, bfloat16, pooling;
  int64_t heads, rows, keys, dim, query_block;
  SaTensor q;
  const float* q_scales;   // [H]; NULL in fused_rows, looked_rows and shared_step: those of q itself (largest.h); 2 is returned where one is
                           // not finite or, since the processor may take small numbers for 0, not above 0
  const uint8_t* packed;
  int64_t packed_head_stride;
  const int64_t* kv_head;  // [H]
  const int64_t* visible;  // [Q] how many keys each row sees, its position + 1; used by the pooled forms
  const float* exponents;  // [H], SA_PROBABILITY: exp(logit) = 2^(product · exponent), not negative
  float* scores;           // [H, B, K] contiguous, or NULL
  SaLists to;
} SaEstimate;

// How many keys rows keep of those up to their own, by a share of them: `keep_counts` of budget.py; see row_lists.h.
typedef struct {
  const double* retention;  // [H]
  int64_t least;
  int64_t* kept;  // is written: how many all rows of all heads keep together
} SaBudgets;

// What rows may choose from: the keys that one query for a block of rows lets through, the mean of their integers. See
// first_look.h.
typedef struct {
  int64_t rows, near;     // of a block, a multiple of 8 up to 64; keys up to the block's first row that are let through anyway
  const uint8_t* spared;  // [H] heads whose blocks let every key through
  const uint8_t* by_key;  // [G, K, D] the packed keys' bytes, key by key
  int64_t by_key_head_stride;
  float candidates;       // how many times the budget of a block's last row is let through, of the keys that its first row sees
} SaFirstLook;

// Estimate, selection and attention of rows with lists of their own, in one task for some rows; see fused_rows.h. Of `choose` the
// scores are NULL and the pooling is SA_ROWS. The budgets say where each list of `to` begins and ends, and a row's candidates are the
// keys up to its own; `to.indices` is NULL where nobody wants the lists. Of `attend` no list is read. Where `out.data` is NULL, rows choose and do not attend: what estimate and selection alone cost.
typedef struct {
  SaEstimate choose;
  SaAttend attend;
  SaBudgets budgets;
} SaFusedRows;

// The same where rows choose from what a first look lets through; see looked_rows.h.
typedef struct {
  SaEstimate choose;
  SaFirstLook first;
  SaAttend attend;
  SaBudgets budgets;
} SaLookedRows;

// For blocks of rows with a list each (fused_blocks.h) the pooling and the rows of `choose` are any that `estimate` takes; its
// lists are those of `attend`'s blocks, of which none is read; `to.indices` is NULL where nobody wants them.
// For a decoding step (shared_step.h) `choose` has heads of one row each, of which `query_block` neighbours share a key head and a
// list, and `attend` a head for each key head, whose rows they are: each keeps all of its list. Where `scores` [G, K] of `choose` is
// not NULL, what lists go by is written there, and nothing is selected.
typedef struct {
  SaEstimate choose;
  SaAttend attend;
} SaRows;

// So many products of whole tiles, of bfloat16 or INT8, shared out over the threads, whose tiles stay where they are: the roof of all
// that tiles multiply. Only levels with tiles have it; the others return 1.
typedef struct {
  int64_t threads, bfloat16, products;
} SaTileLoop;

// The largest magnitude of each head's rows; NaN where there is one.
typedef struct {
  int64_t threads, bfloat16;
  int64_t heads, rows, dim;
  SaTensor x;
  float* largest;  // [heads]
} SaLargest;

typedef struct {
  int (*attend)(const SaAttend*);
  int (*select)(const SaSelect*);
  int (*pack)(const SaPack*);
  int (*estimate)(const SaEstimate*);
  int (*unite)(const SaUnite*);
  int (*fused_rows)(const SaFusedRows*);
  int (*fused_blocks)(const SaRows*);
  int (*looked_rows)(const SaLookedRows*);
  int (*shared_step)(const SaRows*);
  int (*tile_loop)(const SaTileLoop*);
  int (*largest)(const SaLargest*);
} SaKernels;

// The stages of the fused tasks: the first look of looked_rows, and packing what it let through; quantising rows, and their products with
// keys; the choice of keys by them, with what is multiplied again for ties; attention of rows together, and of each row alone. All of these
// are one stage of looked_rows where a head is spared a first look. SA_TOGETHER is also dense attention, and that to lists which blocks
// share. The last four are its parts: keys and values into the form that is multiplied, products with keys, the softmax, products with
// values. The next keys are fetched between products with keys, in dense attention on tiles as part of the form.
typedef enum {
  SA_LOOK, SA_LET_THROUGH, SA_ESTIMATE, SA_CHOOSE, SA_TOGETHER, SA_ALONE, SA_SPARED,
  SA_FORM, SA_SCORES, SA_SOFTMAX, SA_VALUES, SA_STAGES
} SaStage;

// The name of an instruction-set level that this build has and this processor runs, from 0 for the lowest; NULL after the last one. The
// functions below take those numbers alone.
SA_API const char* shadowattn_level(int level);
// Bytes of what each of the functions below takes, in their order, and of what shadowattn_time_stages writes, so that a caller of other
// declarations is found out before it calls.
SA_API void shadowattn_struct_bytes(int64_t bytes[12]);
// OpenMP's number of threads for the calling thread, torch's operators included; returns what it was.
SA_API int shadowattn_set_threads(int threads);
// Nanoseconds of all threads in each stage since the last call, while stages were timed; from now on they are where `timed` is not 0.
SA_API void shadowattn_time_stages(int timed, int64_t nanoseconds[SA_STAGES]);
SA_API int shadowattn_attend(int level, const SaAttend*);
SA_API int shadowattn_select(int level, const SaSelect*);
SA_API int shadowattn_pack(int level, const SaPack*);
SA_API int shadowattn_estimate(int level, const SaEstimate*);
SA_API int shadowattn_unite(int level, const SaUnite*);
SA_API int shadowattn_fused_rows(int level, const SaFusedRows*);
SA_API int shadowattn_fused_blocks(int level, const SaRows*);
SA_API int shadowattn_looked_rows(int level, const SaLookedRows*);
SA_API int shadowattn_shared_step(int level, const SaRows*);
SA_API int shadowattn_tile_loop(int level, const SaTileLoop*);
SA_API int shadowattn_largest(int level, const SaLargest*);

#ifdef __cplusplus
}
#endif
