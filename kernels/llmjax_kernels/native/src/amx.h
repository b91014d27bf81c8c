// Blocks of 16 rows of activations times pairs of tiles of 16 weight rows, by Intel AMX.
//
// A tile of 16 rows x 32 codes times one of 32 x 16, as format.h has them, gives a group's dot
// products at once. They are integers, exact in any order, and what becomes of them is done as
// QuantisedTile does it: a row's result is the same, bit for bit, as from few rows.
//
// While a tile instruction is in flight the processor multiplies vectors at half its speed. So
// the two take turns: the dot products of some groups are stored, then scaled and summed.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "matmul.h"
#include "simd.h"

namespace {

constexpr int kPair = 2;             // weight tiles at once
constexpr int64_t kFewestRows = 32;  // for which it is faster than vectors
constexpr int64_t kBlockRows = 128;  // for which codes are unpacked once

// The tile registers while this is alive; let go behind it, so that threads switch cheaply.
class TileRegisters {
 public:
  // For groups of so many k: an activation row of them, and the codes of 4 k by 16 weight rows.
  explicit TileRegisters(int group) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const auto set = [&](int tile, int rows, int bytes) {
      config.rows[tile] = uint8_t(rows);
      config.row_bytes[tile] = uint16_t(bytes);
    };
    set(kRowCodes, 16, group);
    for (int which = 0; which < kPair; ++which) {
      set(kDots + which, 16, 64);
      set(kCodes + which, group / 4, 64);
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;

  // Which register is what; there are two of the first and the last, for a pair of tiles.
  static constexpr int kDots = 0, kRowCodes = 4, kCodes = 6;

  template <int kTile>
  static void Load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void Store(void* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                 : : "r"(to), "r"(int64_t(64)), "i"(kTile) : "memory");
  }
  // The dot products of the rows' codes and those of weight tile `kWhich`.
  template <int kWhich>
  static void Multiply() {
    asm volatile("tilezero %%tmm%c0\n\ttdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 : : "i"(kDots + kWhich), "i"(kRowCodes), "i"(kCodes + kWhich));
  }
};

// Fetches the weights that come next, a few at a time, so that memory always has work.
struct Ahead {
  const uint8_t* at;
  int64_t step;  // bytes

  LLMJAX_INLINE void Fetch() {
    for (int64_t i = 0; i < step; i += 64) PrefetchSoon(at + i);
    at += step;
  }
};

template <int kBits, int kGroup, bool kMinima, bool kTable>
class TilePair {
 public:
  // `tile` and, if `tiles` is 2, the next.
  TilePair(const Weight& w, int64_t tile, int64_t tiles)
      : w_(w), tile_(tile), tiles_(tiles), groups_(w.K / kGroup) {
    const int64_t next = kPair * w.format.tile_bytes(w.K);
    ahead_ = {w.tile(tile) + next, next / (2 * groups_) / 64 * 64 + 64};
  }

  // Products of rows [row, row + rows), both multiples of 16 and at most kBlockRows, into
  // products [kPair, kBlockRows].
  void Multiply(const Activations& a, int64_t row, int64_t rows, F32 (*products)[kBlockRows]) {
    const int64_t parts = (groups_ + kGroups - 1) / kGroups, depth = (groups_ + parts - 1) / parts;
    for (int64_t begin = 0; begin < groups_; begin += depth) {
      const int64_t count = std::min(depth, groups_ - begin);
      for (int t = 0; t < kPair; ++t) Unpack(t, begin, count);
      for (int64_t r = 0; r < rows; r += Activations::kRows) {
        Dots(a, row + r, begin, count);
        for (int64_t half = r; half < r + Activations::kRows; half += kMaxRows)
          Scale(a, row + half, half - r, begin, count, products[0] + half, products[1] + half);
      }
    }
  }

 private:
  static constexpr int kGroups = 12;  // whose codes and dot products the first cache holds
  static constexpr int kVectors = kGroup / 4;

