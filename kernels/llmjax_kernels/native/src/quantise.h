// From float weights to codes in groups of 32, for a tile's 16 rows at once: a lane is a row.
#pragma once

#include "gguf_search.h"
#include "half.h"
#include "kernels.h"
#include "simd.h"

namespace {

constexpr int kGroupSize = 32;

// Rounds to half floats as they are stored.
inline F32 StoreHalves(uint8_t* to, F32 v) {
  uint16_t halves[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) halves[lane] = ToHalf(v[lane]);
  std::memcpy(to, halves, sizeof(halves));
  return FromF16(Load<U16>(halves));
}

// The code of each value for a scale that is 0 where all are the same.
inline U32 CodesOf(F32 offset, F32 scale, float least, float most) {
  const F32 steps = Clamp(scale > 0.0f ? offset / scale : F32{}, least, most);
  return (U32)__builtin_convertvector(Round(steps), I32);
}

// 8 bits around `zero`, the greatest magnitude 127 steps.
inline void QuantiseBytes(const F32* x, uint8_t zero, uint8_t* codes, uint8_t* scales) {
  F32 greatest{};
  for (int k = 0; k < kGroupSize; ++k) greatest = Max(greatest, Abs(x[k]));
  F32 scale = StoreHalves(scales, greatest / 127.0f);
  // A subnormal half may be so much smaller that the greatest would not fit: the next one then.
  scale = StoreHalves(scales, scale * 127.5f < greatest ? scale + 0x1p-24f : scale);
  for (int i = 0; i < kGroupSize / 4; ++i) {
    U32 word{};
    for (int j = 0; j < 4; ++j)
      word |= ((CodesOf(x[4 * i + j], scale, -127, 127) + zero) & 255) << 8 * j;
    Store(codes + 64 * i, word);
  }
}

// 4 bits with a minimum. Candidates for the scale put 14 to 16 steps to the range; each gets the
// scale and the minimum that are best for its codes, and the one of least squared error stays,
// where values far from zero count for more.
// Source: quantize_row_q4_K_ref and make_qkx2_quants of llama.cpp (ggml-quants.c).
inline void QuantiseNibbles(const F32* x, uint8_t* codes, uint8_t* scales, uint8_t* minima) {
  F32 low = x[0], high = x[0];
  for (int k = 0; k < kGroupSize; ++k) {
    low = Min(low, x[k]);
    high = Max(high, x[k]);
  }
  const F32 rms = Sqrt(SumOfSquares(x, kGroupSize) / float(kGroupSize));
  F32 y[kGroupSize], weight[kGroupSize], sum_w{}, sum_wy{};
  for (int k = 0; k < kGroupSize; ++k) {
    y[k] = x[k] - low;
    weight[k] = rms + Abs(x[k]);
    sum_w += weight[k];
    sum_wy = MulAdd(weight[k], y[k], sum_wy);
  }
  const F32 range = high - low;
  F32 best{}, scale{}, minimum{};
  for (int candidate = 0; candidate <= 20; ++candidate) {
    const F32 inverse = range > 1e-30f ? (14.0f + 0.1f * float(candidate)) / range : F32{};
    CodeSums sums;
    for (int k = 0; k < kGroupSize; ++k)
      sums.Add(y[k], weight[k], Round(Min(y[k] * inverse, Splat(15.0f))));
    const F32 determinant = sums.Determinant(sum_w);
    const Affine a = sums.Best(sum_w, sum_wy, determinant > 0.0f ? determinant : Splat(1.0f));
    // By so much the error is less than that of 0: told without going over the codes again.
    const F32 gain = a.scale * sums.cx + a.minimum * sum_wy;
    const auto better = gain > best;
    best = better ? gain : best;
    scale = better ? a.scale : scale;
    minimum = better ? a.minimum : minimum;
  }
  scale = StoreHalves(scales, scale);
  minimum = StoreHalves(minima, minimum + low);
  for (int i = 0; i < kGroupSize / 8; ++i) {
    U32 word{};
    for (int j = 0; j < 8; ++j)
      word |= CodesOf(x[8 * i + j] - minimum, scale, 0, 15) << (8 * (j % 4) + 4 * (j / 4));
    Store(codes + 64 * i, word);
  }
}

void QuantiseTile(const float* rows, int64_t count, int64_t K, Format f, uint8_t* tile) {
  uint8_t* codes = tile;
  uint8_t* scales = tile + f.code_bytes(K);
  uint8_t* minima = scales + f.scale_bytes(K);
  float values[kGroupSize][kLanes] = {};  // rows that fill the tile up stay zero
  F32 x[kGroupSize];
  for (int64_t group = 0; group < K / kGroupSize; ++group) {
    for (int64_t lane = 0; lane < count; ++lane)
      for (int k = 0; k < kGroupSize; ++k) values[k][lane] = rows[lane * K + group * kGroupSize + k];
    for (int k = 0; k < kGroupSize; ++k) x[k] = Load<F32>(values[k]);
    if (f.minima()) QuantiseNibbles(x, codes, scales, minima);
    else QuantiseBytes(x, f.zero, codes, scales);
    codes += kGroupSize * kLanes * f.bits / 8;
    scales += 2 * kLanes;
    minima += 2 * kLanes;
  }
}

}  // namespace
