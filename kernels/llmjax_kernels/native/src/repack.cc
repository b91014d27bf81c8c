// From a checkpoint's weights to the tiles of format.h. Called through ctypes while loading.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "format.h"
#include "gguf_blocks.h"
#include "half.h"
#include "kernels.h"

namespace {

// Code k of a group of 32, row `lane` of 16, into the block that holds the group.
void PutCode(uint8_t* block, int bits, int k, int lane, uint8_t code) {
  const int i = k / 4, byte = 4 * lane + k % 4;
  if (bits == 8) {
    block[64 * i + byte] = code;
    return;
  }
  block[64 * (i / 2) + byte] |= (code & 15) << 4 * (i % 2);
  if (bits == 5) block[256 + byte] |= (code >> 4 & 1) << i;
  if (bits == 6) block[256 + 64 * (i / 4) + byte] |= (code >> 4 & 3) << 2 * (i % 4);
}

struct Source {
  GgufType type;
  const uint8_t* data;
  int64_t row_bytes;

  void At(int64_t row, int64_t group, Group& g) const {
    const int64_t weights = BlockWeights(type), per_block = weights / 32;
    const int64_t blocks = group / per_block;
    const int64_t block_bytes = BlockBytes(type);
    DecodeGroup(type, data + row * row_bytes + blocks * block_bytes, int(group % per_block), g);
  }
};

// Numbers are GGUF's.
enum class FloatType : int64_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 30 };

int64_t FloatBytes(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

float FloatAt(FloatType type, const uint8_t* p) {
  if (type == FloatType::kFloat16) return HalfAt(p);
  uint32_t bits = 0;
  const int64_t bytes = FloatBytes(type);
  std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 4 - bytes, p, bytes);
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Magnitudes are in the order of their bits, what is not finite above all.
template <typename Bits>
Bits GreatestMagnitude(const uint8_t* data, int64_t count) {
  constexpr Bits kNoSign = Bits(~Bits(0)) >> 1;
  Bits greatest = 0, bits;
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(&bits, data + i * sizeof(Bits), sizeof(Bits));
    greatest = std::max<Bits>(greatest, bits & kNoSign);
  }
  return greatest;
}

}  // namespace

extern "C" {

// The greatest scale or minimum of rows [begin, end).
float llmjax_greatest_scale(int64_t type, const uint8_t* data, int64_t row_bytes, int64_t K,
                            int64_t begin, int64_t end, bool minima) {
  const Source source{GgufType(type), data, row_bytes};
  Group g;
  float greatest = 0;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t group = 0; group < K / 32; ++group) {
      source.At(row, group, g);
      for (int h = 0; h < 2; ++h) {
        greatest = std::max(greatest, std::fabs(g.Scale(h)));
        if (minima) greatest = std::max(greatest, std::fabs(g.Minimum(h)));
      }
    }
  return greatest;
}

// Packs tiles [begin, end) of GGUF rows; scales are divided by 2^exponent first.
void llmjax_pack_gguf(int64_t type, const uint8_t* data, int64_t row_bytes, int64_t N, int64_t K,
                      int64_t format, int64_t exponent, int64_t begin, int64_t end, uint8_t* out) {
  const Source source{GgufType(type), data, row_bytes};
  const Format f = Format::Decode(format);
  const float factor = std::ldexp(1.0f, int(-exponent));
  Group g;
  for (int64_t tile = begin; tile < end; ++tile) {
    uint8_t* to = out + tile * f.tile_bytes(K);
    std::memset(to, 0, f.tile_bytes(K));
    uint16_t* scales = reinterpret_cast<uint16_t*>(to + f.code_bytes(K));
    uint16_t* minima = reinterpret_cast<uint16_t*>(to + f.code_bytes(K) + f.scale_bytes(K));
    const int64_t rows = std::min<int64_t>(16, N - tile * 16);
    for (int64_t lane = 0; lane < rows; ++lane)
      for (int64_t group = 0; group < K / 32; ++group) {
        source.At(tile * 16 + lane, group, g);
        for (int k = 0; k < 32; ++k)
          PutCode(to + group * 64 * f.bits, f.bits, k, int(lane), g.codes[k]);
        for (int h = 0; h < 32 / f.group; ++h) {
          const int64_t at = (group * 32 / f.group + h) * 16 + lane;
          scales[at] = ToHalf(g.Scale(h) * factor);
          if (f.minima()) minima[at] = ToHalf(g.Minimum(h) * factor);
        }
      }
  }
}

// Takes GGUF rows apart, without rounding: codes [N, K] one a byte; of scales, and of minima where
// there are two parts, small integers [N, parts, K / group] and the half floats by which these are
// multiplied [N, parts, K / weights of a block].
void llmjax_gguf_parts(int64_t type, const uint8_t* data, int64_t row_bytes, int64_t N, int64_t K,
                       int64_t group, int64_t parts, uint8_t* codes, int8_t* scales,
                       uint16_t* units) {
  const Source source{GgufType(type), data, row_bytes};
  const int64_t groups = K / group, block = BlockWeights(source.type), blocks = K / block;
  Group g;
  for (int64_t row = 0; row < N; ++row)
    for (int64_t at = 0; at < K / 32; ++at) {
      source.At(row, at, g);
      std::memcpy(codes + row * K + at * 32, g.codes, 32);
      for (int64_t part = 0; part < parts; ++part) {
        const int8_t* from = part ? g.minimum : g.scale;
        for (int h = 0; h < 32 / group; ++h)
          scales[(row * parts + part) * groups + at * 32 / group + h] = from[h];
        const float unit = part ? g.minimum_unit : g.unit;
        units[(row * parts + part) * blocks + at * 32 / block] = ToHalf(unit);
      }
    }
}

