// How a weight matrix [N, K] lies in memory: tiles of 16 rows, streamed from start to end.
//
// Quantised: the value of row n at k is (code - zero) * scale, plus a minimum where the format has
// them; scale and minimum are shared by `group` consecutive k. With minima, zero is 0 for codes of
// less than 8 bits. Codes of 32 consecutive k of 16 rows lie together, as vectors of 4 k by 16 rows
// (byte 4 * row + k):
//   4 bits   4 vectors; the low halves are k 8j to 8j+3, the high halves 8j+4 to 8j+7
//   5, 6     those, then the upper bits: 1 bit, or 2, of each vector in turn
//   8        8 vectors
// Behind a tile's codes lie its scales, float16 [K / group, 16], then its minima likewise.
// Float: values [K, 16] as they are.
//
// A quantised weight may have its inputs in another order: place k is input order[k].
#pragma once

#include <cstdint>

// Inlined always: this is compiled for several instruction sets, and the linker must not give
// one file the code of another.
#define LLMJAX_INLINE __attribute__((always_inline)) inline

struct Format {
  uint8_t bits;   // 4, 5, 6, 8: codes; 16: bfloat16; 32: float32
  uint8_t group;  // 16 or 32
  uint8_t zero;   // the code that stands for 0, or for the minimum
  uint8_t flags;

  static constexpr uint8_t kMinima = 1;
  static constexpr int kTable = 1;  // from this bit on: the number of the table, 0 for none

  LLMJAX_INLINE static Format Decode(int64_t code) {
    return {uint8_t(code), uint8_t(code >> 8), uint8_t(code >> 16), uint8_t(code >> 24)};
  }

  LLMJAX_INLINE bool quantised() const { return bits <= 8; }
  LLMJAX_INLINE bool minima() const { return flags & kMinima; }
  LLMJAX_INLINE int table() const { return flags >> kTable; }

  LLMJAX_INLINE int64_t code_bytes(int64_t K) const { return K * 16 * bits / 8; }
  LLMJAX_INLINE int64_t scale_bytes(int64_t K) const { return quantised() ? K / group * 32 : 0; }
  LLMJAX_INLINE int64_t tile_bytes(int64_t K) const {
    const int64_t bytes = code_bytes(K) + scale_bytes(K) * (minima() ? 2 : 1);
    return (bytes + 63) / 64 * 64;
  }
};

// A weight as a kernel takes it.
struct Weight {
  const uint8_t* data;
  Format format;
  int64_t N, K;
  float scale;           // multiplies every value
  const int32_t* order;  // [K] or null: inputs as they are

  LLMJAX_INLINE int64_t tiles() const { return (N + 15) / 16; }
  LLMJAX_INLINE const uint8_t* tile(int64_t t) const { return data + t * format.tile_bytes(K); }
};

constexpr int kIq4 = 1;  // of the tables

// What codes stand for where they are not integers, plus 128; packed.py has the same numbers.
constexpr uint8_t kTables[][16] = {
    {},
    // IQ4_NL
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    // E2M1, by halves
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},
    // nf4, near its numbers
    {5, 42, 63, 79, 93, 105, 117, 128, 138, 148, 158, 170, 182, 197, 217, 251},
    // fp4 of bitsandbytes, by 120ths
    {128, 129, 208, 248, 168, 188, 148, 158, 128, 127, 48, 8, 88, 68, 108, 98},
};
