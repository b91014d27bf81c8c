// Paged attention: an online softmax over blocks of 64 keys at fixed positions, begun anew
// every 512 keys; the parts are merged in order, and threads may share a long context by them.
//
// A row (one query of one head) goes through the same operations in the same order whether it
// is computed alone, with other heads, or in a tile of a prompt: a block that a row does not
// see changes nothing, bit for bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "kv.h"
#include "rows.h"
#include "simd.h"

namespace {

constexpr int kKeys = 64;  // of one block
constexpr int64_t kSegment = 512;
constexpr int kMaxHeadDim = 512;
constexpr float kMasked = -1e30f;

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
  const int64_t lane = position % kLanes;
  for (int64_t h = 0; h < a.kv_heads; ++h) {
    float* k = a.k + token * a.kv_stride + h * H;
    if (a.k_norm) RmsNormRow(k, a.k_norm, a.qk_norm_eps, H, k);
    Rotate(k, cos, sin, a.rotary_half);
    const KvBlock<T> block(a, seq, position, h);
    KvStoreRow(k, H, block.k + lane, kLanes, block.k_scale + lane);
    const float* v = a.v + token * a.kv_stride + h * H;
    KvStoreRow(v, H, block.v + lane * H, 1, block.v_scale + lane);
  }
}

// What a row has seen of some keys: its greatest score, the sum of weights relative to that,
// and the weighted sum of values.
struct Softmax {
  float largest = kMasked, total = 0;
  alignas(64) float acc[kMaxHeadDim];

  void Clear(int64_t H) {
    largest = kMasked;
    total = 0;
    for (int64_t i = 0; i < H; i += kLanes) Store(acc + i, F32{});
  }

  // Adds later keys. Exact, bit for bit, where one of the two has seen nothing.
  void Merge(float other_largest, float other_total, const float* other_acc, int64_t H) {
    const float now = other_largest > largest ? other_largest : largest;
    const float mine = Exp(Splat(largest - now))[0], theirs = Exp(Splat(other_largest - now))[0];
    largest = now;
    total = total * mine + other_total * theirs;
    for (int64_t i = 0; i < H; i += kLanes)
      Store(acc + i, MulAdd(Load<F32>(other_acc + i), Splat(theirs), Load<F32>(acc + i) * mine));
  }

  void Write(float* out, int64_t H) const {
    const float inverse = 1.0f / (total > 1e-30f ? total : 1e-30f);
    for (int64_t i = 0; i < H; i += kLanes) Store(out + i, Load<F32>(acc + i) * inverse);
  }
};

// Where the queries of a run of rows are, and which keys they see at most.
template <int kRows>
struct QueryRows {
  const float* q[kRows];
  float* out[kRows];
  int32_t position[kRows];
  int64_t begin, end;

  QueryRows(const AttentionArgs& a, int64_t seq, int64_t row, int64_t kv_head) {
    const int64_t H = a.head_dim, group = a.heads / a.kv_heads;
    const int64_t start = a.query_starts[seq];
    const int64_t first = a.kv_lens[seq] - (a.query_starts[seq + 1] - start);
    for (int r = 0; r < kRows; ++r) {
      const int64_t query = (row + r) / group, head = kv_head * group + (row + r) % group;
      q[r] = a.q + (start + query) * a.q_stride + head * H;
      out[r] = a.out + ((start + query) * a.heads + head) * H;
      position[r] = int32_t(first + query);
    }
    end = position[kRows - 1] + 1;
    begin = a.window ? position[0] - a.window + 1 : 0;
    begin = begin > 0 ? begin / kKeys * kKeys : 0;
  }
};

