// The instruction set that this object is compiled for, as `Isa`: CMakeLists.txt names its header and its type.
//
// Each header of isa/ defines a type with the vectors and the operations of one level. A level's intrinsics compile under its
// flags only, so that an object includes no header above its own. The kernels are written on `Isa` alone; where a level has an
// operation that others lack (`Isa::kBf16Dot`), what uses it is a template over the level and is not instantiated elsewhere.
#pragma once
#include SA_ISA_HEADER

namespace {

using Isa = SA_ISA;
using vf = Isa::vf;
using vi = Isa::vi;
typedef uint32_t vu __attribute__((vector_size(sizeof(vi))));  // sums of these may be taken in any order
constexpr int VL = Isa::kLanes;

}  // namespace
