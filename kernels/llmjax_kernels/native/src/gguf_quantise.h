// From float weights to GGUF's quantised blocks, sixteen blocks at a time: a lane is a block.
//
// The bytes are those of llama.cpp: quantize_row_*_ref of ggml-quants.c, and quantize_row_*_impl
// where there is an importance of each input.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "gguf_encode.h"
#include "gguf_search.h"
#include "half.h"

namespace {

// Sixteen blocks of `size` weights, and what became of them.
struct BlockLanes {
  int size;
  F32 x[256], importance[256];
  bool has_importance;
  F32 row_variance;  // mean square of the row that a block is of; with importance alone
  // Whole numbers as floats, and the scales of blocks before they are rounded to halves.
  F32 codes[256], scales[16], minima[16], d{}, dmin{};
};

LLMJAX_APART F32 AsHalf(F32 v) {
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = FromHalf(ToHalf(v[lane]));
  return v;
}

// Scaled inputs count by their importance, and by their own size beside the `variance` around.
LLMJAX_APART void Weigh(const BlockLanes& b, int from, int n, F32 variance, F32* weight) {
  for (int k = 0; k < n; ++k) {
    const F32 x = b.x[from + k];
    weight[k] = b.importance[from + k] * Sqrt(variance + x * x);
  }
}

// Q2_K, Q4_K, Q5_K: groups with scales and minima, which are themselves codes in a block.
struct AffineKind {
  int group;
  float scale_most;  // the greatest code of a scale
  AffineSearch plain, weighted;
  float variance_factor;
};

inline AffineKind AffineKindOf(GgufType type) {
  switch (type) {
    case GgufType::kQ2_K:
      return {16, 15, {3, -0.5f, 0.1f, 15, true}, {3, -0.9f, 0.05f, 36, false}, 1};
    case GgufType::kQ4_K:
      return {32, 63, {15, -1.0f, 0.1f, 20, false}, {15, -0.9f, 0.05f, 36, false}, 2};
    default:
      return {32, 63, {31, -0.5f, 0.1f, 15, false}, {31, -0.9f, 0.05f, 36, false}, 2};
  }
}

// Codes for values that are not negative, the greatest of which gets `most`; returns the scale.
inline F32 ScaleToGreatest(float most, F32* values, int n) {
  F32 greatest{};
  for (int j = 0; j < n; ++j) greatest = Max(values[j], greatest);
  const F32 inverse = greatest > 0.0f ? most / greatest : F32{};
  for (int j = 0; j < n; ++j) values[j] = Clamp(Round(inverse * values[j]), 0, most);
  return greatest / most;
}

LLMJAX_APART void QuantiseAffine(const AffineKind& kind, BlockLanes& b) {
  const int n = kind.group, groups = 256 / n;
  const F32 variance = kind.variance_factor * SumOfSquares(b.x, 256) / 256.0f;
  F32 weight[32], sums[16];
  for (int j = 0; j < groups; ++j) {
    const F32* x = b.x + n * j;
    if (b.has_importance) {
      Weigh(b, n * j, n, variance, weight);
    } else {
      const F32 rms = kind.plain.absolute ? F32{} : Sqrt(SumOfSquares(x, n) / float(n));
      for (int k = 0; k < n; ++k) weight[k] = rms + Abs(x[k]);
    }
    const AffineSearch& search = b.has_importance ? kind.weighted : kind.plain;
    const Affine found = SearchAffine(search, x, weight, n, b.codes + n * j);
    sums[j] = SumOf(weight, n);
    b.scales[j] = found.scale;
    b.minima[j] = -found.minimum;
  }
  if (b.has_importance) {
    F32 codes[2][16];
    b.d = SearchPositive(kind.scale_most, b.scales, sums, groups, codes[0]);
    b.dmin = SearchPositive(kind.scale_most, b.minima, sums, groups, codes[1]);
    std::copy(codes[0], codes[0] + groups, b.scales);
    std::copy(codes[1], codes[1] + groups, b.minima);
  } else {
    b.d = ScaleToGreatest(kind.scale_most, b.scales, groups);
    b.dmin = ScaleToGreatest(kind.scale_most, b.minima, groups);
  }
  // The nearest codes for scales and minima as they are stored.
  const F32 d = AsHalf(b.d), dmin = AsHalf(b.dmin);
  for (int j = 0; j < groups; ++j) {
    const F32 scale = d * b.scales[j], minimum = dmin * b.minima[j];
    for (int k = n * j; k < n * (j + 1); ++k) {
      const F32 code = Clamp(Round((b.x[k] + minimum) / scale), 0, kind.plain.most);
      b.codes[k] = scale != 0.0f ? code : b.codes[k];
    }
  }
}

// Q3_K and Q6_K: groups of 16 with scales alone, which are themselves codes in a block.
LLMJAX_APART void QuantiseSymmetric(GgufType type, BlockLanes& b) {
  const bool three = type == GgufType::kQ3_K;
  const float half = three ? 4 : 32, scale_half = three ? 32 : 128;
  const F32 variance = 2.0f * SumOfSquares(b.x, 256) / 256.0f;
  F32 weight[16], sums[16];
  for (int j = 0; j < 16; ++j) {
    const F32* x = b.x + 16 * j;
    F32* codes = b.codes + 16 * j;
    if (three && !b.has_importance) {
      b.scales[j] = DescendScale(half, x, 16, codes);
      continue;
    }
    if (three) Weigh(b, 16 * j, 16, variance, weight);
    else
      for (int k = 0; k < 16; ++k)
        weight[k] = b.has_importance ? b.importance[16 * j + k] : x[k] * x[k];
    b.scales[j] = SearchScale(half, x, weight, 16, codes);
    sums[j] = SumOf(weight, 16);
  }
  if (three && b.has_importance) {
    F32 codes[16];
    b.d = SearchScale(scale_half, b.scales, sums, 16, codes);
    for (int j = 0; j < 16; ++j) b.scales[j] = codes[j] - scale_half;
  } else {
    const Extreme most(b.scales, 16);
    const auto zero = three ? most.value == 0.0f : most.magnitude < kNothing;
    const F32 inverse = -scale_half / most.value;
    b.d = zero ? F32{} : 1.0f / inverse;
    for (int j = 0; j < 16; ++j) {
      const F32 code = Clamp(Round(inverse * b.scales[j]), -scale_half, scale_half - 1);
      // llama.cpp clears the bytes of a block of zeros: Q3_K's are then of -32, not 0.
      b.scales[j] = zero ? Splat(three ? -scale_half : 0.0f) : code;
    }
    if (!three)
      for (int k = 0; k < 256; ++k) b.codes[k] = zero ? F32{} : b.codes[k];
  }
  const F32 d = AsHalf(b.d);
  for (int j = 0; j < 16; ++j) {
    const F32 scale = d * b.scales[j];
    for (int k = 16 * j; k < 16 * (j + 1); ++k) {
      const F32 code = Clamp(Round(b.x[k] / scale), -half, half - 1) + half;
      b.codes[k] = scale != 0.0f ? code : b.codes[k];
    }
    if (three) b.scales[j] += scale_half;
  }
}

// IQ4_NL and IQ4_XS: codes stand for numbers of a table. A block has one scale, or codes of eight.
LLMJAX_APART void QuantiseIq4(BlockLanes& b) {
  const int groups = b.size / 32;
  const F32 variance = SumOfSquares(b.x, b.size) * (2.0f / float(b.size));
  F32 weight[32], scales[8];
  for (int j = 0; j < groups; ++j) {
    const F32* x = b.x + 32 * j;
    if (b.has_importance) Weigh(b, 32 * j, 32, variance, weight);
    else
      for (int k = 0; k < 32; ++k) weight[k] = x[k] * x[k];
    scales[j] = SearchIq4(x, weight, 32);
  }
  b.d = groups == 1 ? scales[0] : -Extreme(scales, groups).value / 32.0f;
  const F32 inverse_d = b.d != 0.0f ? 1.0f / b.d : F32{};
  for (int j = 0; j < groups; ++j) {
    F32 inverse = inverse_d;
    if (groups > 1) {
      const F32 code = Clamp(Round(inverse_d * scales[j]), -32, 31), scale = b.d * code;
      b.scales[j] = code + 32.0f;
      inverse = scale != 0.0f ? 1.0f / scale : F32{};
    }
    for (int k = 32 * j; k < 32 * (j + 1); ++k)
      b.codes[k] = NearestIq4(inverse * b.x[k], [](int code) { return code; });
  }
}

// To the nearest whole number that is not further from 0.
inline F32 Truncate(F32 v) { return ToFloat(__builtin_convertvector(v, I32)); }

// Q4_0 and Q5_0: a scale, 0 is code `half`.
LLMJAX_APART void QuantiseScaled(float half, BlockLanes& b) {
  if (b.has_importance) {
    F32 weight[32];
    Weigh(b, 0, 32, b.row_variance, weight);
    b.d = SearchScale(half, b.x, weight, 32, b.codes);
    return;
  }
  b.d = Extreme(b.x, 32).value / -half;
  const F32 inverse = b.d != 0.0f ? 1.0f / b.d : F32{};
  for (int k = 0; k < 32; ++k)
    b.codes[k] = Truncate(Clamp(b.x[k] * inverse + (half + 0.5f), 0, 2 * half - 1));
}

// Q4_1 and Q5_1: a scale and a minimum.
LLMJAX_APART void QuantiseShifted(float most, BlockLanes& b) {
  if (b.has_importance) {
    F32 weight[32];
    Weigh(b, 0, 32, b.row_variance, weight);
    const Affine found = SearchAffine({most, -0.9f, 0.05f, 36, false}, b.x, weight, 32, b.codes);
    b.d = found.scale;
    b.dmin = found.minimum;
    return;
  }
  F32 low = b.x[0], high = b.x[0];
  for (int k = 1; k < 32; ++k) {
    low = Min(b.x[k], low);
    high = Max(b.x[k], high);
  }
  b.d = (high - low) / most;
  b.dmin = low;
  const F32 inverse = b.d != 0.0f ? 1.0f / b.d : F32{};
  for (int k = 0; k < 32; ++k)
    b.codes[k] = Truncate(Clamp((b.x[k] - low) * inverse + 0.5f, 0, most));
}

// Q8_0: the greatest magnitude is 127 steps; halves are rounded away from 0.
LLMJAX_APART void QuantiseEight(BlockLanes& b) {
  b.d = Extreme(b.x, 32).magnitude / 127.0f;
  const F32 inverse = b.d != 0.0f ? 1.0f / b.d : F32{};
  for (int k = 0; k < 32; ++k) {
    const F32 steps = Clamp(b.x[k] * inverse, -127, 127), nearest = Round(steps);
    const F32 off = steps - nearest;
    const F32 up = (off == 0.5f) & (steps > 0.0f) ? Splat(1.0f) : F32{};
    const F32 down = (off == -0.5f) & (steps < 0.0f) ? Splat(1.0f) : F32{};
    b.codes[k] = nearest + up - down + 128.0f;
  }
}

inline void QuantiseLanes(GgufType type, BlockLanes& b) {
  switch (type) {
    case GgufType::kQ4_0: return QuantiseScaled(8, b);
    case GgufType::kQ5_0: return QuantiseScaled(16, b);
    case GgufType::kQ4_1: return QuantiseShifted(15, b);
    case GgufType::kQ5_1: return QuantiseShifted(31, b);
    case GgufType::kQ8_0: return QuantiseEight(b);
    case GgufType::kQ3_K:
    case GgufType::kQ6_K: return QuantiseSymmetric(type, b);
    case GgufType::kIQ4_NL:
    case GgufType::kIQ4_XS: return QuantiseIq4(b);
    default: return QuantiseAffine(AffineKindOf(type), b);
  }
}

// The mean square of a row, summed from its start.
inline float MeanSquare(const float* row, int64_t K) {
  float sum = 0;
  for (int64_t k = 0; k < K; ++k) sum += row[k] * row[k];
  return sum / float(K);
}

// Writes one block; false where its scales are too large for half floats.
LLMJAX_APART bool EncodeLane(GgufType type, const BlockLanes& b, int64_t lane, uint8_t* out) {
  const auto at = [&](const F32& v) { return reinterpret_cast<const float*>(&v)[lane]; };
  BlockParts parts;
  parts.d = ToHalf(at(b.d));
  parts.dmin = ToHalf(at(b.dmin));
  for (int k = 0; k < b.size; ++k) parts.codes[k] = uint8_t(int(at(b.codes[k])));
  for (int j = 0; j < 16; ++j) {
    parts.scales[j] = uint8_t(int(at(b.scales[j])));
    parts.minima[j] = uint8_t(int(at(b.minima[j])));
  }
  EncodeBlock(type, parts, out);
  return (parts.d & 0x7c00) != 0x7c00 && (parts.dmin & 0x7c00) != 0x7c00;
}

// Blocks of rows [N, K]; importance is [K] or null. False where a scale is too large for a half.
bool QuantiseGguf(GgufType type, const float* rows, int64_t N, int64_t K, const float* importance,
                  uint8_t* out) {
  const int64_t size = BlockWeights(type), bytes = BlockBytes(type), count = N * K / size;
  std::vector<float> row_variance(importance ? N : 0);
  for (size_t n = 0; n < row_variance.size(); ++n)
    row_variance[n] = MeanSquare(rows + int64_t(n) * K, K);
  static thread_local BlockLanes b;
  static thread_local float values[256][kLanes], counts[256][kLanes];
  b.size = int(size);
  b.has_importance = importance != nullptr;
  b.d = b.dmin = F32{};  // what a type does not set is not what another one left
  std::fill(b.scales, b.scales + 16, F32{});
  std::fill(b.minima, b.minima + 16, F32{});
  bool finite = true;
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - first);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t at = (first + lane) * size;
      for (int64_t k = 0; k < size; ++k) values[k][lane] = rows[at + k];
      if (!importance) continue;
      b.row_variance[lane] = row_variance[at / K];
      for (int64_t k = 0; k < size; ++k) counts[k][lane] = importance[at % K + k];
    }
    std::memcpy(b.x, values, size_t(size) * sizeof(F32));
    std::memcpy(b.importance, counts, size_t(size) * sizeof(F32));
    QuantiseLanes(type, b);
    for (int64_t lane = 0; lane < lanes; ++lane)
      finite &= EncodeLane(type, b, lane, out + (first + lane) * bytes);
  }
  return finite;
}

}  // namespace
