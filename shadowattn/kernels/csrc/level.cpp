// The kernels of one instruction-set level: CMakeLists.txt compiles this file once a level, with that level's flags.
#include "attend.h"
#include "estimate.h"
#include "fused_blocks.h"
#include "fused_rows.h"
#include "largest.h"
#include "looked_rows.h"
#include "select.h"
#include "shared_step.h"
#include "tile_loop.h"
#include "unite.h"

extern const SaKernels SA_TABLE;
const SaKernels SA_TABLE = {attend, select, pack, estimate, unite, fused_rows, fused_blocks, looked_rows, shared_step, tile_loop, largest};
