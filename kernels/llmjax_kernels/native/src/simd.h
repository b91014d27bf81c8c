// Sixteen lanes at a time, on any instruction set.
//
// Arithmetic is written with the compiler's vector extensions, which it lowers to whatever
// the target has; only what they cannot say (byte dot products, half floats) is written once
// per instruction set. The order of every float operation is the same on all of them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;

// Rows whose sums fit the registers together.
#if defined(__AVX512F__)
constexpr int kMaxRows = 8;
#else
constexpr int kMaxRows = 2;
#endif

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint8_t U8 __attribute__((vector_size(64)));
typedef uint16_t U16x32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));

template <typename V>
inline V Load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <typename V>
inline void Store(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

// from[places[lane]].
inline F32 Gather(const float* from, const int32_t* places) {
#if defined(__AVX512F__)
  return _mm512_i32gather_ps(_mm512_loadu_si512(places), from, 4);
#else
  F32 v;
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = from[places[lane]];
  return v;
#endif
}

inline F32 Splat(float x) { return x - F32{}; }
inline I32 Splat(int32_t x) { return x - I32{}; }
inline F32 ToFloat(I32 v) { return __builtin_convertvector(v, F32); }

// a * b + c, in one rounding where the target has it; nothing else is ever contracted
// (-ffp-contract=off), so that a row's result does not depend on how a loop was unrolled.
inline F32 MulAdd(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, 64);
  std::memcpy(y, &b, 64);
  std::memcpy(z, &c, 64);
  for (int i = 0; i < 2; ++i) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  std::memcpy(&c, z, 64);
  return c;
#else
  return a * b + c;
#endif
}

// Integers below 2^22 as sums of 4-byte dot products build them up: from kDotStart. Where a
// product and a sum are one rounding, they start at the bits of 1.5 * 2^23, so that the bits
// of the sum are the float 1.5 * 2^23 + dot; what was added goes out with Scaled's product.
#if defined(__AVX512F__) || defined(__FMA__)
constexpr int32_t kDotStart = 0x4b400000;
constexpr float kDotOffset = 12582912.0f;
inline F32 FromDot(I32 dot) { return (F32)dot; }
#else
constexpr int32_t kDotStart = 0;
constexpr float kDotOffset = 0.0f;
inline F32 FromDot(I32 dot) { return ToFloat(dot); }
#endif

inline F32 Max(F32 a, F32 b) { return a > b ? a : b; }
inline F32 Min(F32 a, F32 b) { return a < b ? a : b; }

inline F32 FromBf16(U16 v) {
#if defined(__AVX512F__)
  return (F32)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#else
  return (F32)(__builtin_convertvector(v, U32) << 16);
#endif
}

inline U16 ToBf16(F32 v) {
  U32 bits = (U32)v;
  bits += 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
  return __builtin_convertvector(bits >> 16, U16);
}

inline F32 FromF16(U16 v) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps((__m256i)v);
#else
  U32 h = __builtin_convertvector(v, U32);
  U32 sign = (h & 0x8000) << 16;
  // Shifted into place, the exponent is off by 112; a product puts subnormals right too.
  F32 magnitude = (F32)((h & 0x7fff) << 13) * 0x1p112f;
  return (F32)((U32)magnitude | sign);
#endif
}

// The last steps of a sum over lanes; the order is fixed.
inline float Sum(F32 v) {
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float x[kLanes];
  Store(x, v);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x[i] += x[i + n];
  return x[0];
#endif
}

inline int32_t Sum(I32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

// Whether every lane is in [-limit, limit]; what is not a number is not.
inline bool AllWithin(F32 v, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(limit), _CMP_LE_OQ) == 0xffff;
#else
  bool all = true;
  for (int i = 0; i < kLanes; ++i) all &= v[i] >= -limit && v[i] <= limit;
  return all;
#endif
}

inline float MaxOf(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float x[kLanes];
  Store(x, v);
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
#endif
}

