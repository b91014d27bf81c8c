// Paged attention: an online softmax over blocks of 64 keys at fixed positions.
//
// A row (one query of one head) goes through the same operations in the same order whether it
// is computed alone, with other heads, or in a tile of a prompt: a block that a row does not
// see changes nothing, bit for bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "rows.h"
#include "simd.h"

namespace {

constexpr int kKeys = 64;  // of one block
constexpr int kMaxHeadDim = 512;
constexpr float kMasked = -1e30f;

template <typename T>
inline F32 LoadAsFloat(const T* p) {
  if constexpr (sizeof(T) == 2) return FromBf16(Load<U16>(p));
  else return Load<F32>(p);
}

template <typename T>
inline T Narrow(float x) {
  if constexpr (sizeof(T) == 2) return ToBf16(Splat(x))[0];
  else return x;
}

// Turns channels i and i + half by the token's angle, for i < half.
inline void Rotate(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32 c = Load<F32>(cos + i), s = Load<F32>(sin + i);
    const F32 first = Load<F32>(x + i), second = Load<F32>(x + half + i);
    Store(x + i, first * c - second * s);
    Store(x + half + i, second * c + first * s);
  }
  for (; i < half; ++i) {
    const float first = x[i], second = x[half + i];
    x[i] = first * cos[i] - second * sin[i];
    x[half + i] = second * cos[i] + first * sin[i];
  }
}

template <typename T>
struct Page {
  T* k;  // [page / 16, head_dim, 16]
  T* v;  // [page, head_dim]

  Page(const AttentionArgs& a, int64_t seq, int64_t position, int64_t kv_head) {
    const int64_t id = a.block_tables[seq * a.pages_per_seq + position / a.page_size];
    const int64_t at = (id * a.kv_heads + kv_head) * a.page_size * a.head_dim;
    k = static_cast<T*>(a.k_pages) + at;
    v = static_cast<T*>(a.v_pages) + at;
  }
};

template <typename T>
void WriteToken(const AttentionArgs& a, int64_t seq, int64_t token) {
  const int64_t H = a.head_dim;
  const int64_t position = a.kv_lens[seq] - a.query_starts[seq + 1] + token;
  const float* cos = a.cos + token * a.rotary_half;
  const float* sin = a.sin + token * a.rotary_half;
  for (int64_t h = 0; h < a.heads; ++h) {
    float* q = a.q + token * a.q_stride + h * H;
    if (a.q_norm) RmsNormRow(q, a.q_norm, a.qk_norm_eps, H, q);
    Rotate(q, cos, sin, a.rotary_half);
    for (int64_t i = 0; i < H; ++i) q[i] *= a.scale;
  }
  const int64_t slot = position % a.page_size;
  for (int64_t h = 0; h < a.kv_heads; ++h) {
    float* k = a.k + token * a.kv_stride + h * H;
    if (a.k_norm) RmsNormRow(k, a.k_norm, a.qk_norm_eps, H, k);
    Rotate(k, cos, sin, a.rotary_half);
    const Page<T> page(a, seq, position, h);
    T* to_k = page.k + slot / kLanes * kLanes * H + slot % kLanes;
    for (int64_t i = 0; i < H; ++i) to_k[i * kLanes] = Narrow<T>(k[i]);
    const float* v = a.v + token * a.kv_stride + h * H;
    T* to_v = page.v + slot * H;
    for (int64_t i = 0; i < H; ++i) to_v[i] = Narrow<T>(v[i]);
  }
}

