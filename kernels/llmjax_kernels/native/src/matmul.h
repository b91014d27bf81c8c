// Rows of activations times one tile of 16 weight rows. A row's sums run over k in order,
// whatever the number of rows computed together: a result never depends on the batch.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

template <int kBits>
inline U8 Codes(const uint8_t* block, int i) {
  if constexpr (kBits == 8) {
    return Load<U8>(block + 64 * i);
  } else {
    const U16x32 packed = Load<U16x32>(block + 64 * (i / 2));
    const U8 low = (U8)(i % 2 ? packed >> 4 : packed) & (uint8_t)15;
    if constexpr (kBits == 4) return low;
    if constexpr (kBits == 5) {
      const U16x32 upper = Load<U16x32>(block + 256);
      return low | ((U8)(i < 4 ? upper << (4 - i) : upper >> (i - 4)) & (uint8_t)0x10);
    }
    if constexpr (kBits == 6) {
      const U16x32 upper = Load<U16x32>(block + 256 + 64 * (i / 4));
      const int shift = 2 * (i % 4);
      return low | ((U8)(shift < 4 ? upper << (4 - shift) : upper >> (shift - 4)) & (uint8_t)0x30);
    }
  }
}

template <int kBits, int kGroup, bool kMinima, bool kTable, int kRows>
void QuantisedTile(const Weight& w, int64_t tile, const Activations& a, int64_t row, F32* out) {
  constexpr int kBlock = 64 * kBits;  // bytes of 32 k
  constexpr int kHalves = 32 / kGroup;
  constexpr int kAhead = 16384;  // bytes: memory answers in about the time these take
  const int64_t K = w.K, blocks = K / 32;
  const uint8_t* codes = w.tile(tile);
  const uint8_t* scales = codes + w.format.code_bytes(K);
  const uint8_t* minima = scales + w.format.scale_bytes(K);
  const float zero = -float(w.format.zero);
  const uint8_t* table = kTables[w.format.table()];
  const int64_t at = Activations::At(row, blocks, 0);
  const int8_t* x = a.codes + 32 * at;
  const float* x_scales = a.scales + at;
  const float* x_sums =
      kHalves == 2 ? a.half_sums + Activations::At(row, 2 * blocks, 0) : a.sums + at;
  F32 sum[kRows] = {};
  for (int64_t b = 0; b < blocks; ++b, codes += kBlock) {
    for (int line = 0; line < kBlock; line += 64) Prefetch(codes + kAhead + line);
    if (b % (64 / 32 / kHalves) == 0) {
      Prefetch(scales + kAhead + b * kHalves * 32);
      if constexpr (kMinima) Prefetch(minima + kAhead + b * kHalves * 32);
    }
    for (int half = 0; half < kHalves; ++half) {
      I32 dot[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) dot[r] = Splat(kDotStart);
#pragma GCC unroll 8
      for (int i = half * 8 / kHalves; i < (half + 1) * 8 / kHalves; ++i) {
        U8 c = Codes<kBits>(codes, i);
        if constexpr (kTable) c = Lookup(table, c);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
          dot[r] = Dot4<kBits != 8 && !kTable>(dot[r], c, x + 32 * r + 4 * i);
      }
      const int64_t group = b * kHalves + half;
      const F32 scale = FromF16(Load<U16>(scales + group * 32));
      const F32 offset = scale * -kDotOffset;
      F32 minimum{};
      if constexpr (kMinima) minimum = FromF16(Load<U16>(minima + group * 32));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const F32 codes_sum = Splat(x_sums[r]);
        F32 value = FromDot(dot[r]);
        if constexpr (kBits == 8 || !kMinima) value = MulAdd(Splat(zero), codes_sum, value);
        value = MulAdd(value, scale, offset);
        if constexpr (kMinima) value = MulAdd(minimum, codes_sum, value);
        sum[r] = MulAdd(value, Splat(x_scales[r]), sum[r]);
      }
      x_sums += Activations::kRows;
    }
    x += 32 * Activations::kRows;
    x_scales += Activations::kRows;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) out[r] = sum[r] * w.scale;
}

template <int kBits, int kRows>
void FloatTile(const Weight& w, int64_t tile, const Activations& a, int64_t row, F32* out) {
  constexpr int kBytes = kLanes * kBits / 8;
  const uint8_t* data = w.tile(tile);
  const float* x = a.values + row * w.K;
  F32 sum[kRows] = {};
  for (int64_t k = 0; k < w.K; ++k, data += kBytes) {
    F32 value;
    if constexpr (kBits == 16) value = FromBf16(Load<U16>(data));
    else value = Load<F32>(data);
    for (int r = 0; r < kRows; ++r) sum[r] = MulAdd(value, Splat(x[r * w.K + k]), sum[r]);
  }
  for (int r = 0; r < kRows; ++r) out[r] = sum[r] * w.scale;
}

// The largest power of two up to kMaxRows that is not above `left`.
inline int RowsAtOnce(int64_t left) {
  int rows = kMaxRows;
  while (rows > left) rows /= 2;
  return rows;
}

// Products of `rows` rows, from `row` on, with the tile's 16 weight rows.
typedef void (*TileFn)(const Weight& w, int64_t tile, const Activations& a, int64_t row, F32* out);

// The value for a format of `Choice<bits, group, minima, table>::value`; none for others.
template <template <int, int, bool, bool> class Choice>
auto ChooseQuantised(Format f) -> decltype(Choice<4, 32, false, false>::value()) {
  const bool m = f.minima();
  if (f.table()) {
    if (f.bits != 4 || m) return nullptr;
    return f.group == 16 ? Choice<4, 16, false, true>::value() : Choice<4, 32, false, true>::value();
  }
  if (f.group == 16) {
    if (f.bits == 4)
      return m ? Choice<4, 16, true, false>::value() : Choice<4, 16, false, false>::value();
    return f.bits == 6 && !m ? Choice<6, 16, false, false>::value() : nullptr;
  }
  switch (f.bits) {
    case 4: return m ? Choice<4, 32, true, false>::value() : Choice<4, 32, false, false>::value();
    case 5: return m ? Choice<5, 32, true, false>::value() : Choice<5, 32, false, false>::value();
    case 8: return m ? Choice<8, 32, true, false>::value() : Choice<8, 32, false, false>::value();
    default: return nullptr;
  }
}

template <int kRows>
struct TileOf {
  template <int kBits, int kGroup, bool kMinima, bool kTable>
  struct Choice {
    static TileFn value() { return QuantisedTile<kBits, kGroup, kMinima, kTable, kRows>; }
  };
};

template <int kRows>
TileFn ChooseTile(Format f) {
  if (f.bits == 32) return FloatTile<32, kRows>;
  if (f.bits == 16) return FloatTile<16, kRows>;
  return ChooseQuantised<TileOf<kRows>::template Choice>(f);
}

inline TileFn Tile(Format f, int rows) {
  if constexpr (kMaxRows == 8) {
    if (rows == 8) return ChooseTile<8>(f);
    if (rows == 4) return ChooseTile<4>(f);
  }
  return rows == 2 ? ChooseTile<2>(f) : ChooseTile<1>(f);
}

}  // namespace
