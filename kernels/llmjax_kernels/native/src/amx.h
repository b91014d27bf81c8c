// Rows of activations times pairs of tiles of 16 weight rows, by Intel AMX, in bfloat16.
//
// The unit has no use for scales of groups of 32: to apply them to sums of bytes costs more than
// the sums. So weights are unpacked to bfloat16, some inputs at a time, and whole rows summed in
// float32. Few rows go the same way, so that a row's result does not depend on the batch: the
// unit treats each row of a tile alike, and which inputs it sums first depends on K alone.
//
// A weight is made in float16, at 32 a vector, and cut to bfloat16's precision with its exponent
// as it is: what that stands for is smaller by 2^112. Activations are raised by 2^56, so that
// products stay clear of what the unit takes for zero.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "matmul.h"
#include "simd.h"

namespace {

constexpr int kPair = 2;             // weight tiles at once
constexpr int64_t kBlockRows = 256;  // for which weights are unpacked once
constexpr int kDepth = 12;           // at most, blocks of 32 k that the first cache holds
constexpr float kRaise = 0x1p56f;

typedef __m512h F16x32;

// The tile registers while this is alive; let go behind it, so that threads switch cheaply.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = 64;
      config.rows[i] = 16;
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;

  template <int kTile>
  static void Load(const void* from, int64_t stride = 64) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void Store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void Clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kSum, int kRows, int kWeights>
  static void Multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kWeights));
  }
};

// A row as bfloat16. Of each 4 inputs the middle ones change places: see UnpackBlock.
inline void NarrowRow(const float* x, int64_t K, int64_t row, const Activations& out) {
  const __m512i order = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (int64_t g = 0; g < K / 32; ++g, x += 32) {
    const F32 low = Load<F32>(x) * kRaise, high = Load<F32>(x + kLanes) * kRaise;
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    Store(out.bf16 + 32 * Activations::At(row, K / 32, g), _mm512_shuffle_epi8(both, order));
  }
}

// Sixteen float16 divided by 2^kBits, each twice; exact but for those that vanish beside others.
template <int kBits>
inline F16x32 Twice(const uint8_t* from) {
  const __m256h halves = _mm256_mul_ph(_mm256_loadu_ph(from), _mm256_set1_ph(1.0f / (1 << kBits)));
  const __m512i wide = _mm512_cvtepu16_epi32((__m256i)halves);
  return (F16x32)_mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
}

// The weights of 32 k of a tile as [16, 16, 2] bfloat16, a pair of k by row. Bytes k, k + 2 of
// each 4 are a pair, and k + 1, k + 3, as they are found when the codes are taken for 16 bits.
template <int kBits, int kGroup, bool kMinima, bool kTable>
LLMJAX_INLINE void UnpackBlock(const uint8_t* codes, const uint8_t* scales, const uint8_t* minima,
                        uint8_t zero, U16x32* to) {
  // Code c, put into the mantissa of 2^kWidth, is the float16 2^kWidth + c.
  constexpr int kWidth = kTable ? 8 : kBits, kPlace = 10 - kWidth;
  constexpr float kPower = 1 << kWidth;
  const __m512i mask = _mm512_set1_epi16(((1 << kWidth) - 1) << kPlace);
  const __m512i power = _mm512_set1_epi16((15 + kWidth) << 10);
  const F16x32 offset = _mm512_set1_ph(-kPower - (kMinima ? 0 : zero));
  for (int half = 0; half < 32 / kGroup; ++half) {
    // A scale is below 2^14, and so is a minimum: no weight is too large for float16.
    const F16x32 scale = Twice<kWidth - 1>(scales + 32 * half);
    F16x32 minimum{};
    if constexpr (kMinima)
      minimum = _mm512_fmadd_ph(offset, scale, Twice<kWidth - 1>(minima + 32 * half));
    const auto put = [&](int row, U16x32 code_in_place) {
      const F16x32 code =
          (F16x32)_mm512_ternarylogic_epi32((__m512i)code_in_place, mask, power, 0xea);  // & |
      F16x32 value;
      if constexpr (kMinima) value = _mm512_fmadd_ph(code, scale, minimum);
      else value = _mm512_mul_ph(_mm512_add_ph(code, offset), scale);
      // Rounds 3 bits away; the shift fills what is behind the sign with it.
      const __m512i rounded = _mm512_mulhrs_epi16((__m512i)value, _mm512_set1_epi16(1 << 12));
      to[row] = (U16x32)_mm512_and_si512(rounded, _mm512_set1_epi16(short(0x8fff)));
    };
    constexpr int kVectors = kGroup / 4;
    if constexpr (kBits == 4 && !kTable) {
#pragma GCC unroll 4
      for (int i = half * kVectors; i < (half + 1) * kVectors; i += 2) {
        const U16x32 packed = Load<U16x32>(codes + 32 * i);
        put(2 * i, packed << 6);
        put(2 * i + 1, packed >> 2);
        put(2 * i + 2, packed << 2);
        put(2 * i + 3, packed >> 6);
      }
    } else {
#pragma GCC unroll 8
      for (int i = half * kVectors; i < (half + 1) * kVectors; ++i) {
        U8 c = Codes<kBits>(codes, i);
        if constexpr (kTable) c = Lookup(kIq4Table, c);
        put(2 * i, (U16x32)c << kPlace);
        put(2 * i + 1, (U16x32)c >> (8 - kPlace));
      }
    }
  }
}

// Fetches the weights that come next, a few at a time, so that memory always has work.
struct Ahead {
  const uint8_t* at;
  int64_t step;  // bytes

