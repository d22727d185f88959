// Which of the attention kernels serves a call.
#pragma once
#include "attend_blocks.h"
#include "attend_rows.h"
#include "attend_steps.h"

namespace {

// Below this many rows a list, lanes that hold no row cost more than reading each row's keys on its own.
constexpr int64_t kLeastSharedRows = 4;

template <class T>
int attend_as(const SaAttend& a) {
  if (!a.indices && a.rows <= kMostStepRows) return attend_steps<T>(a);
  return a.indices && !a.members && a.query_block < kLeastSharedRows ? attend_rows<T>(a) : attend_blocks<T>(a);
}

int attend(const SaAttend* a) { return a->bfloat16 ? attend_as<bf16>(*a) : attend_as<float>(*a); }

}  // namespace