// exp(x) to about 2 ulp for x in [-87, 88]; below it is 0, and exp(0) is exactly 1.
inline F32 Exp(F32 x) {
  const F32 clamped = Min(Max(x, Splat(-87.0f)), Splat(88.0f));
  const F32 shifter = Splat(12582912.0f);  // 1.5 * 2^23 rounds to an integer
  const F32 biased = MulAdd(clamped, Splat(1.44269504f), shifter);
  const F32 n = biased - shifter;
  F32 r = MulAdd(n, Splat(-0.693359375f), clamped);
  r = MulAdd(n, Splat(2.12194440e-4f), r);
  F32 p = Splat(1.9875691500e-4f);
  p = MulAdd(p, r, Splat(1.3981999507e-3f));
  p = MulAdd(p, r, Splat(8.3334519073e-3f));
  p = MulAdd(p, r, Splat(4.1665795894e-2f));
  p = MulAdd(p, r, Splat(1.6666665459e-1f));
  p = MulAdd(p, r, Splat(5.0000001201e-1f));
  p = MulAdd(p, r * r, r) + 1.0f;
  const U32 scale = ((U32)__builtin_convertvector(n, I32) + 127) << 23;
  const F32 result = p * (F32)scale;
  return x < -87.0f ? F32{} : result;
}

inline F32 Tanh(F32 x) {
  const F32 e = Exp(Min(Max(x + x, Splat(-40.0f)), Splat(40.0f)));
  return (e - 1.0f) / (e + 1.0f);
}

// acc[lane] += sum over i in 0..3 of codes[4 * lane + i] * a[i], a packed in 32 bits.
// kSmall: every code is below 128.
template <bool kSmall>
inline I32 Dot4(I32 acc, U8 codes, const int8_t* a) {
#if defined(__AVX512VNNI__)
  // By hand: compilers load and spread `a` first, with an instruction of its own.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(codes), "m"(*(const int8_t(*)[4])a));
  return acc;
#else
  int32_t packed;
  std::memcpy(&packed, a, 4);
#if defined(__AVX2__)
  const __m256i x = _mm256_set1_epi32(packed), ones = _mm256_set1_epi16(1);
  __m256i in[2], out[2];
  std::memcpy(in, &codes, 64);
  std::memcpy(out, &acc, 64);
  for (int i = 0; i < 2; ++i) {
    if constexpr (kSmall) {
      const __m256i pairs = _mm256_maddubs_epi16(in[i], x);
      out[i] = _mm256_add_epi32(out[i], _mm256_madd_epi16(pairs, ones));
    } else {
      // A pair of products of full bytes would saturate 16 bits: by halves of the codes.
      const __m256i mask = _mm256_set1_epi8(15);
      const __m256i low = _mm256_and_si256(in[i], mask);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(in[i], 4), mask);
      const __m256i lows = _mm256_madd_epi16(_mm256_maddubs_epi16(low, x), ones);
      const __m256i highs = _mm256_madd_epi16(_mm256_maddubs_epi16(high, x), ones);
      out[i] = _mm256_add_epi32(out[i], _mm256_add_epi32(lows, _mm256_slli_epi32(highs, 4)));
    }
  }
  std::memcpy(&acc, out, 64);
  return acc;
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    int32_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += codes[4 * lane + i] * a[i];
    acc[lane] += sum;
  }
  return acc;
#endif
#endif
}

// table[codes[i]] for codes below 16.
inline U8 Lookup(const uint8_t* table, U8 codes) {
#if defined(__AVX512BW__)
  const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (U8)_mm512_shuffle_epi8(t, (__m512i)codes);
#else
  for (int i = 0; i < 64; ++i) codes[i] = table[codes[i]];
  return codes;
#endif
}

inline void Prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void PrefetchSoon(const void* p) { __builtin_prefetch(p, 0, 2); }  // for the second cache

}  // namespace
