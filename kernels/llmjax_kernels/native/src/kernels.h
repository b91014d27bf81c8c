// What one instruction set offers, as plain functions; dispatch.cc picks a table at load time.
#pragma once

#include <cstdint>

#include "format.h"
#include "gguf_blocks.h"

// Activations [M, K] as matmuls read them: float rows, or 8-bit codes in groups of 32. Of those
// 16 rows lie together: the places of rows that are computed at once differ by constants, and a
// matrix unit loads a group of theirs as it is.
struct Activations {
  const float* values;
  int8_t* codes;       // [M / 16, K / 32, 16, 32]
  float* scales;       // [M / 16, K / 32, 16]
  float* sums;         // [M / 16, K / 32, 16] of the codes
  float* half_sums;    // [M / 16, K / 16, 16]

  static constexpr int64_t kRows = 16;

  // Rows that there must be room for.
  LLMJAX_INLINE static int64_t Padded(int64_t M) { return (M + kRows - 1) / kRows * kRows; }
  // Where group `group` of a row is, of the `groups` that a row has.
  LLMJAX_INLINE static int64_t At(int64_t row, int64_t groups, int64_t group) {
    return (row / kRows * groups + group) * kRows + row % kRows;
  }
};

enum class Activation : int64_t { kNone = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3 };

// What becomes of a product before it is stored.
struct Epilogue {
  float* out;             // [M, stride]
  int64_t stride;
  const float* bias;      // [N] or null
  const float* residual;  // [M, stride] or null: out = residual + residual_scale * product
  float residual_scale;
};

enum class KVType : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kE4m3 = 3, kE5m2 = 4 };

// One layer's attention; see ffi.cc for how a step calls it.
struct AttentionArgs {
  // Geometry: pages hold [pages, heads, page / 16] blocks; see kv.h.
  int64_t heads, kv_heads, head_dim, rotary_half, page_size, pages_per_seq, num_seqs;
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
  float qk_norm_eps;
  // Inputs.
  float* q;              // [T, heads, head_dim], rotated in place
  float* k;              // [T, kv_heads, head_dim], likewise
  const float* v;        // [T, kv_heads, head_dim]
  int64_t q_stride, kv_stride;
  const float* cos;      // [T, rotary_half]
  const float* sin;
  const float* q_norm;   // per-head norms [head_dim] or null
  const float* k_norm;
  const int32_t* query_starts;  // [S + 1]
  const int32_t* kv_lens;       // [S]
  const int32_t* block_tables;  // [S, P]
  KVType kv_type;
  void* k_pages;
  void* v_pages;
  float* out;            // [T, heads * head_dim]
};

struct Kernels {
  const char* name;
  int64_t rows_of_piece;   // of a matmul that one thread best does at once
  int64_t tiles_at_once;   // a piece has a multiple of these
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* y);
  void (*quantize)(const float* x, const int32_t* order, int64_t K, int64_t row,
                   const Activations& out);
  bool (*supports)(Format format);
  void (*matmul)(const Weight& w, const Activations& a, int64_t row_begin, int64_t row_end,
                 int64_t tile_begin, int64_t tile_end, const Epilogue& to);
  void (*gated)(const Weight& gate, const Weight& up, const Activations& for_gate,
                const Activations& for_up, int64_t row_begin, int64_t row_end, int64_t tile_begin,
                int64_t tile_end, Activation activation, const float* gate_bias,
                const float* up_bias, float* out, int64_t stride);
  // Rotates and stores one token's keys and values, and rotates its queries.
  void (*attention_write)(const AttentionArgs& args, int64_t seq, int64_t token);
  // Attends rows of one sequence and kv head: row r is query r / (heads / kv_heads) of the run.
  // With `part` only what they see of one segment of keys, for merge_parts to put together.
  void (*attend)(const AttentionArgs& args, int64_t seq, int64_t row_begin, int64_t row_end,
                 int64_t kv_head, int64_t segment, float* part);
  void (*merge_parts)(const AttentionArgs& args, int64_t seq, int64_t row_begin, int64_t row_end,
                      int64_t kv_head, const float* parts, int64_t segments);
  int64_t segment;  // keys of one
  // out[D] of one row of a packed weight.
  void (*row)(const Weight& w, int64_t row, float* out);
  // Makes a tile of up to 16 float rows [count, K]: 8 bits around a zero, or 4 bits with minima.
  void (*quantise_tile)(const float* rows, int64_t count, int64_t K, Format format, uint8_t* tile);
  // Makes GGUF blocks of float rows [N, K]; importance is of each input, or null. False where a
  // scale is too large for a half float.
  bool (*quantise_gguf)(GgufType type, const float* rows, int64_t N, int64_t K,
                        const float* importance, uint8_t* out);
};

// The best table this processor can run.
const Kernels& BestKernels();
