// The roof of what tiles multiply: their products alone, with nothing loaded, stored or computed between them.
#pragma once
#include "abi.h"
#include "isa.h"
#include "parallel.h"

namespace {

template <class I>
int tile_loop_of(const SaTileLoop& a) {
  if constexpr (I::kTiles)
    return run_queue(a.threads, a.threads, 64, [&](int64_t, char*) {
      const typename I::WholeTiles shapes;
      I::multiply_tiles(a.bfloat16 != 0, a.products / a.threads);
    });
  else return a.threads > 0;
}

int tile_loop(const SaTileLoop* a) { return tile_loop_of<Isa>(*a); }

}  // namespace