template <typename T, int kRows>
void AttendRows(const AttentionArgs& a, int64_t seq, int64_t row, int64_t kv_head) {
  const int64_t H = a.head_dim, group = a.heads / a.kv_heads;
  const int64_t start = a.query_starts[seq];
  const int64_t first = a.kv_lens[seq] - (a.query_starts[seq + 1] - start);
  const float* q[kRows];
  float* out[kRows];
  int32_t position[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int64_t query = (row + r) / group, head = kv_head * group + (row + r) % group;
    q[r] = a.q + (start + query) * a.q_stride + head * H;
    out[r] = a.out + ((start + query) * a.heads + head) * H;
    position[r] = int32_t(first + query);
  }
  alignas(64) float acc[kRows][kMaxHeadDim];
  alignas(64) float weight[kRows][kKeys];
  float largest[kRows], total[kRows], shrink[kRows];
  for (int r = 0; r < kRows; ++r) {
    largest[r] = kMasked;
    total[r] = 0;
    for (int64_t i = 0; i < H; i += kLanes) Store(&acc[r][i], F32{});
  }
  const int64_t end = position[kRows - 1] + 1;
  int64_t begin = a.window ? position[0] - a.window + 1 : 0;
  begin = begin > 0 ? begin / kKeys * kKeys : 0;
  const I32 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t block = begin; block < end; block += kKeys) {
    const int64_t keys = end - block < kKeys ? end - block : kKeys;
    F32 best[kRows];
    for (int r = 0; r < kRows; ++r) best[r] = Splat(kMasked);
    for (int64_t at = 0; at < keys; at += kLanes) {
      const int64_t slot = (block + at) % a.page_size;
      const Page<T> page(a, seq, block + at, kv_head);
      const T* k = page.k + slot * H;
      // Pages lie anywhere: without this each would be waited for.
      const T* v = page.v + slot * H;
      const int64_t next = block + at + kLanes < end ? block + at + kLanes : block + at;
      const T* next_k = Page<T>(a, seq, next, kv_head).k + next % a.page_size * H;
      F32 score[kRows] = {};
      for (int64_t i = 0; i < H; ++i) {
        if (i * kLanes * sizeof(T) % 64 == 0) {
          Prefetch(v + i * kLanes);
          Prefetch(next_k + i * kLanes);
        }
        const F32 channel = LoadAsFloat(k + i * kLanes);
        for (int r = 0; r < kRows; ++r) score[r] = MulAdd(channel, Splat(q[r][i]), score[r]);
      }
      const I32 key = lanes + int32_t(block + at);
      for (int r = 0; r < kRows; ++r) {
        if (a.softcap > 0) score[r] = Tanh(score[r] / a.softcap) * a.softcap;
        I32 seen = key <= position[r];
        if (a.window) seen &= key > int32_t(position[r] - a.window);
        score[r] = seen ? score[r] : Splat(kMasked);
        best[r] = Max(best[r], score[r]);
        Store(&weight[r][at], score[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const float block_best = MaxOf(best[r]);
      const float now = block_best > largest[r] ? block_best : largest[r];
      shrink[r] = Exp(Splat(largest[r] - now))[0];
      largest[r] = now;
      F32 sum{};
      for (int64_t at = 0; at < keys; at += kLanes) {
        const F32 s = Load<F32>(&weight[r][at]);
        const F32 p = s == Splat(kMasked) ? F32{} : Exp(s - now);
        sum += p;
        Store(&weight[r][at], p);
      }
      total[r] = total[r] * shrink[r] + Sum(sum);
    }
    for (int64_t i = 0; i < H; i += kLanes) {
      F32 value[kRows];
      for (int r = 0; r < kRows; ++r) value[r] = Load<F32>(&acc[r][i]) * shrink[r];
      for (int64_t at = 0; at < keys; at += kLanes) {
        const int64_t slot = (block + at) % a.page_size;
        const T* v = Page<T>(a, seq, block + at, kv_head).v + slot * H + i;
        const int64_t count = keys - at < kLanes ? keys - at : kLanes;
        for (int64_t t = 0; t < count; ++t) {
          const F32 channel = LoadAsFloat(v + t * H);
          for (int r = 0; r < kRows; ++r)
            value[r] = MulAdd(channel, Splat(weight[r][at + t]), value[r]);
        }
      }
      for (int r = 0; r < kRows; ++r) Store(&acc[r][i], value[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const float inverse = 1.0f / (total[r] > 1e-30f ? total[r] : 1e-30f);
    for (int64_t i = 0; i < H; i += kLanes) Store(out[r] + i, Load<F32>(&acc[r][i]) * inverse);
  }
}

// As many rows at once as there are, up to kMaxRows: for each such number a function of its own.
template <typename T, int kRows>
void AttendUpTo(const AttentionArgs& a, int64_t seq, int64_t begin, int64_t end, int64_t kv_head) {
  for (; end - begin >= kRows; begin += kRows) AttendRows<T, kRows>(a, seq, begin, kv_head);
  if constexpr (kRows > 1) {
    if (begin < end) AttendUpTo<T, kRows - 1>(a, seq, begin, end, kv_head);
  }
}

template <typename T>
void Attend(const AttentionArgs& a, int64_t seq, int64_t begin, int64_t end, int64_t kv_head) {
  AttendUpTo<T, kMaxRows>(a, seq, begin, end, kv_head);
}

}  // namespace
