// How keys and values lie in pages, and how they become floats.
//
// A block is 16 positions of one head: keys [head_dim, 16], so that one channel is one vector;
// values [16, head_dim]. Where they are kept in 8 bits, the scale of each position follows its
// block, float32 [16], so that the value of a code is code * scale.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "simd.h"

namespace {

struct E4m3 { uint8_t bits; };
struct E5m2 { uint8_t bits; };

template <typename T>
struct Kv {
  static constexpr bool kScaled = sizeof(T) == 1;
  // The greatest value that a scaled code stands for.
  static constexpr float kMost = 127;
};
template <>
struct Kv<E4m3> {
  static constexpr bool kScaled = true;
  static constexpr float kMost = 448;
};
template <>
struct Kv<E5m2> {
  static constexpr bool kScaled = true;
  static constexpr float kMost = 57344;
};

typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef int8_t I8x16 __attribute__((vector_size(16)));

inline F32 KvLoad(const float* p) { return Load<F32>(p); }
inline F32 KvLoad(const uint16_t* p) { return FromBf16(Load<U16>(p)); }
inline F32 KvLoad(const int8_t* p) { return __builtin_convertvector(Load<I8x16>(p), F32); }
inline F32 KvLoad(const E5m2* p) {  // the upper half of a float16
  return FromF16(__builtin_convertvector(Load<U8x16>(p), U16) << 8);
}
inline F32 KvLoad(const E4m3* p) {  // a float16 with one bit less of exponent, which is off by 8
  const U16 bits = __builtin_convertvector(Load<U8x16>(p), U16);
  return FromF16((bits & 0x7f) << 7 | (bits & 0x80) << 8) * 256.0f;
}

// To nearest, ties to even; |x| is at most the format's greatest value.
template <int kMantissa, int kBias>
inline uint8_t ToFloat8(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 0x80;
  const float magnitude = std::fabs(x);
  if (magnitude < std::ldexp(1.0f, 1 - kBias)) {  // subnormal, or rounds up to what is not
    return uint8_t(sign | uint32_t(std::nearbyint(std::ldexp(magnitude, kBias - 1 + kMantissa))));
  }
  constexpr int kDropped = 23 - kMantissa;
  bits &= 0x7fffffff;
  bits += (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);
  return uint8_t(sign | ((bits >> kDropped) - ((127u - kBias) << kMantissa)));
}

inline void KvStore(float x, float* to) { *to = x; }
inline void KvStore(float x, uint16_t* to) { *to = ToBf16(Splat(x))[0]; }
inline void KvStore(float x, int8_t* to) { *to = int8_t(std::nearbyint(x)); }
inline void KvStore(float x, E4m3* to) { to->bits = ToFloat8<3, 7>(x); }
inline void KvStore(float x, E5m2* to) { to->bits = ToFloat8<2, 15>(x); }

// Sixteen positions of one head, the first of them at a multiple of 16.
template <typename T>
struct KvBlock {
  T* k;  // [head_dim, 16]
  T* v;  // [16, head_dim]
  float* k_scale;  // [16]
  float* v_scale;

  KvBlock(const AttentionArgs& a, int64_t seq, int64_t position, int64_t kv_head) {
    const int64_t id = a.block_tables[seq * a.pages_per_seq + position / a.page_size];
    const int64_t block = position % a.page_size / kLanes;
    const int64_t codes = kLanes * a.head_dim * int64_t(sizeof(T));
    const int64_t bytes = codes + (Kv<T>::kScaled ? kLanes * int64_t(sizeof(float)) : 0);
    const int64_t at = ((id * a.kv_heads + kv_head) * (a.page_size / kLanes) + block) * bytes;
    char* k_bytes = static_cast<char*>(a.k_pages) + at;
    char* v_bytes = static_cast<char*>(a.v_pages) + at;
    k = reinterpret_cast<T*>(k_bytes);
    v = reinterpret_cast<T*>(v_bytes);
    k_scale = reinterpret_cast<float*>(k_bytes + codes);
    v_scale = reinterpret_cast<float*>(v_bytes + codes);
  }
};

// Stores n channels, `stride` apart.
template <typename T>
inline void KvStoreRow(const float* x, int64_t n, T* to, int64_t stride, float* scale) {
  if constexpr (!Kv<T>::kScaled) {
    for (int64_t i = 0; i < n; ++i) KvStore(x[i], to + i * stride);
  } else {
    float largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < n; ++i) {
      largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
      finite &= std::isfinite(x[i]);
    }
    // What is not finite makes the whole row so.
    *scale = finite ? largest / Kv<T>::kMost : NAN;
    const float inverse = finite && largest > 1e-30f ? Kv<T>::kMost / largest : 0.0f;
    for (int64_t i = 0; i < n; ++i) {
      float code = finite ? x[i] * inverse : 0.0f;
      code = code > Kv<T>::kMost ? Kv<T>::kMost : code < -Kv<T>::kMost ? -Kv<T>::kMost : code;
      KvStore(code, to + i * stride);
    }
  }
}

}  // namespace
