// Picks the code for an instruction-set level. Compiled for the oldest processor of the family, as is scratch().
#include "abi.h"
#include "scratch.h"
#include "stage_times.h"

#include <chrono>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

#if defined(SA_X86_LEVELS)
#include <cpuid.h>
#endif
#if defined(SA_X86_LEVELS) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(SA_ARM_LEVELS) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(SA_ARM_LEVELS) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

// One instruction set: its kernels, and whether this processor runs them.
struct Level {
  const char* name;
  const SaKernels& kernels;
  bool (*runs)();
};

}  // namespace

extern const SaKernels shadowattn_portable;

#if defined(SA_X86_LEVELS)
extern const SaKernels shadowattn_avx2, shadowattn_avx2_vnni, shadowattn_avx512, shadowattn_avx512_vnni, shadowattn_avx512_vbmi2;
extern const SaKernels shadowattn_avx512_bf16, shadowattn_amx;

#define HAS(feature) (__builtin_cpu_supports(feature) != 0)
static bool has_avx2() { return HAS("avx2") && HAS("fma") && HAS("bmi2"); }
static bool has_avx512() { return has_avx2() && HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq"); }
static bool has_avx512_vnni() { return has_avx512() && HAS("avx512vnni"); }
static bool has_avx512_vbmi2() { return has_avx512_vnni() && HAS("avx512vbmi") && HAS("avx512vbmi2"); }
static bool has_avx512_bf16() { return has_avx512_vbmi2() && HAS("avx512bf16"); }

// AVX-VNNI: INT8 products of 256-bit vectors, which also processors without AVX-512 have.
static bool has_avx2_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1) != 0;
}

// Whether the processor has AMX tiles of INT8 and bfloat16 and Linux lets this process use them: their registers are large, so it has
// to be asked.
static bool has_amx() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d >> 22 & 13) != 13) return false;  // AMX-BF16, AMX-TILE and AMX-INT8
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#elif defined(SA_ARM_LEVELS)
extern const SaKernels shadowattn_neon;

// The INT8 products of Armv8.2, which its first processors lack.
static bool has_neon() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) >> 20 & 1) != 0;  // HWCAP_ASIMDDP
#elif defined(__APPLE__)
  int has = 0;
  size_t bytes = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &bytes, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

// Lowest first: the last one that a processor runs serves it best. Not every processor that runs one runs all those before it.
static const Level kLevels[] = {
    {"portable", shadowattn_portable, [] { return true; }},
#if defined(SA_X86_LEVELS)
    {"avx2", shadowattn_avx2, has_avx2},
    {"avx2_vnni", shadowattn_avx2_vnni, has_avx2_vnni},
    {"avx512", shadowattn_avx512, has_avx512},
    {"avx512_vnni", shadowattn_avx512_vnni, has_avx512_vnni},
    {"avx512_vbmi2", shadowattn_avx512_vbmi2, has_avx512_vbmi2},
    {"avx512_bf16", shadowattn_avx512_bf16, has_avx512_bf16},
    {"amx", shadowattn_amx, has_amx},
#elif defined(SA_ARM_LEVELS)
    {"neon", shadowattn_neon, has_neon},
#endif
};

// Those that this processor runs, found once: a virtual machine may take microseconds to say what its processor has.
struct Here {
  const Level* levels[sizeof kLevels / sizeof *kLevels] = {};
  int count = 0;

  Here() {
    for (const Level& level : kLevels)
      if (level.runs()) levels[count++] = &level;
  }
};

static const Here& here() {
  static const Here found;
  return found;
}

static const SaKernels& kernels_of(int level) { return here().levels[level]->kernels; }

extern "C" const char* shadowattn_level(int level) {
  return level >= 0 && level < here().count ? here().levels[level]->name : nullptr;
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

static int stages_timed = 0;
static int64_t stage_times[SA_STAGES] = {};

bool sa_times_stages() { return __atomic_load_n(&stages_timed, __ATOMIC_RELAXED) != 0; }

int64_t sa_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void sa_spend(int stage, int64_t nanoseconds) { __atomic_fetch_add(stage_times + stage, nanoseconds, __ATOMIC_RELAXED); }

extern "C" void shadowattn_time_stages(int timed, int64_t nanoseconds[SA_STAGES]) {
  __atomic_store_n(&stages_timed, timed, __ATOMIC_RELAXED);
  for (int stage = 0; stage < SA_STAGES; ++stage)
    nanoseconds[stage] = __atomic_exchange_n(stage_times + stage, int64_t{0}, __ATOMIC_RELAXED);
}

extern "C" void shadowattn_struct_bytes(int64_t bytes[12]) {
  bytes[0] = sizeof(SaAttend), bytes[1] = sizeof(SaSelect), bytes[2] = sizeof(SaPack), bytes[3] = sizeof(SaEstimate);
  bytes[4] = sizeof(SaUnite), bytes[5] = sizeof(SaFusedRows), bytes[6] = sizeof(SaRows), bytes[7] = sizeof(SaLookedRows);
  bytes[8] = sizeof(SaRows), bytes[9] = sizeof(SaTileLoop), bytes[10] = sizeof(SaLargest), bytes[11] = SA_STAGES * sizeof(int64_t);
}

extern "C" int shadowattn_attend(int level, const SaAttend* x) { return kernels_of(level).attend(x); }
extern "C" int shadowattn_select(int level, const SaSelect* x) { return kernels_of(level).select(x); }
extern "C" int shadowattn_pack(int level, const SaPack* x) { return kernels_of(level).pack(x); }
extern "C" int shadowattn_estimate(int level, const SaEstimate* x) { return kernels_of(level).estimate(x); }
extern "C" int shadowattn_unite(int level, const SaUnite* x) { return kernels_of(level).unite(x); }
extern "C" int shadowattn_fused_rows(int level, const SaFusedRows* x) { return kernels_of(level).fused_rows(x); }
extern "C" int shadowattn_fused_blocks(int level, const SaRows* x) { return kernels_of(level).fused_blocks(x); }
extern "C" int shadowattn_looked_rows(int level, const SaLookedRows* x) { return kernels_of(level).looked_rows(x); }
extern "C" int shadowattn_shared_step(int level, const SaRows* x) { return kernels_of(level).shared_step(x); }
extern "C" int shadowattn_tile_loop(int level, const SaTileLoop* x) { return kernels_of(level).tile_loop(x); }
extern "C" int shadowattn_largest(int level, const SaLargest* x) { return kernels_of(level).largest(x); }

namespace {
// One buffer a thread, kept between calls: fresh pages on every call would cost more than some of the kernels.
struct Buffer {
  char* data = nullptr;
  int64_t size = 0;
  ~Buffer() { std::free(data); }
};
thread_local Buffer buffer;
}  // namespace

// What lies behind the bytes that were asked for belongs to nobody: the address sanitizer is told, where it watches.
static char* only(int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(buffer.data, static_cast<size_t>(bytes));
  ASAN_POISON_MEMORY_REGION(buffer.data + bytes, static_cast<size_t>(buffer.size - bytes));
#else
  (void)bytes;
#endif
  return buffer.data;
}

char* sa_scratch(int64_t bytes) {
  if (bytes <= buffer.size) return only(bytes);
  std::free(buffer.data);
  buffer.size = (bytes + 4095) / 4096 * 4096;
  buffer.data = static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>(buffer.size)));
  if (buffer.data) return only(bytes);
  buffer.size = 0;
  return nullptr;
}

void sa_yield() {
#if defined(__unix__) || defined(__APPLE__)
  sched_yield();
#endif
}