  // Codes as signed bytes of which zero is 0, and scales as float32.
  void Unpack(int t, int64_t begin, int64_t count) {
    const uint8_t* codes = w_.tile(tile_ + std::min<int64_t>(t, tiles_ - 1));
    const uint8_t* scales = codes + w_.format.code_bytes(w_.K);
    const uint8_t* minima = scales + w_.format.scale_bytes(w_.K);
    const U8 zero = U8{} + w_.format.zero;
    const uint8_t* table = kTables[w_.format.table()];
    for (int64_t g = 0; g < count; ++g) {
      ahead_.Fetch();
      const int64_t group = begin + g;
      const uint8_t* block = codes + group * kGroup / 32 * (64 * kBits);
      const bool second = kGroup == 16 && group % 2;
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        U8 c = second ? Codes<kBits>(block, (i + kVectors) % 8) : Codes<kBits>(block, i);
        if constexpr (kTable) c = Lookup(table, c);
        codes_[t][g][i] = c - zero;
      }
      scales_[g][t] = FromF16(Load<U16>(scales + group * 32));
      if constexpr (kMinima) minima_[g][t] = FromF16(Load<U16>(minima + group * 32));
    }
  }

  void Dots(const Activations& a, int64_t row, int64_t begin, int64_t count) {
    using Tiles = TileRegisters;
    const int8_t* x = a.codes + 32 * Activations::At(row, w_.K / 32, 0);
    for (int64_t g = 0; g < count; ++g) {
      const int64_t k = (begin + g) * kGroup;
      Tiles::Load<Tiles::kRowCodes>(x + k / 32 * 32 * Activations::kRows + k % 32, 32);
      Tiles::Load<Tiles::kCodes>(codes_[0][g], 64);
      Tiles::Multiply<0>();
      Tiles::Load<Tiles::kCodes + 1>(codes_[1][g], 64);
      Tiles::Multiply<1>();
      Tiles::Store<Tiles::kDots>(dots_[g][0]);
      Tiles::Store<Tiles::kDots + 1>(dots_[g][1]);
    }
  }

  // Adds the groups' products of kMaxRows rows; the first is `row`, number `first` of its block.
  void Scale(const Activations& a, int64_t row, int64_t first, int64_t begin, int64_t count,
             F32* products, F32* products_1) {
    F32* to[kPair] = {products, products_1};
    const float* x_scales = a.scales + Activations::At(row, w_.K / 32, 0);
    const float* x_sums =
        (kGroup == 16 ? a.half_sums : a.sums) + Activations::At(row, groups_, begin);
    F32 sum[kPair][kMaxRows];
    const bool more = begin > 0, last = begin + count == groups_;
#pragma GCC unroll 2
    for (int t = 0; t < kPair; ++t)
#pragma GCC unroll 8
      for (int r = 0; r < kMaxRows; ++r) sum[t][r] = more ? to[t][r] : F32{};
    for (int64_t g = 0; g < count; ++g, x_sums += Activations::kRows) {
      const float* x_scale = x_scales + (begin + g) * kGroup / 32 * Activations::kRows;
      const I32* dots = dots_[g][0] + first;
      F32 scale[kPair], minimum[kPair];
#pragma GCC unroll 2
      for (int t = 0; t < kPair; ++t) {
        scale[t] = scales_[g][t];
        if constexpr (kMinima) minimum[t] = minima_[g][t];
      }
#pragma GCC unroll 8
      for (int r = 0; r < kMaxRows; ++r) {
        const F32 by = Splat(x_scale[r]), codes_sum = Splat(x_sums[r]);
#pragma GCC unroll 2
        for (int t = 0; t < kPair; ++t) {
          F32 value = ToFloat(dots[Activations::kRows * t + r]) * scale[t];
          if constexpr (kMinima) value = MulAdd(minimum[t], codes_sum, value);
          sum[t][r] = MulAdd(value, by, sum[t][r]);
        }
      }
    }
#pragma GCC unroll 2
    for (int t = 0; t < kPair; ++t)
#pragma GCC unroll 8
      for (int r = 0; r < kMaxRows; ++r) to[t][r] = last ? sum[t][r] * w_.scale : sum[t][r];
  }

  const Weight& w_;
  const int64_t tile_, tiles_, groups_;
  Ahead ahead_;
  U8 codes_[kPair][kGroups][kVectors];
  F32 scales_[kGroups][kPair], minima_[kGroups][kPair];
  I32 dots_[kGroups][kPair][Activations::kRows];
};

typedef void (*PairFn)(const Weight& w, int64_t tile, int64_t tiles, const Activations& a,
                       int64_t row, int64_t rows, F32 (*products)[kBlockRows]);

template <int kBits, int kGroup, bool kMinima, bool kTable>
struct PairOf {
  static PairFn value() {
    return [](const Weight& w, int64_t tile, int64_t tiles, const Activations& a, int64_t row,
              int64_t rows, F32(*products)[kBlockRows]) {
      TilePair<kBits, kGroup, kMinima, kTable>(w, tile, tiles).Multiply(a, row, rows, products);
    };
  }
};

}  // namespace
