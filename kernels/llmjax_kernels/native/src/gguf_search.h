// Scales and minima for groups of weights, searched for as llama.cpp does; a lane is a group.
//
// Float operations keep the order that they have there, none is fused, and so a file gets the very
// bytes that llama.cpp writes. Codes are whole numbers in floats until they are packed.
// Source: ggml-quants.c of https://github.com/ggml-org/llama.cpp; each function names its own.
#pragma once

#include <cmath>

#include "format.h"
#include "rows.h"
#include "simd.h"

namespace {

// By itself: to inline all of these into all that call them takes compilers minutes.
#define LLMJAX_APART __attribute__((noinline))

constexpr float kNothing = 1e-15f;  // groups of smaller magnitudes are taken for zeros

inline I32 Everywhere() { return I32{} - 1; }

inline F32 Clamp(F32 v, float least, float most) {
  return Min(Max(v, Splat(least)), Splat(most));
}

inline F32 Abs(F32 v) { return Max(v, -v); }

inline F32 Sqrt(F32 v) {
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = std::sqrt(v[lane]);
  return v;
}

inline F32 SumOf(const F32* x, int n) {
  F32 sum{};
  for (int k = 0; k < n; ++k) sum += x[k];
  return sum;
}

inline F32 SumOfSquares(const F32* x, int n) {
  F32 sum{};
  for (int k = 0; k < n; ++k) sum += x[k] * x[k];
  return sum;
}

// A group's value of greatest magnitude, the first of those.
struct Extreme {
  F32 value{}, magnitude{};

  Extreme(const F32* x, int n) {
    for (int k = 0; k < n; ++k) {
      const F32 a = Abs(x[k]);
      value = a > magnitude ? x[k] : value;
      magnitude = Max(a, magnitude);
    }
  }
};

// Codes with a scale and a minimum: x is about code * scale + minimum.
struct Affine {
  F32 scale, minimum;
};

// Weighted sums over a group: of codes, of their squares, of their products with x.
struct CodeSums {
  F32 c{}, cc{}, cx{};

