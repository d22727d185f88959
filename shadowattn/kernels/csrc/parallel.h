// A dynamic queue of tasks over OpenMP's threads: the same pool that torch uses, where torch is loaded first.
#pragma once
#include <cstdint>

#include "scratch.h"

namespace {

// Runs task(t, scratch) once for every t in 0 … tasks − 1; returns 1 where a thread got no scratch memory. Tasks never write to
// the same place, so that it does not matter which of them end first. They begin in ascending order, each after all before it have
// begun, so that a task may wait for what those before it do (shared_step.h).
template <class Task>
int run_queue(int64_t tasks, int64_t threads, int64_t scratch_bytes, const Task& task) {
  int64_t next = 0;
  int failed = 0;
  const int workers = static_cast<int>(threads < tasks ? threads : tasks);
  (void)workers;  // unused without OpenMP
#pragma omp parallel num_threads(workers > 0 ? workers : 1) if (workers > 1)
  {
    char* scratch = sa_scratch(scratch_bytes);
    if (!scratch) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    while (scratch) {
      const int64_t t = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (t >= tasks) break;
      task(t, scratch);
    }
  }
  return failed;
}

}  // namespace
