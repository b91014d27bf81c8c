// Activations, row by row: norms, and the 8-bit form in which quantised weights take them.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "simd.h"

namespace {

inline F32 Round(F32 x) {
  const F32 shifter = Splat(12582912.0f);  // |x| < 2^22: to the nearest integer, ties to even
  return (x + shifter) - shifter;
}

// y = x / rms(x) * weight; weight is optional.
inline void RmsNormRow(const float* x, const float* weight, float eps, int64_t n, float* y) {
  F32 squares{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F32 v = Load<F32>(x + i);
    squares = MulAdd(v, v, squares);
  }
  float sum = Sum(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(sum / float(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    F32 v = Load<F32>(x + i) * factor;
    if (weight) v *= Load<F32>(weight + i);
    Store(y + i, v);
  }
  for (; i < n; ++i) y[i] = x[i] * factor * (weight ? weight[i] : 1.0f);
}

// Quantises a row to 8 bits in groups of 32; K is a multiple of 32. `order`, where there is one,
// says which value comes where.
inline void QuantizeRow(const float* x, const int32_t* order, int64_t K, int64_t row,
                        const Activations& out) {
  typedef int8_t I8 __attribute__((vector_size(kLanes)));
  const int64_t groups = K / 32;
  const auto load = [&](int64_t k) { return order ? Gather(x, order + k) : Load<F32>(x + k); };
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = Activations::At(row, groups, g);
    const F32 low = load(32 * g), high = load(32 * g + kLanes);
    const float largest = MaxOf(Max(Max(low, -low), Max(high, -high)));
    float scale = largest / 127.0f;
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;  // finite
    float sums[2];
    for (int half = 0; half < 2; ++half) {
      F32 rounded = Round((half ? high : low) * inverse);
      if (!AllWithin(rounded, 127.0f)) {
        scale = NAN;  // what is not finite makes the whole row so
        rounded = F32{};
      }
      const I32 integers = __builtin_convertvector(rounded, I32);
      sums[half] = float(Sum(integers));
      Store(out.codes + 32 * at + half * kLanes, __builtin_convertvector(integers, I8));
    }
    out.scales[at] = scale;
    out.sums[at] = sums[0] + sums[1];
    const int64_t half_at = Activations::At(row, 2 * groups, 2 * g);
    out.half_sums[half_at] = sums[0];
    out.half_sums[half_at + Activations::kRows] = sums[1];
  }
}

}  // namespace
