// Picks the code for an instruction-set level. Compiled for the oldest processor of the family, as is scratch().
#include "abi.h"
#include "scratch.h"

#include <cstdlib>

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern const SaKernels shadowattn_portable;
#if defined(SA_X86_LEVELS)
extern const SaKernels shadowattn_avx2, shadowattn_avx512, shadowattn_avx512_bf16, shadowattn_amx;
static const SaKernels* const kLevels[] = {&shadowattn_portable, &shadowattn_avx2, &shadowattn_avx512, &shadowattn_avx512_bf16,
                                           &shadowattn_amx};
#else
static const SaKernels* const kLevels[] = {&shadowattn_portable};
#endif

#if defined(SA_X86_LEVELS)
// Whether the processor has AMX tiles of INT8 and Linux lets this process use them: their registers are large, so it has to be asked.
static bool may_use_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return false;  // AMX-TILE and AMX-INT8
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

extern "C" int shadowattn_highest_level(void) {
#if defined(SA_X86_LEVELS)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2")) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq"))
    return 1;
  if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi2"))
    return 2;
  static const bool tiles = may_use_tiles();
  return tiles ? 4 : 3;
#else
  return 0;
#endif
}

extern "C" int shadowattn_set_threads(int threads) {
#ifdef _OPENMP
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  return before;
#else
  return threads;
#endif
}

extern "C" void shadowattn_struct_bytes(int64_t bytes[6]) {
  bytes[0] = sizeof(SaAttend), bytes[1] = sizeof(SaSelect), bytes[2] = sizeof(SaPack), bytes[3] = sizeof(SaEstimate);
  bytes[4] = sizeof(SaUnite), bytes[5] = sizeof(SaRows);
}

extern "C" int shadowattn_attend(int level, const SaAttend* x) { return kLevels[level]->attend(x); }
extern "C" int shadowattn_select(int level, const SaSelect* x) { return kLevels[level]->select(x); }
extern "C" int shadowattn_pack(int level, const SaPack* x) { return kLevels[level]->pack(x); }
extern "C" int shadowattn_estimate(int level, const SaEstimate* x) { return kLevels[level]->estimate(x); }
extern "C" int shadowattn_unite(int level, const SaUnite* x) { return kLevels[level]->unite(x); }
extern "C" int shadowattn_fused_rows(int level, const SaRows* x) { return kLevels[level]->fused_rows(x); }

namespace {
// One buffer a thread, kept between calls: fresh pages on every call would cost more than some of the kernels.
struct Buffer {
  char* data = nullptr;
  int64_t size = 0;
  ~Buffer() { std::free(data); }
};
thread_local Buffer buffer;
}  // namespace

char* sa_scratch(int64_t bytes) {
  if (bytes <= buffer.size) return buffer.data;
  std::free(buffer.data);
  buffer.size = (bytes + 4095) / 4096 * 4096;
  buffer.data = static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>(buffer.size)));
  if (!buffer.data) buffer.size = 0;
  return buffer.data;
}
