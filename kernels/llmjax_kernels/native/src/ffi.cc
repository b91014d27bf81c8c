// The XLA FFI handlers: what a step's compiled program calls.
//
// Padding costs nothing: each handler computes the rows that hold tokens and clears the rest.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using U8 = ffi::Buffer<ffi::U8>;
using Out = ffi::Result<F32>;

constexpr int64_t kRowsOfPiece = 64;  // of a matmul: they stay in a core's cache

const float* Optional(const F32& b) { return b.element_count() ? b.typed_data() : nullptr; }

// One handler's run: threads and scratch memory.
class Call {
 public:
  explicit Call(ffi::ThreadPool& pool) : pool_(pool), team_(Team::Get()) {
    const int limit = team_.limit.load(std::memory_order_relaxed);
    threads_ = limit ? limit : int(pool.num_threads());
    if (threads_ > 1 && !(acquired_ = team_.TryAcquire())) threads_ = 1;
  }
  ~Call() {
    if (acquired_) team_.Release();
  }
  Call(const Call&) = delete;

  int threads() const { return threads_; }

  // fn(i) for i in [0, count), shared out.
  template <typename Fn>
  void Each(int64_t count, const Fn& fn) {
    if (count <= 1 || threads_ <= 1) {
      for (int64_t i = 0; i < count; ++i) fn(i);
      return;
    }
    team_.Run(threads_, count, [this](auto task) { pool_.Schedule(std::move(task)); }, fn);
  }

  // fn(begin, end) over [0, count) in pieces; alone where it is less than two pieces' work.
  template <typename Fn>
  void Ranges(int64_t count, int64_t piece, const Fn& fn) {
    if (count < 2 * piece) return fn(0, count);
    Each((count + piece - 1) / piece,
         [&](int64_t i) { fn(i * piece, std::min(count, (i + 1) * piece)); });
  }

  // Memory of this thread that the next call uses again.
  template <typename T>
  T* Scratch(int64_t count) {
    return reinterpret_cast<T*>(Bytes(count * sizeof(T)));
  }

 private:
  char* Bytes(size_t size) {
    constexpr size_t kAlign = 64;
    thread_local std::vector<std::vector<char>> blocks;
    if (used_ == blocks.size()) blocks.emplace_back();
    std::vector<char>& block = blocks[used_++];
    if (block.size() < size + kAlign) block = std::vector<char>(size + kAlign);
    const auto at = reinterpret_cast<uintptr_t>(block.data());
    return block.data() + (kAlign - at % kAlign) % kAlign;
  }

  ffi::ThreadPool& pool_;
  Team& team_;
  bool acquired_ = false;
  int threads_;
  size_t used_ = 0;
};

// A weight from its buffer and the attributes that describe it: offset, format, N, K, exponent.
Weight MakeWeight(const U8& data, ffi::Span<const int64_t> about, int index) {
  const int64_t* a = about.begin() + 5 * index;
  return {data.typed_data() + a[0], Format::Decode(a[1]), a[2], a[3], std::ldexp(1.0f, int(a[4]))};
}

// Rows of `x`, normed if `norm` or `always`, as the weights that follow read them.
Activations Prepare(Call& call, const float* x, int64_t M, int64_t K, const float* norm, float eps,
                    std::initializer_list<const Weight*> weights) {
  bool codes = false, values = false;
  for (const Weight* w : weights) (w->format.quantised() ? codes : values) = true;
  Activations a{};
  a.values = x;
  float* normed = norm ? call.Scratch<float>(M * K) : nullptr;
  if (codes) {
    a.codes = call.Scratch<int8_t>(M * K);
    a.scales = call.Scratch<float>(M * K / 32);
    a.sums = call.Scratch<int32_t>(M * K / 32);
    a.half_sums = call.Scratch<int32_t>(M * K / 16);
  }
  if (!codes && !norm) return a;
  const Kernels& kernels = BestKernels();
  call.Ranges(M, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x + row * K;
      if (norm) {
        kernels.rms_norm(from, norm, eps, K, normed + row * K);
        from = normed + row * K;
      }
      if (codes) kernels.quantize(from, K, row, a);
    }
  });
  if (norm) a.values = normed;
  return a;
}