// Keys [begin, end), which lie in one segment.
template <typename T, int kRows>
void AttendKeys(const AttentionArgs& a, int64_t seq, const QueryRows<kRows>& rows, int64_t kv_head,
                int64_t begin, int64_t end, Softmax* state) {
  const int64_t H = a.head_dim;
  alignas(64) float weight[kRows][kKeys];
  float shrink[kRows];
  const auto& q = rows.q;
  const auto& position = rows.position;
  for (int r = 0; r < kRows; ++r) state[r].Clear(H);
  const I32 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t block = begin; block < end; block += kKeys) {
    const int64_t keys = end - block < kKeys ? end - block : kKeys;
    F32 best[kRows];
    for (int r = 0; r < kRows; ++r) best[r] = Splat(kMasked);
    for (int64_t at = 0; at < keys; at += kLanes) {
      const KvBlock<T> here(a, seq, block + at, kv_head);
      // Pages lie anywhere: without this each would be waited for.
      const int64_t next = block + at + kLanes < end ? block + at + kLanes : block + at;
      const T* next_k = KvBlock<T>(a, seq, next, kv_head).k;
      F32 score[kRows] = {};
      for (int64_t i = 0; i < H; ++i) {
        if (i * kLanes * sizeof(T) % 64 == 0) {
          Prefetch(here.v + i * kLanes);
          Prefetch(next_k + i * kLanes);
        }
        const F32 channel = KvLoad(here.k + i * kLanes);
        for (int r = 0; r < kRows; ++r) score[r] = MulAdd(channel, Splat(q[r][i]), score[r]);
      }
      const I32 key = lanes + int32_t(block + at);
      for (int r = 0; r < kRows; ++r) {
        if constexpr (Kv<T>::kScaled) score[r] *= Load<F32>(here.k_scale);
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
      const float now = block_best > state[r].largest ? block_best : state[r].largest;
      shrink[r] = Exp(Splat(state[r].largest - now))[0];
      state[r].largest = now;
      F32 sum{};
      for (int64_t at = 0; at < keys; at += kLanes) {
        const F32 s = Load<F32>(&weight[r][at]);
        const F32 p = s == Splat(kMasked) ? F32{} : Exp(s - now);
        sum += p;
        Store(&weight[r][at], p);
      }
      state[r].total = state[r].total * shrink[r] + Sum(sum);
    }
    if constexpr (Kv<T>::kScaled) {
      // Of lanes behind the last key, which weigh nothing, the scale may be anything.
      for (int64_t at = 0; at < keys; at += kLanes) {
        const F32 scale = Load<F32>(KvBlock<T>(a, seq, block + at, kv_head).v_scale);
        for (int r = 0; r < kRows; ++r) {
          const F32 p = Load<F32>(&weight[r][at]);
          Store(&weight[r][at], p == F32{} ? F32{} : p * scale);
        }
      }
    }
    for (int64_t i = 0; i < H; i += kLanes) {
      F32 value[kRows];
      for (int r = 0; r < kRows; ++r) value[r] = Load<F32>(state[r].acc + i) * shrink[r];
      for (int64_t at = 0; at < keys; at += kLanes) {
        const T* v = KvBlock<T>(a, seq, block + at, kv_head).v + i;
        const int64_t count = keys - at < kLanes ? keys - at : kLanes;
        for (int64_t t = 0; t < count; ++t) {
          const F32 channel = KvLoad(v + t * H);
          for (int r = 0; r < kRows; ++r)
            value[r] = MulAdd(channel, Splat(weight[r][at + t]), value[r]);
        }
      }
      for (int r = 0; r < kRows; ++r) Store(state[r].acc + i, value[r]);
    }
  }
}

// All that rows see, or their part of one segment (`part` not null) as [rows, 2 + H] floats.
template <typename T, int kRows>
void AttendRows(const AttentionArgs& a, int64_t seq, int64_t row, int64_t kv_head, int64_t segment,
                float* part) {
  const int64_t H = a.head_dim;
  const QueryRows<kRows> rows(a, seq, row, kv_head);
  Softmax state[kRows], all[kRows];
  const auto attend = [&](int64_t s) {
    const int64_t begin = s * kSegment > rows.begin ? s * kSegment : rows.begin;
    const int64_t end = (s + 1) * kSegment < rows.end ? (s + 1) * kSegment : rows.end;
    AttendKeys<T, kRows>(a, seq, rows, kv_head, begin, end, state);
  };
  if (part) {
    attend(segment);
    for (int r = 0; r < kRows; ++r, part += 2 + H) {
      part[0] = state[r].largest;
      part[1] = state[r].total;
      std::memcpy(part + 2, state[r].acc, H * sizeof(float));
    }
    return;
  }
  for (int r = 0; r < kRows; ++r) all[r].Clear(H);
  for (int64_t s = rows.begin / kSegment; s * kSegment < rows.end; ++s) {
    attend(s);
    for (int r = 0; r < kRows; ++r) all[r].Merge(state[r].largest, state[r].total, state[r].acc, H);
  }
  for (int r = 0; r < kRows; ++r) all[r].Write(rows.out[r], H);
}

// Puts the parts [segments, rows, 2 + H] of rows [begin, end) together.
void MergeParts(const AttentionArgs& a, int64_t seq, int64_t begin, int64_t end, int64_t kv_head,
                const float* parts, int64_t segments) {
  const int64_t H = a.head_dim, rows = end - begin;
  Softmax all;
  for (int64_t row = begin; row < end; ++row) {
    all.Clear(H);
    for (int64_t s = 0; s < segments; ++s) {
      const float* part = parts + (s * rows + row - begin) * (2 + H);
      all.Merge(part[0], part[1], part + 2, H);
    }
    all.Write(QueryRows<1>(a, seq, row, kv_head).out[0], H);
  }
}

// As many rows at once as there are, up to kMaxRows: for each such number a function of its own.
template <typename T, int kRows>
void AttendUpTo(const AttentionArgs& a, int64_t seq, int64_t begin, int64_t end, int64_t kv_head,
                int64_t segment, float* part) {
  for (; end - begin >= kRows; begin += kRows) {
    AttendRows<T, kRows>(a, seq, begin, kv_head, segment, part);
    if (part) part += kRows * (2 + a.head_dim);
  }
  if constexpr (kRows > 1) {
    if (begin < end) AttendUpTo<T, kRows - 1>(a, seq, begin, end, kv_head, segment, part);
  }
}

}  // namespace
