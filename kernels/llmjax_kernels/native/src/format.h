// How a weight matrix [N, K] lies in memory: tiles of 16 rows, streamed from start to end.
//
// Quantised: the value of row n at k is code * scale + minimum, or (code - zero) * scale where
// the format has no minima; scale and minimum are shared by `group` consecutive k. Codes of 32
// consecutive k of 16 rows lie together, as vectors of 4 k by 16 rows (byte 4 * row + k):
//   4 bits   4 vectors; the low halves are k 8j to 8j+3, the high halves 8j+4 to 8j+7
//   5, 6     those, then the upper bits: 1 bit, or 2, of each vector in turn
//   8        8 vectors
// Behind a tile's codes lie its scales, float16 [K / group, 16], then its minima likewise.
// Float: values [K, 16] as they are.
#pragma once

#include <cstdint>

// Inlined always: this is compiled for several instruction sets, and the linker must not give
// one file the code of another.
#define LLMJAX_INLINE __attribute__((always_inline)) inline

struct Format {
  uint8_t bits;   // 4, 5, 6, 8: codes; 16: bfloat16; 32: float32
  uint8_t group;  // 16 or 32
  uint8_t zero;   // the code that stands for 0, where there are no minima
  uint8_t flags;

  static constexpr uint8_t kMinima = 1;
  static constexpr uint8_t kTable = 2;  // codes index a table of 16 values (IQ4_NL)

  LLMJAX_INLINE static Format Decode(int64_t code) {
    return {uint8_t(code), uint8_t(code >> 8), uint8_t(code >> 16), uint8_t(code >> 24)};
  }

  LLMJAX_INLINE bool quantised() const { return bits <= 8; }
  LLMJAX_INLINE bool minima() const { return flags & kMinima; }
  LLMJAX_INLINE bool table() const { return flags & kTable; }

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
  float scale;  // multiplies every value

  LLMJAX_INLINE int64_t tiles() const { return (N + 15) / 16; }
  LLMJAX_INLINE const uint8_t* tile(int64_t t) const { return data + t * format.tile_bytes(K); }
};

constexpr uint8_t kIq4Table[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                   129, 141, 153, 166, 181, 197, 217, 241};