  LLMJAX_INLINE void Fetch() {
    for (int64_t i = 0; i < step; i += 64) PrefetchSoon(at + i);
    at += step;
  }
};

// Blocks [begin, begin + count) of 32 k of a tile.
typedef void (*UnpackFn)(const Weight& w, int64_t tile, int64_t begin, int64_t count,
                         U16x32 (*to)[16], Ahead& ahead);

template <int kBits, int kGroup, bool kMinima, bool kTable>
void Unpack(const Weight& w, int64_t tile, int64_t begin, int64_t count, U16x32 (*to)[16],
            Ahead& ahead) {
  constexpr int kScales = 32 / kGroup * 32;  // bytes of a block's
  const uint8_t* all = w.tile(tile);
  const uint8_t* codes = all + begin * 64 * kBits;
  const uint8_t* scales = all + w.format.code_bytes(w.K) + begin * kScales;
  const uint8_t* minima = scales + w.format.scale_bytes(w.K);
  for (int64_t b = 0; b < count; ++b) {
    ahead.Fetch();
    UnpackBlock<kBits, kGroup, kMinima, kTable>(codes, scales, minima, w.format.zero, to[b]);
    codes += 64 * kBits;
    scales += kScales;
    minima += kScales;
  }
}

template <int kBits, int kGroup, bool kMinima, bool kTable>
struct UnpackOf {
  static UnpackFn value() { return Unpack<kBits, kGroup, kMinima, kTable>; }
};

// By what a sum's products are multiplied in the end, to undo what was done to keep them in range.
inline float Lower(const Weight& w) {
  const int width = w.format.table() ? 8 : w.format.bits;
  return w.scale * (0x1p112f / kRaise) * float(1 << (width - 1));
}

// sums [16 * kBlocks, 2 * 16] of blocks of 16 rows; `first`: they begin here.
template <int kBlocks>
void AddProducts(const uint16_t* x, int64_t block_stride, const U16x32 (*weights)[kDepth][16],
                 int64_t count, bool first, float* sums, Ahead* ahead) {
  using Tiles = TileRegisters;
  constexpr int64_t kStride = kPair * kLanes * sizeof(float);
  float* more = sums + kPair * kLanes * Activations::kRows;
  if (first) {
    Tiles::Clear<0>();
    Tiles::Clear<1>();
    Tiles::Clear<2>();
    Tiles::Clear<3>();
  } else {
    Tiles::Load<0>(sums, kStride);
    Tiles::Load<1>(sums + kLanes, kStride);
    if constexpr (kBlocks == 2) {
      Tiles::Load<2>(more, kStride);
      Tiles::Load<3>(more + kLanes, kStride);
    }
  }
  for (int64_t b = 0; b < count; ++b, x += 32 * Activations::kRows) {
    if (ahead) ahead->Fetch();
    Tiles::Load<4>(x);
    Tiles::Load<6>(weights[0][b]);
    Tiles::Multiply<0, 4, 6>();
    Tiles::Load<7>(weights[1][b]);
    Tiles::Multiply<1, 4, 7>();
    if constexpr (kBlocks == 2) {
      Tiles::Load<5>(x + block_stride);
      Tiles::Multiply<2, 5, 6>();
      Tiles::Multiply<3, 5, 7>();
    }
  }
  Tiles::Store<0>(sums, kStride);
  Tiles::Store<1>(sums + kLanes, kStride);
  if constexpr (kBlocks == 2) {
    Tiles::Store<2>(more, kStride);
    Tiles::Store<3>(more + kLanes, kStride);
  }
}

// Products of rows [row, row + rows), at most kBlockRows, with tile and, if `tiles` is 2, the
// next: done(sums [count, 2 * 16], row, count) as they come, while the next ones are made, with
// what is still to be multiplied by Lower(w). `row` begins a block of 16.
template <typename Done>
inline void MultiplyPair(const Weight& w, UnpackFn unpack, int64_t tile, int64_t tiles,
                         const Activations& a, int64_t row, int64_t rows, const Done& done) {
  constexpr int64_t kRows = Activations::kRows;
  const int64_t blocks = w.K / 32, parts = (blocks + kDepth - 1) / kDepth;
  const int64_t depth = (blocks + parts - 1) / parts, stride = kRows * w.K;
  U16x32 weights[kPair][kDepth][16];
  alignas(64) float sums[kBlockRows * kPair * kLanes];
  // Of each block twice while it is unpacked, once while it is multiplied.
  const int64_t next = kPair * w.format.tile_bytes(w.K);
  Ahead ahead{w.tile(tile) + next, next / (3 * blocks) / 64 * 64 + 64};
  for (int64_t begin = 0; begin < blocks; begin += depth) {
    const int64_t count = std::min(depth, blocks - begin);
    for (int64_t t = 0; t < kPair; ++t)
      unpack(w, tile + std::min(t, tiles - 1), begin, count, weights[t], ahead);
    for (int64_t r = 0; r < rows; r += 2 * kRows) {
      const uint16_t* x = a.bf16 + 32 * Activations::At(row + r, blocks, begin);
      float* to = sums + r * kPair * kLanes;
      Ahead* later = r ? nullptr : &ahead;
      if (rows - r > kRows) AddProducts<2>(x, stride, weights, count, begin == 0, to, later);
      else AddProducts<1>(x, stride, weights, count, begin == 0, to, later);
      if (begin + count == blocks) done(to, row + r, std::min(2 * kRows, rows - r));
    }
  }
}

}  // namespace
