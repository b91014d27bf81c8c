// What the processor can do at most, by loops that do nothing else. Called through ctypes, one
// call a thread.
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Independent sums, as many as hide an instruction's latency.
constexpr int kChains = 12;
constexpr int64_t kOperand = 0x1e3779b97f4a7c15;  // bytes of all kinds

// In each loop the compiler is told nothing of the operands, so that it can leave nothing out.
int64_t PlainOps(int64_t rounds) {
  int8_t a[64] = {}, b[64] = {};
  int32_t sum = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : "+m"(a), "+m"(b));
    for (int i = 0; i < 64; ++i) sum += a[i] * b[i];
  }
  asm volatile("" : : "r"(sum));
  return rounds * 64 * 2;
}

#if defined(LLMJAX_HAS_amx)
int64_t AmxOps(int64_t rounds) {
  alignas(64) uint8_t config[64] = {1};  // palette; then bytes of each tile's rows, and rows
  for (int tile = 0; tile < 6; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
  int64_t operand[128];
  for (int64_t& word : operand) word = kOperand;
  asm volatile("ldtilecfg %0" : : "m"(config));
  asm volatile(
      "tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%0,%1,1), %%tmm5"
      : : "r"(operand), "r"(int64_t(64)) : "memory");
  for (int64_t round = 0; round < rounds; ++round)
    asm volatile(
        "tdpbssd %tmm5, %tmm4, %tmm0\n\ttdpbssd %tmm5, %tmm4, %tmm1\n\t"
        "tdpbssd %tmm5, %tmm4, %tmm2\n\ttdpbssd %tmm5, %tmm4, %tmm3");
  asm volatile("tilerelease");
  return rounds * 4 * 16 * 16 * 64 * 2;
}
#endif

#if defined(__x86_64__)
__attribute__((target("avx512f"))) int64_t Avx512Ops(int64_t rounds) {
  __m512i sums[kChains] = {}, a = _mm512_set1_epi64(kOperand);
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) asm volatile("vpdpbusd %1, %1, %0" : "+v"(sums[i]) : "v"(a));
  return rounds * kChains * 64 * 2;
}

__attribute__((target("avx2"))) int64_t Avx2Ops(int64_t rounds) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums[kChains] = {}, a = _mm256_set1_epi64x(kOperand);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      asm volatile("" : "+x"(a), "+x"(sums[i]));
      sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_maddubs_epi16(a, a), ones));
    }
  }
  return rounds * kChains * 32 * 2;
}
#endif

}  // namespace

extern "C" {

// The sum of a buffer's 64-bit words; `bytes` is a multiple of 512.
uint64_t llmjax_read(const uint8_t* data, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(64)));
  Words sums[8] = {};
  for (int64_t at = 0; at < bytes; at += sizeof(sums)) {
    __builtin_prefetch(data + at + 4096);
    for (int i = 0; i < 8; ++i) {
      Words words;
      std::memcpy(&words, data + at + 64 * i, 64);
      sums[i] += words;
    }
  }
  uint64_t total = 0;
  for (const Words& sum : sums)
    for (int i = 0; i < 8; ++i) total += sum[i];
  return total;
}

// Multiplies and adds bytes by the best instruction there is; returns how many operations it
// was, a product and a sum counting as two.
int64_t llmjax_int8_ops(int64_t rounds) {
#if defined(__x86_64__)
  const char* isa = BestKernels().name;
#if defined(LLMJAX_HAS_amx)
  if (!std::strcmp(isa, "amx")) return AmxOps(rounds);
#endif
  if (!std::strcmp(isa, "avx512")) return Avx512Ops(rounds);
  if (!std::strcmp(isa, "avx2")) return Avx2Ops(rounds);
#endif
  return PlainOps(rounds);
}
}