// Packs the codes of `tiles` tiles of rows that begin with K codes, one a byte.
void llmjax_pack_codes(const uint8_t* data, int64_t row_bytes, int64_t N, int64_t K, int64_t format,
                       int64_t tiles, uint8_t* out) {
  const Format f = Format::Decode(format);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    uint8_t* to = out + tile * f.tile_bytes(K);
    std::memset(to, 0, f.tile_bytes(K));
    const int64_t rows = std::min<int64_t>(16, N - tile * 16);
    for (int64_t lane = 0; lane < rows; ++lane) {
      const uint8_t* codes = data + (tile * 16 + lane) * row_bytes;
      for (int64_t k = 0; k < K; ++k)
        PutCode(to + k / 32 * 64 * f.bits, f.bits, int(k % 32), int(lane), codes[k]);
    }
  }
}

// Packs the scales of `tiles` tiles, divided by 2^exponent: [N, parts, K / group], where the second
// part are minima, which a format may have. Those of a group serve all groups of the tiles in it.
void llmjax_pack_scales(const float* scales, int64_t N, int64_t K, int64_t format, int64_t group,
                        int64_t exponent, int64_t tiles, uint8_t* out) {
  const Format f = Format::Decode(format);
  const float factor = std::ldexp(1.0f, int(-exponent));
  const int64_t groups = K / group, parts = f.minima() ? 2 : 1;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t rows = std::min<int64_t>(16, N - tile * 16);
    uint8_t* behind = out + tile * f.tile_bytes(K) + f.code_bytes(K);
    for (int64_t part = 0; part < parts; ++part) {
      uint16_t* to = reinterpret_cast<uint16_t*>(behind + part * f.scale_bytes(K));
      for (int64_t lane = 0; lane < rows; ++lane) {
        const float* from = scales + ((tile * 16 + lane) * parts + part) * groups;
        for (int64_t g = 0; g < K / f.group; ++g)
          to[g * 16 + lane] = ToHalf(from[g * f.group / group] * factor);
      }
    }
  }
}

// Packs tiles [begin, end) of float rows [N, K] of 2 or 4 bytes a value.
void llmjax_pack_float(const uint8_t* data, int64_t bytes, int64_t N, int64_t K, int64_t begin,
                       int64_t end, uint8_t* out) {
  const int64_t tile_bytes = Format::Decode(bytes * 8).tile_bytes(K);
  for (int64_t tile = begin; tile < end; ++tile) {
    uint8_t* to = out + tile * tile_bytes;
    const int64_t rows = std::min<int64_t>(16, N - tile * 16);
    if (rows < 16) std::memset(to, 0, tile_bytes);
    for (int64_t lane = 0; lane < rows; ++lane) {
      const uint8_t* from = data + (tile * 16 + lane) * K * bytes;
      for (int64_t k = 0; k < K; ++k)
        std::memcpy(to + (k * 16 + lane) * bytes, from + k * bytes, bytes);
    }
  }
}

// The greatest magnitude of float values; not finite where one is not.
float llmjax_greatest_magnitude(int64_t type, const uint8_t* data, int64_t count) {
  if (FloatType(type) == FloatType::kFloat32) {
    const uint32_t bits = GreatestMagnitude<uint32_t>(data, count);
    return FloatAt(FloatType::kFloat32, reinterpret_cast<const uint8_t*>(&bits));
  }
  const uint16_t bits = GreatestMagnitude<uint16_t>(data, count);
  if (FloatType(type) == FloatType::kFloat16 && bits >= 0x7c00) return INFINITY;
  return FloatAt(FloatType(type), reinterpret_cast<const uint8_t*>(&bits));
}

// Quantises tiles [begin, end) of float rows [N, K]; values are divided by 2^exponent first.
void llmjax_quantise(int64_t type, const uint8_t* data, int64_t N, int64_t K, int64_t format,
                     int64_t exponent, int64_t begin, int64_t end, uint8_t* out) {
  const Format f = Format::Decode(format);
  const float factor = std::ldexp(1.0f, int(-exponent));
  const int64_t bytes = FloatBytes(FloatType(type));
  std::vector<float> values(16 * K);
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t rows = std::min<int64_t>(16, N - tile * 16);
    const uint8_t* from = data + tile * 16 * K * bytes;
    for (int64_t i = 0; i < rows * K; ++i)
      values[i] = factor * FloatAt(FloatType(type), from + i * bytes);
    BestKernels().quantise_tile(values.data(), rows, K, f, out + tile * f.tile_bytes(K));
  }
}

// GGUF blocks of float32 rows [N, K]; importance is [K] or null. False where a scale is too large.
bool llmjax_quantise_gguf(int64_t type, const float* rows, int64_t N, int64_t K,
                          const float* importance, uint8_t* out) {
  return BestKernels().quantise_gguf(GgufType(type), rows, N, K, importance, out);
}

}  // extern "C"