struct Product {
  const Weight* weight;
  Epilogue to;
};

// Splits tiles and rows into pieces and calls fn(product, rows begin, end, tiles begin, end).
template <typename Fn>
void EachPiece(Call& call, int64_t M, std::initializer_list<Product> products, const Fn& fn) {
  struct Piece {
    const Product* product;
    int64_t row_begin, row_end, tile_begin, tile_end;
  };
  int64_t tiles = 0;
  for (const Product& p : products) tiles += p.weight->tiles();
  const int64_t row_blocks = (M + kRowsOfPiece - 1) / kRowsOfPiece;
  // Few rows: long runs of weights, which memory delivers best. Many: pieces that balance.
  const int64_t pieces_of_thread = M <= 8 ? 2 : 8;
  const int64_t step = std::max<int64_t>(
      1, (tiles * row_blocks + call.threads() * pieces_of_thread - 1) / (call.threads() * pieces_of_thread));
  std::vector<Piece> pieces;
  for (const Product& p : products)
    for (int64_t tile = 0; tile < p.weight->tiles(); tile += step)
      for (int64_t row = 0; row < M; row += kRowsOfPiece)
        pieces.push_back({&p, row, std::min(M, row + kRowsOfPiece), tile,
                          std::min(p.weight->tiles(), tile + step)});
  call.Each(int64_t(pieces.size()), [&](int64_t i) {
    const Piece& p = pieces[i];
    fn(*p.product, p.row_begin, p.row_end, p.tile_begin, p.tile_end);
  });
}

void Multiply(Call& call, const Activations& a, int64_t M, std::initializer_list<Product> products) {
  const Kernels& kernels = BestKernels();
  EachPiece(call, M, products, [&](const Product& p, int64_t r0, int64_t r1, int64_t t0, int64_t t1) {
    kernels.matmul(*p.weight, a, r0, r1, t0, t1, p.to);
  });
}

// out = residual + residual_scale * norm?(a W^T + bias); the rows behind M are cleared.
void MultiplyAdd(Call& call, const Activations& a, int64_t M, int64_t rows, const Weight& w,
                 const float* bias, const float* post_norm, float eps, const float* residual,
                 float residual_scale, float* out) {
  const int64_t D = w.N;
  if (!post_norm) {
    Multiply(call, a, M, {{&w, {out, D, bias, residual, residual_scale}}});
  } else {
    float* product = call.Scratch<float>(M * D);
    Multiply(call, a, M, {{&w, {product, D, bias, nullptr, 0}}});
    const Kernels& kernels = BestKernels();
    call.Ranges(M, 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        float* p = product + row * D;
        kernels.rms_norm(p, post_norm, eps, D, p);
        for (int64_t i = 0; i < D; ++i)
          out[row * D + i] = residual[row * D + i] + residual_scale * p[i];
      }
    });
  }
  std::memset(out + M * D, 0, (rows - M) * D * sizeof(float));
}

