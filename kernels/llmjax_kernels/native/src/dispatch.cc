#include <cstdlib>
#include <cstring>

#if defined(LLMJAX_HAS_amx)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

#define LLMJAX_TABLE(isa) extern const Kernels kKernels_##isa;
LLMJAX_TABLE(generic)
#if defined(__x86_64__)
LLMJAX_TABLE(avx2)
LLMJAX_TABLE(avx512)
#if defined(LLMJAX_HAS_amx)
LLMJAX_TABLE(amx)
#endif
#endif

namespace {

#if defined(LLMJAX_HAS_amx)
// Whether the processor has AMX for bytes, and the kernel lets this process use its registers:
// it must be asked once.
bool HasAmx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  if (!(d & kTile) || !(d & kInt8)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of asm/prctl.h, xfeatures
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

#if defined(__x86_64__)
enum Isa { kGeneric, kAvx2, kAvx512, kAmx };

// For tests LLMJAX_ISA says what is used at most.
Isa Most() {
  const char* most = std::getenv("LLMJAX_ISA");
  if (!most || !*most || !std::strcmp(most, "amx")) return kAmx;
  if (!std::strcmp(most, "avx512")) return kAvx512;
  return std::strcmp(most, "avx2") ? kGeneric : kAvx2;
}
#endif

const Kernels& Choose() {
#if defined(__x86_64__)
  const Isa most = Most();
  __builtin_cpu_init();
  if (most >= kAvx512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni")) {
#if defined(LLMJAX_HAS_amx)
    if (most >= kAmx && HasAmx()) return kKernels_amx;
#endif
    return kKernels_avx512;
  }
  // Where these are, F16C is; older clangs cannot ask for it.
  if (most >= kAvx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2"))
    return kKernels_avx2;
#endif
  return kKernels_generic;
}

}  // namespace

const Kernels& BestKernels() {
  static const Kernels& best = Choose();
  return best;
}
