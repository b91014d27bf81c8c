// Compiled once per instruction set; LLMJAX_ISA names the table it defines.
#include "kernels.h"

#include <algorithm>

#if defined(__AMX_INT8__)
#include "amx.h"
#endif
#include "attention.h"
#include "gguf_quantise.h"
#include "matmul.h"
#include "quantise.h"
#include "rows.h"
#include "simd.h"

namespace {

// write(row, tile, product) for rows [row, row_end) of a tile.
template <typename Write>
inline void EachRow(const Weight& w, const Activations& a, int64_t row, int64_t row_end,
                    int64_t tile, const Write& write) {
  F32 product[kMaxRows];
  while (row < row_end) {
    const int rows = RowsAtOnce(row_end - row);
    Tile(w.format, rows)(w, tile, a, row, product);
    for (int r = 0; r < rows; ++r) write(row + r, tile, product[r]);
    row += rows;
  }
}

// The same of tiles [tile, tile_end). `row` begins a block of 16.
#if defined(__AMX_INT8__)
constexpr int64_t kTilesAtOnce = kPair;

template <typename Write>
void EachProduct(const Weight& w, const Activations& a, int64_t row, int64_t row_end,
                 int64_t tile, int64_t tile_end, const Write& write) {
  const int64_t whole = row + (row_end - row) / Activations::kRows * Activations::kRows;
  if (whole - row >= kFewestRows && w.format.quantised()) {
    const PairFn multiply = ChooseQuantised<PairOf>(w.format);
    const TileRegisters registers(w.format.group);
    F32 products[kPair][kBlockRows];
    for (; row < whole; row += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, whole - row);
      for (int64_t first = tile; first < tile_end; first += kPair) {
        const int64_t tiles = std::min<int64_t>(kPair, tile_end - first);
        multiply(w, first, tiles, a, row, rows, products);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t t = 0; t < tiles; ++t) write(row + r, first + t, products[t][r]);
      }
    }
    row = whole;
  }
  for (; tile < tile_end; ++tile) EachRow(w, a, row, row_end, tile, write);
}
#else
constexpr int64_t kTilesAtOnce = 1;
constexpr int64_t kBlockRows = 64;  // they stay in a core's cache

template <typename Write>
void EachProduct(const Weight& w, const Activations& a, int64_t row, int64_t row_end,
                 int64_t tile, int64_t tile_end, const Write& write) {
  for (; tile < tile_end; ++tile) EachRow(w, a, row, row_end, tile, write);
}
#endif

inline void StoreLanes(float* to, F32 v, int64_t lanes) {
  if (lanes >= kLanes) {
    Store(to, v);
  } else {
    std::memcpy(to, &v, lanes * sizeof(float));
  }
}

inline F32 LoadLanes(const float* from, int64_t lanes) {
  if (lanes >= kLanes) return Load<F32>(from);
  F32 v{};
  std::memcpy(&v, from, lanes * sizeof(float));
  return v;
}

void Matmul(const Weight& w, const Activations& a, int64_t row_begin, int64_t row_end,
            int64_t tile_begin, int64_t tile_end, const Epilogue& to) {
  const auto write = [&](int64_t row, int64_t tile, F32 value) {
    const int64_t n = tile * kLanes, lanes = w.N - n, at = row * to.stride + n;
    if (to.bias) value += LoadLanes(to.bias + n, lanes);
    if (to.residual)
      value = MulAdd(value, Splat(to.residual_scale), LoadLanes(to.residual + at, lanes));
    StoreLanes(to.out + at, value, lanes);
  };
  EachProduct(w, a, row_begin, row_end, tile_begin, tile_end, write);
}

inline F32 Gate(Activation kind, F32 x) {
  switch (kind) {
    case Activation::kSilu:
      return x / (Exp(-x) + 1.0f);
    case Activation::kGeluTanh:
      return 0.5f * x * (Tanh(0.7978845608f * MulAdd(x * x * x, Splat(0.044715f), x)) + 1.0f);
    case Activation::kGelu:
      for (int i = 0; i < kLanes; ++i) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
      return x;
    default:
      return x;
  }
}

// Of `gate` before those of `up`, which find their products still in the cache.
constexpr int64_t kTilesOfGate = 4 * kTilesAtOnce;