  void Add(F32 x, F32 weight, F32 code) {
    const F32 weighted = weight * code;
    c += weighted;
    cc += weighted * code;
    cx += weighted * x;
  }
  F32 Determinant(F32 sum_w) const { return sum_w * cc - c * c; }
  // The scale and the minimum of least squared error for these codes.
  Affine Best(F32 sum_w, F32 sum_wx, F32 determinant) const {
    return {(sum_w * cx - sum_wx * c) / determinant, (cc * sum_wx - c * cx) / determinant};
  }
};

struct AffineSearch {
  float most;         // the greatest code
  float first, step;  // candidates put most + first, most + first + step, ... steps to the range
  int last;           // of the candidates, which count from 0
  bool absolute;      // the error is of magnitudes, not of squares
};

// The scale and the minimum, not above 0, of the candidate of least error. make_qkx2_quants,
// make_qkx3_quants.
LLMJAX_APART Affine SearchAffine(const AffineSearch& s, const F32* x, const F32* weight, int n,
                           F32* codes) {
  F32 low = x[0], high = x[0], sum_w = weight[0], sum_wx = weight[0] * x[0];
  for (int k = 1; k < n; ++k) {
    low = Min(x[k], low);
    high = Max(x[k], high);
    sum_w += weight[k];
    sum_wx += weight[k] * x[k];
  }
  low = low > 0.0f ? F32{} : low;
  const auto code_of = [&](F32 v, F32 from, F32 inverse) {
    return Clamp(Round(inverse * (v - from)), 0, s.most);
  };
  const auto error_of = [&](const F32* tried, const Affine& a) {
    F32 error{};
    for (int k = 0; k < n; ++k) {
      const F32 off = a.scale * tried[k] + a.minimum - x[k];
      error += weight[k] * (s.absolute ? Abs(off) : off * off);
    }
    return error;
  };
  F32 inverse = s.most / (high - low), from = low;  // of the best codes
  Affine best{1.0f / inverse, low};
  const auto flat = high <= low;
  F32 tried[32];
  for (int k = 0; k < n; ++k) tried[k] = code_of(x[k], low, inverse);
  F32 least = error_of(tried, best);
  for (int candidate = 0; candidate <= s.last; ++candidate) {
    // What was found so far is where the next one begins.
    const F32 at = best.minimum;
    const F32 steps = (s.first + s.step * float(candidate) + s.most) / (high - at);
    CodeSums sums;
    for (int k = 0; k < n; ++k) sums.Add(x[k], weight[k], tried[k] = code_of(x[k], at, steps));
    const F32 determinant = sums.Determinant(sum_w);
    Affine found = sums.Best(sum_w, sum_wx, determinant);
    const auto above = found.minimum > 0.0f;
    found.scale = above ? sums.cx / sums.cc : found.scale;
    found.minimum = above ? F32{} : found.minimum;
    const F32 error = error_of(tried, found);
    const auto better = (determinant > 0.0f) & (error < least);
    least = better ? error : least;
    inverse = better ? steps : inverse;
    from = better ? at : from;
    best.scale = better ? found.scale : best.scale;
    best.minimum = better ? found.minimum : best.minimum;
  }
  for (int k = 0; k < n; ++k) codes[k] = flat ? F32{} : code_of(x[k], from, inverse);
  return {flat ? F32{} : best.scale, flat ? low : best.minimum};
}

// A scale alone: x is about (code - half) * scale, codes are below 2 * half. make_qx_quants.
LLMJAX_APART F32 SearchScale(float half, const F32* x, const F32* weight, int n, F32* codes) {
  const Extreme most(x, n);
  const auto code_of = [&](F32 v, F32 inverse) {
    return Clamp(Round(inverse * v), -half, half - 1);
  };
  F32 inverse{}, scale{}, best{};
  for (int candidate = -10; candidate <= 9; ++candidate) {
    if (candidate == 0) continue;
    // The first of them is the middle one.
    const int off = candidate == -10 ? 0 : candidate;
    const F32 steps = -(half + 0.1f * float(off)) / most.value;
    CodeSums sums;
    for (int k = 0; k < n; ++k) {
      const F32 code = code_of(x[k], steps);
      sums.cx += weight[k] * x[k] * code;
      sums.cc += weight[k] * code * code;
    }
    const F32 found = sums.cc != 0.0f ? sums.cx / sums.cc : F32{};
    const I32 better = off == 0 ? Everywhere()
                                : (sums.cc > 0.0f) & (sums.cx * sums.cx > best * sums.cc);
    inverse = better ? steps : inverse;
    scale = better ? found : scale;
    best = better ? found * sums.cx : best;
  }
  const auto zero = most.magnitude < kNothing;
  for (int k = 0; k < n; ++k) codes[k] = zero ? F32{} : code_of(x[k], inverse) + half;
  return zero ? F32{} : scale;
}

// Likewise, but codes move one by one while the error falls; weights are squares. make_q3_quants.
LLMJAX_APART F32 DescendScale(float half, const F32* x, int n, F32* codes) {
  const Extreme most(x, n);
  const F32 inverse = -half / most.value;
  F32 cx{}, cc{};
  for (int k = 0; k < n; ++k) {
    const F32 code = Clamp(Round(inverse * x[k]), -half, half - 1), weight = x[k] * x[k];
    codes[k] = code;
    cx += weight * x[k] * code;
    cc += weight * code * code;
  }
  for (int round = 0; round < 5; ++round) {
    I32 changed{};
    for (int k = 0; k < n; ++k) {
      const F32 weight = x[k] * x[k];
      const F32 rest = cx - weight * x[k] * codes[k], squares = cc - weight * codes[k] * codes[k];
      const F32 code = Clamp(Round(x[k] * squares / rest), -half, half - 1);
      const F32 new_cx = rest + weight * x[k] * code, new_cc = squares + weight * code * code;
      const auto better = (rest > 0.0f) & (code != codes[k]) & (new_cc > 0.0f) &
                          (new_cx * new_cx * cc > cx * cx * new_cc);
      codes[k] = better ? code : codes[k];
      cx = better ? new_cx : cx;
      cc = better ? new_cc : cc;
      changed |= better;
    }
    if (Sum(changed) == 0) break;
  }
  const auto zero = most.magnitude < kNothing;
  for (int k = 0; k < n; ++k) codes[k] = zero ? F32{} : codes[k] + half;
  return zero || cc <= 0.0f ? F32{} : cx / cc;
}

// A scale for values that are not negative: x is about code * scale. make_qp_quants.
LLMJAX_APART F32 SearchPositive(float most, const F32* x, const F32* weight, int n, F32* codes) {
  F32 greatest{};
  for (int k = 0; k < n; ++k) greatest = Max(greatest, x[k]);
  const auto code_of = [&](F32 v) { return Clamp(Round(v), 0, most); };
  F32 inverse{}, least{};
  for (int candidate = -5; candidate <= 4; ++candidate) {
    if (candidate == 0) continue;
    const int off = candidate == -5 ? 0 : candidate;  // the first of them is the middle one
    const F32 steps = (0.1f * float(off) + most) / greatest, scale = 1.0f / steps;
    F32 error{};
    for (int k = 0; k < n; ++k) {
      const F32 diff = x[k] - scale * code_of(steps * x[k]);
      error += weight[k] * diff * diff;
    }
    const I32 better = off == 0 ? Everywhere() : error < least;
    inverse = better ? steps : inverse;
    least = better ? error : least;
  }
  F32 cx{}, cc{};
  for (int k = 0; k < n; ++k) {
    codes[k] = code_of(inverse * x[k]);
    cx += weight[k] * x[k] * codes[k];
    cc += weight[k] * codes[k] * codes[k];
  }
  for (int round = 0; round < 5; ++round) {
    I32 changed{};
    for (int k = 0; k < n; ++k) {
      const F32 w = weight[k];
      const F32 rest = cx - w * x[k] * codes[k], squares = cc - w * codes[k] * codes[k];
      const F32 code = code_of(x[k] * squares / rest);
      const F32 new_cx = rest + w * x[k] * code, new_cc = squares + w * code * code;
      const auto better = (rest > 0.0f) & (squares > 0.0f) & (code != codes[k]) &
                          (new_cx * new_cx * cc > cx * cx * new_cc);
      codes[k] = better ? code : codes[k];
      cx = better ? new_cx : cx;
      cc = better ? new_cc : cc;
      changed |= better;
    }
    if (Sum(changed) == 0) break;
  }
  const auto zero = greatest < kNothing;
  for (int k = 0; k < n; ++k) codes[k] = zero ? F32{} : codes[k];
  return zero || cc <= 0.0f ? F32{} : cx / cc;
}

constexpr float Iq4Value(int code) { return float(kTables[kIq4][code]) - 128; }

// Of the code whose number is nearest to x, what `of` says. In the middle between two numbers the
// differences to both are exact.
template <typename Of>
inline F32 NearestIq4(F32 x, const Of& of) {
  F32 found = Splat(float(of(0)));
  for (int i = 1; i < 16; ++i)
    found = x >= 0.5f * (Iq4Value(i - 1) + Iq4Value(i)) ? Splat(float(of(i))) : found;
  return found;
}

// A scale for those numbers: x is about number * scale. quantize_row_iq4_nl_impl.
LLMJAX_APART F32 SearchIq4(const F32* x, const F32* weight, int n) {
  const Extreme most(x, n);
  F32 scale{}, best{};
  for (int candidate = -8; candidate <= 7; ++candidate) {
    const bool first = candidate == -8;
    const F32 inverse = first ? 1.0f / (-most.value / Iq4Value(0))
                              : (float(candidate) + Iq4Value(0)) / most.value;
    F32 sum_qx{}, sum_qq{};
    for (int k = 0; k < n; ++k) {
      const F32 q = NearestIq4(inverse * x[k], Iq4Value), weighted = weight[k] * q;
      sum_qx += weighted * x[k];
      sum_qq += weighted * q;
    }
    const I32 some = sum_qq > 0.0f;
    const I32 better = first ? Everywhere() : some & (sum_qx * sum_qx > best * sum_qq);
    const F32 found = some ? sum_qx / sum_qq : F32{};
    scale = better ? found : scale;
    best = better ? found * sum_qx : best;
  }
  return most.magnitude < kNothing ? F32{} : scale;
}

}  // namespace
