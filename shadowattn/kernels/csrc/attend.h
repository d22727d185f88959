// Which of the two attention kernels serves a call.
#pragma once
#include "attend_blocks.h"
#include "attend_rows.h"

namespace {

// Below this many rows a list, lanes that hold no row cost more than reading each row's keys on its own.
constexpr int64_t kLeastSharedRows = 4;

int attend(const SaAttend* a) {
  const bool own_lists = a->indices && !a->members && a->query_block < kLeastSharedRows;
  if (a->bfloat16) return own_lists ? attend_rows<bf16>(*a) : attend_blocks<bf16>(*a);
  return own_lists ? attend_rows<float>(*a) : attend_blocks<float>(*a);
}

}  // namespace
