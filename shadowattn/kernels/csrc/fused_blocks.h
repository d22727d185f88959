// Exact attention where blocks of rows share lists that are chosen by INT8 products: estimate, selection and attention of one
// block, or of some, in one task. Lists stay in the thread's scratch, unless the caller asks for them.
//
// One parallel region does it all. Stages by themselves have one each for some heads at a time, at the end of which every thread
// waits for the last one; beside other programs that is its turn on a core.
#pragma once
#include "attend_blocks.h"
#include "estimate.h"
#include "stage_times.h"

namespace {

template <class T>
int fused_blocks_of(const SaRows& a) {
  const SaEstimate& e = a.choose;
  int64_t at_once = kRowsAtOnce, longest = 1;  // lists of a task: fewer where threads would find too few tasks to be done at once
  const int64_t shared = a.attend.query_block, rows = min_of(shared, kMaxRows), lanes = round_up(rows, VL);
  while (at_once > 1 && e.heads * ceil_div(e.rows, at_once) < 8 * a.attend.threads) at_once /= 2;
  const ListTasks<T> tasks(e, at_once);
  for (int64_t list = 0; list < e.heads * tasks.lists; ++list)
    longest = max_of(longest, e.to.indptr[list + 1] - e.to.indptr[list]);
  const int64_t list_bytes = round_up(longest * 4, 64), block_bytes = round_up(bytes_of_blocks<T>(e.dim, lanes), 64);
  const int64_t bytes = block_bytes + list_bytes + tasks.bytes_needed();
  return run_queue(e.heads * tasks.count, a.attend.threads, bytes, [&](int64_t t, char* scratch) {
    int32_t* own = reinterpret_cast<int32_t*>(scratch + block_bytes);
    Laps laps;
    tasks.run(t, scratch + block_bytes + list_bytes, [&](int64_t head, int64_t b, int32_t* scores, char* rest) {
      const int64_t start = e.to.indptr[head * tasks.lists + b], length = e.to.indptr[head * tasks.lists + b + 1] - start;
      int32_t* list = e.to.indices ? e.to.indices + start : own;
      laps.end(SA_ESTIMATE);
      tasks.choose(head, b, scores, list, rest);
      laps.end(SA_CHOOSE);
      const int64_t end = min_of((b + 1) * shared, a.attend.rows);
      for (int64_t first = b * shared; first < end; first += rows) {
        const Block block{head, min_of(rows, end - first), first, list, nullptr, 0, length, lanes};
        write_block(a.attend, block, attend_block<T>(a.attend, block, scratch, &laps));
      }
      laps.end(SA_TOGETHER);
    });
  });
}

int fused_blocks(const SaRows* a) { return a->choose.bfloat16 ? fused_blocks_of<bf16>(*a) : fused_blocks_of<float>(*a); }

}  // namespace
