#include <cstdlib>
#include <cstring>

#include "kernels.h"

#define LLMJAX_TABLE(isa) extern const Kernels kKernels_##isa;
LLMJAX_TABLE(generic)
#if defined(__x86_64__)
LLMJAX_TABLE(avx2)
LLMJAX_TABLE(avx512)
#endif

namespace {

const Kernels& Choose() {
#if defined(__x86_64__)
  const char* most = std::getenv("LLMJAX_ISA");  // for tests: at most this one
  const bool any = !most || !*most || !std::strcmp(most, "avx512");
  __builtin_cpu_init();
  if (any && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni"))
    return kKernels_avx512;
  // Where these are, F16C is; older clangs cannot ask for it.
  if ((any || !std::strcmp(most, "avx2")) && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return kKernels_avx2;
#endif
  return kKernels_generic;
}

}  // namespace

const Kernels& BestKernels() {
  static const Kernels& best = Choose();
  return best;
}
