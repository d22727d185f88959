// The instruction set that this object is compiled for, as `Isa`: the one place that asks for SA_LEVEL.
//
// Each header of isa/ defines a type with the vectors and the operations of one level. A level's intrinsics compile under its
// flags only, so that an object includes no header above its own. The kernels are written on `Isa` alone; where a level has an
// operation that others lack (`Isa::kBf16Dot`), what uses it is a template over the level and is not instantiated elsewhere.
#pragma once
#if SA_LEVEL == 4
#include "isa/amx.h"
namespace { using Isa = Amx; }
#elif SA_LEVEL == 3
#include "isa/avx512_bf16.h"
namespace { using Isa = Avx512Bf16; }
#elif SA_LEVEL == 2
#include "isa/avx512.h"
namespace { using Isa = Avx512; }
#elif SA_LEVEL == 1
#include "isa/avx2.h"
namespace { using Isa = Avx2; }
#else
#include "isa/portable.h"
namespace { using Isa = Portable; }
#endif

namespace {

using vf = Isa::vf;
using vi = Isa::vi;
typedef uint32_t vu __attribute__((vector_size(sizeof(vi))));  // sums of these may be taken in any order
constexpr int VL = Isa::kLanes;

}  // namespace