ffi::Error AttentionBlock(ffi::ThreadPool pool, F32 x, S32 query_starts, S32 kv_lens,
                          S32 block_tables, F32 cos, F32 sin, F32 norm, U8 wq, U8 wk, U8 wv, U8 wo,
                          F32 bq, F32 bk, F32 bv, F32 bo, F32 q_norm, F32 k_norm, F32 post_norm,
                          ffi::AnyBuffer k_in, ffi::AnyBuffer v_in, Out out,
                          ffi::Result<ffi::AnyBuffer> k_pages, ffi::Result<ffi::AnyBuffer> v_pages,
                          ffi::Span<const int64_t> weights, int64_t layer,
                          int64_t head_dim, int64_t page_size, int64_t window, float eps, float scale, float softcap,
                          float residual_scale) {
  if (k_in.untyped_data() != k_pages->untyped_data() ||
      v_in.untyped_data() != v_pages->untyped_data())
    return ffi::Error::Internal("the KV pages must be donated to the step");
  Call call(pool);
  const Kernels& kernels = BestKernels();
  const int64_t rows = x.dimensions()[0], D = x.dimensions()[1];
  const int64_t S = kv_lens.dimensions()[0];
  const int32_t* starts = query_starts.typed_data();
  const int64_t M = starts[S];
  const Weight q = MakeWeight(wq, weights, 0), k = MakeWeight(wk, weights, 1),
               v = MakeWeight(wv, weights, 2), o = MakeWeight(wo, weights, 3);
  const int64_t width = q.N + k.N + v.N;
  float* qkv = call.Scratch<float>(M * width);
  float* attended = call.Scratch<float>(M * q.N);

  const Activations in = Prepare(call, x.typed_data(), M, D, Optional(norm), eps, {&q, &k, &v});
  Multiply(call, in, M,
           {{&q, {qkv, width, Optional(bq), nullptr, 0}},
            {&k, {qkv + q.N, width, Optional(bk), nullptr, 0}},
            {&v, {qkv + q.N + k.N, width, Optional(bv), nullptr, 0}}});

  AttentionArgs a{};
  a.heads = q.N / head_dim;
  a.kv_heads = k.N / head_dim;
  a.head_dim = head_dim;
  a.rotary_half = cos.dimensions()[1];
  a.page_size = page_size;
  a.pages_per_seq = block_tables.dimensions()[1];
  a.num_seqs = S;
  a.scale = scale;
  a.softcap = softcap;
  a.window = window;
  a.qk_norm_eps = eps;
  a.q = qkv;
  a.k = qkv + q.N;
  a.v = qkv + q.N + k.N;
  a.q_stride = a.kv_stride = width;
  a.cos = cos.typed_data();
  a.sin = sin.typed_data();
  // Norms are over each head, or over all heads at once.
  const bool over_heads = int64_t(q_norm.element_count()) == head_dim;
  a.q_norm = over_heads ? Optional(q_norm) : nullptr;
  a.k_norm = over_heads ? Optional(k_norm) : nullptr;
  const bool over_all = q_norm.element_count() && !over_heads;
  a.query_starts = starts;
  a.kv_lens = kv_lens.typed_data();
  a.block_tables = block_tables.typed_data();
  a.kv_type = k_in.element_type() == ffi::BF16 ? KVType::kBfloat16 : KVType::kFloat32;
  const size_t layer_bytes = k_in.size_bytes() / k_in.dimensions()[0] * layer;
  a.k_pages = static_cast<char*>(k_pages->untyped_data()) + layer_bytes;
  a.v_pages = static_cast<char*>(v_pages->untyped_data()) + layer_bytes;
  a.out = attended;

  call.Ranges(M, 8, [&](int64_t begin, int64_t end) {
    int64_t seq = std::upper_bound(starts, starts + S + 1, int32_t(begin)) - starts - 1;
    for (int64_t token = begin; token < end; ++token) {
      while (starts[seq + 1] <= token) ++seq;
      if (over_all) {
        kernels.rms_norm(a.q + token * width, q_norm.typed_data(), eps, q.N, a.q + token * width);
        kernels.rms_norm(a.k + token * width, k_norm.typed_data(), eps, k.N, a.k + token * width);
      }
      kernels.attention_write(a, seq, token);
    }
  });

  struct Item {
    int64_t seq, begin, end, kv_head;
  };
  std::vector<Item> items;
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t seq = 0; seq < S; ++seq) {
    const int64_t queries = (starts[seq + 1] - starts[seq]) * group;
    for (int64_t head = 0; head < a.kv_heads; ++head)
      for (int64_t row = 0; row < queries; row += 32)
        items.push_back({seq, row, std::min(queries, row + 32), head});
  }
  call.Each(int64_t(items.size()), [&](int64_t i) {
    const Item& t = items[i];
    kernels.attend(a, t.seq, t.begin, t.end, t.kv_head);
  });

  const Activations mixed = Prepare(call, attended, M, q.N, nullptr, 0, {&o});
  MultiplyAdd(call, mixed, M, rows, o, Optional(bo), Optional(post_norm), eps, x.typed_data(),
              residual_scale, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error MlpBlock(ffi::ThreadPool pool, F32 x, S32 num_tokens, F32 norm, U8 wgate, U8 wup,
                    U8 wdown, F32 bgate, F32 bup, F32 bdown, F32 post_norm, Out out,
                    ffi::Span<const int64_t> weights, int64_t activation, float eps,
                    float residual_scale) {
  Call call(pool);
  const Kernels& kernels = BestKernels();
  const int64_t rows = x.dimensions()[0], D = x.dimensions()[1];
  const int64_t M = num_tokens.typed_data()[0];
  const Weight gate = MakeWeight(wgate, weights, 0), up = MakeWeight(wup, weights, 1),
               down = MakeWeight(wdown, weights, 2);
  float* hidden = call.Scratch<float>(M * gate.N);
  const Activations in = Prepare(call, x.typed_data(), M, D, Optional(norm), eps, {&gate, &up});
  EachPiece(call, M, {{&gate, {}}},
            [&](const Product&, int64_t r0, int64_t r1, int64_t t0, int64_t t1) {
              kernels.gated(gate, up, in, r0, r1, t0, t1, Activation(activation), Optional(bgate),
                            Optional(bup), hidden, gate.N);
            });
  const Activations mid = Prepare(call, hidden, M, gate.N, nullptr, 0, {&down});
  MultiplyAdd(call, mid, M, rows, down, Optional(bdown), Optional(post_norm), eps, x.typed_data(),
              residual_scale, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error Linear(ffi::ThreadPool pool, F32 x, S32 num_rows, U8 data, F32 bias, Out out,
                  ffi::Span<const int64_t> weights) {
  Call call(pool);
  const Weight w = MakeWeight(data, weights, 0);
  const int64_t rows = x.dimensions()[0], M = num_rows.typed_data()[0];
  const Activations in = Prepare(call, x.typed_data(), M, w.K, nullptr, 0, {&w});
  Multiply(call, in, M, {{&w, {out->typed_data(), w.N, Optional(bias), nullptr, 0}}});
  std::memset(out->typed_data() + M * w.N, 0, (rows - M) * w.N * sizeof(float));
  return ffi::Error::Success();
}

ffi::Error Embed(ffi::ThreadPool pool, S32 tokens, U8 data, Out out,
                 ffi::Span<const int64_t> weights) {
  Call call(pool);
  const Weight w = MakeWeight(data, weights, 0);
  const int64_t T = tokens.dimensions()[0];
  call.Ranges(T, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = std::clamp<int64_t>(tokens.typed_data()[t], 0, w.N - 1);
      BestKernels().row(w, row, out->typed_data() + t * w.K);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

#define ARG(T) .Arg<T>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    llmjax_attention_block, AttentionBlock,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
        ARG(F32) ARG(S32) ARG(S32) ARG(S32) ARG(F32) ARG(F32) ARG(F32)  // x .. norm
        ARG(U8) ARG(U8) ARG(U8) ARG(U8) ARG(F32) ARG(F32) ARG(F32) ARG(F32)
        ARG(F32) ARG(F32) ARG(F32) ARG(ffi::AnyBuffer) ARG(ffi::AnyBuffer)
        .Ret<F32>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
        .Attr<ffi::Span<const int64_t>>("weights")
        .Attr<int64_t>("layer").Attr<int64_t>("head_dim").Attr<int64_t>("page_size").Attr<int64_t>("window")
        .Attr<float>("eps").Attr<float>("scale").Attr<float>("softcap")
        .Attr<float>("residual_scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    llmjax_mlp_block, MlpBlock,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
        ARG(F32) ARG(S32) ARG(F32) ARG(U8) ARG(U8) ARG(U8) ARG(F32) ARG(F32) ARG(F32) ARG(F32)
        .Ret<F32>()
        .Attr<ffi::Span<const int64_t>>("weights").Attr<int64_t>("activation")
        .Attr<float>("eps").Attr<float>("residual_scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_linear, Linear,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
                                  ARG(F32) ARG(S32) ARG(U8) ARG(F32)
                                  .Ret<F32>().Attr<ffi::Span<const int64_t>>("weights"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_embed, Embed,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
                                  ARG(S32) ARG(U8)
                                  .Ret<F32>().Attr<ffi::Span<const int64_t>>("weights"));

#define EXPORT extern "C"

EXPORT const char* llmjax_isa() { return BestKernels().name; }

EXPORT void llmjax_set_threads(int threads) { Team::Get().limit.store(threads); }

EXPORT bool llmjax_supports(int64_t format) {
  return BestKernels().supports(Format::Decode(format));
}