void Gated(const Weight& gate, const Weight& up, const Activations& for_gate,
           const Activations& for_up, int64_t row_begin, int64_t row_end, int64_t tile_begin,
           int64_t tile_end, Activation activation, const float* gate_bias, const float* up_bias,
           float* out, int64_t stride) {
  const auto write_gate = [&](int64_t row, int64_t tile, F32 value) {
    const int64_t n = tile * kLanes, lanes = gate.N - n;
    if (gate_bias) value += LoadLanes(gate_bias + n, lanes);
    StoreLanes(out + row * stride + n, Gate(activation, value), lanes);
  };
  const auto write_up = [&](int64_t row, int64_t tile, F32 value) {
    const int64_t n = tile * kLanes, lanes = gate.N - n;
    if (up_bias) value += LoadLanes(up_bias + n, lanes);
    float* to = out + row * stride + n;
    StoreLanes(to, LoadLanes(to, lanes) * value, lanes);
  };
  for (int64_t tile = tile_begin; tile < tile_end; tile += kTilesOfGate) {
    const int64_t end = std::min(tile_end, tile + kTilesOfGate);
    EachProduct(gate, for_gate, row_begin, row_end, tile, end, write_gate);
    EachProduct(up, for_up, row_begin, row_end, tile, end, write_up);
  }
}

U8 AnyCodes(int bits, const uint8_t* block, int i) {
  switch (bits) {
    case 4: return Codes<4>(block, i);
    case 5: return Codes<5>(block, i);
    case 6: return Codes<6>(block, i);
    default: return Codes<8>(block, i);
  }
}

void Row(const Weight& w, int64_t row, float* out) {
  const Format f = w.format;
  const uint8_t* tile = w.tile(row / kLanes);
  const int64_t lane = row % kLanes, K = w.K;
  if (!f.quantised()) {
    for (int64_t k = 0; k < K; ++k) {
      const uint8_t* p = tile + (k * kLanes + lane) * f.bits / 8;
      uint16_t narrow;
      float wide;
      if (f.bits == 16) {
        std::memcpy(&narrow, p, 2);
        const uint32_t bits = uint32_t(narrow) << 16;
        std::memcpy(&wide, &bits, 4);
      } else {
        std::memcpy(&wide, p, 4);
      }
      out[k] = wide * w.scale;
    }
    return;
  }
  const uint8_t* scales = tile + f.code_bytes(K);
  const uint8_t* minima = scales + f.scale_bytes(K);
  for (int64_t b = 0; b < K / 32; ++b) {
    for (int i = 0; i < 8; ++i) {
      U8 codes = AnyCodes(f.bits, tile + b * 64 * f.bits, i);
      if (f.table()) codes = Lookup(kTables[f.table()], codes);
      const int64_t group = (b * 32 + 4 * i) / f.group;
      const float scale = FromF16(Load<U16>(scales + group * 32))[lane];
      const float minimum = f.minima() ? FromF16(Load<U16>(minima + group * 32))[lane] : 0.0f;
      for (int j = 0; j < 4; ++j) {
        const int64_t k = b * 32 + 4 * i + j;
        const int code = codes[4 * lane + j] - f.zero;
        out[w.order ? w.order[k] : k] = (float(code) * scale + minimum) * w.scale;
      }
    }
  }
}

void AttentionWrite(const AttentionArgs& a, int64_t seq, int64_t token) {
  switch (a.kv_type) {
    case KVType::kFloat32: return WriteToken<float>(a, seq, token);
    case KVType::kBfloat16: return WriteToken<uint16_t>(a, seq, token);
    case KVType::kInt8: return WriteToken<int8_t>(a, seq, token);
    case KVType::kE4m3: return WriteToken<E4m3>(a, seq, token);
    case KVType::kE5m2: return WriteToken<E5m2>(a, seq, token);
  }
}

void Attend(const AttentionArgs& a, int64_t seq, int64_t begin, int64_t end, int64_t kv_head,
            int64_t segment, float* part) {
  const auto attend = [&](auto kind) {
    AttendUpTo<decltype(kind), 2 * kMaxRows>(a, seq, begin, end, kv_head, segment, part);
  };
  switch (a.kv_type) {
    case KVType::kFloat32: return attend(float{});
    case KVType::kBfloat16: return attend(uint16_t{});
    case KVType::kInt8: return attend(int8_t{});
    case KVType::kE4m3: return attend(E4m3{});
    case KVType::kE5m2: return attend(E5m2{});
  }
}

bool Supports(Format f) { return Tile(f, 1) != nullptr; }

#define LLMJAX_STR2(x) #x
#define LLMJAX_STR(x) LLMJAX_STR2(x)
#define LLMJAX_JOIN2(a, b) a##b
#define LLMJAX_JOIN(a, b) LLMJAX_JOIN2(a, b)

}  // namespace

extern const Kernels LLMJAX_JOIN(kKernels_, LLMJAX_ISA);
const Kernels LLMJAX_JOIN(kKernels_, LLMJAX_ISA) = {
    LLMJAX_STR(LLMJAX_ISA), kBlockRows, kTilesAtOnce, RmsNormRow, QuantizeRow, Supports, Matmul,
    Gated, AttentionWrite, Attend, MergeParts, kSegment, Row,
    QuantiseTile, QuantiseGguf,
};
