// The XLA FFI handlers: what a step's compiled program calls.
//
// Padding costs nothing: each handler computes the rows that hold tokens and clears the rest.
#include "call.h"

namespace {

// What is wrong with a step's sequences, or null: the kernels follow them wherever they point.
const char* Fault(const S32& query_starts, const S32& kv_lens, const S32& block_tables,
                  int64_t rows, int64_t page_size, int64_t num_pages) {
  const int64_t S = kv_lens.dimensions()[0], P = block_tables.dimensions()[1];
  const int32_t* starts = query_starts.typed_data();
  if (starts[0] != 0 || starts[S] > rows) return "query_starts lie outside the rows";
  for (int64_t s = 0; s < S; ++s) {
    const int64_t queries = int64_t(starts[s + 1]) - starts[s], len = kv_lens.typed_data()[s];
    if (queries < 0) return "query_starts fall";
    if (queries == 0) continue;
    if (len < queries) return "a sequence is shorter than its queries";
    if (len > P * page_size) return "a sequence is longer than its pages";
    const int32_t* ids = block_tables.typed_data() + s * P;
    bool outside = false;
    for (int64_t p = 0; p * page_size < len; ++p) outside |= uint32_t(ids[p]) >= num_pages;
    if (outside) return "a page id lies outside the pool";
  }
  return nullptr;
}

bool Within(const S32& num_rows, int64_t rows) {
  return num_rows.typed_data()[0] >= 0 && num_rows.typed_data()[0] <= rows;
}

// Shares out sequences, heads and runs of queries; and where those are too few for the threads,
// the segments of a long context too.
void AttendAll(Call& call, const AttentionArgs& a) {
  struct Item {
    int64_t seq, begin, end, kv_head, first, segments;  // segments 0: all, in one piece
    float* parts;
  };
  const Kernels& kernels = BestKernels();
  const int64_t group = a.heads / a.kv_heads, M = a.query_starts[a.num_seqs];
  const bool few = M * a.kv_heads < 4 * call.threads();
  std::vector<Item> items;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    const int64_t queries = a.query_starts[seq + 1] - a.query_starts[seq];
    const int64_t end = a.kv_lens[seq], oldest = end - queries - a.window + 1;
    const int64_t first = a.window && oldest > 0 ? oldest / kernels.segment : 0;
    const int64_t segments = (end + kernels.segment - 1) / kernels.segment - first;
    const bool split = few && queries == 1 && segments > 1 && call.threads() > 1;
    for (int64_t head = 0; head < a.kv_heads; ++head)
      for (int64_t row = 0; row < queries * group; row += 32)
        items.push_back({seq, row, std::min(queries * group, row + 32), head, first,
                         split ? segments : 0, nullptr});
  }
  struct Piece {
    const Item* item;
    int64_t segment;
  };
  std::vector<Piece> pieces;
  bool any_split = false;
  for (Item& t : items) {
    if (t.segments) {
      t.parts = call.Scratch<float>(t.segments * (t.end - t.begin) * (2 + a.head_dim));
      any_split = true;
    }
    for (int64_t s = 0; s < std::max<int64_t>(t.segments, 1); ++s) pieces.push_back({&t, s});
  }
  call.Each(int64_t(pieces.size()), [&](int64_t i) {
    const Item& t = *pieces[i].item;
    const int64_t s = pieces[i].segment;
    float* part = t.segments ? t.parts + s * (t.end - t.begin) * (2 + a.head_dim) : nullptr;
    kernels.attend(a, t.seq, t.begin, t.end, t.kv_head, t.first + s, part);
  });
  if (!any_split) return;
  call.Each(int64_t(items.size()), [&](int64_t i) {
    const Item& t = items[i];
    if (t.segments)
      kernels.merge_parts(a, t.seq, t.begin, t.end, t.kv_head, t.parts, t.segments);
  });
}

ffi::Error AttentionBlock(ffi::ThreadPool pool, F32 x, S32 query_starts, S32 kv_lens,
                          S32 block_tables, F32 cos, F32 sin, F32 norm, U8 wq, U8 wk, U8 wv, U8 wo,
                          F32 bq, F32 bk, F32 bv, F32 bo, F32 q_norm, F32 k_norm, F32 post_norm,
                          ffi::AnyBuffer k_in, ffi::AnyBuffer v_in, Out out,
                          ffi::Result<ffi::AnyBuffer> k_pages, ffi::Result<ffi::AnyBuffer> v_pages,
                          ffi::Span<const int64_t> weights, int64_t layer,
                          int64_t head_dim, int64_t page_size, int64_t kv_type, int64_t window, float eps, float scale, float softcap,
                          float residual_scale) {
  if (k_in.untyped_data() != k_pages->untyped_data() ||
      v_in.untyped_data() != v_pages->untyped_data())
    return ffi::Error::Internal("the KV pages must be donated to the step");
  if (const char* fault = Fault(query_starts, kv_lens, block_tables, x.dimensions()[0], page_size,
                                k_in.dimensions()[1]))
    return ffi::Error::InvalidArgument(fault);
  Call call(pool);
  const Kernels& kernels = BestKernels();
  const int64_t rows = x.dimensions()[0], D = x.dimensions()[1];
  const int64_t S = kv_lens.dimensions()[0];
  const int32_t* starts = query_starts.typed_data();
  const int64_t M = starts[S];
  const Weight q = MakeWeight(wq, weights, 0), k = MakeWeight(wk, weights, 1),
               v = MakeWeight(wv, weights, 2), o = MakeWeight(wo, weights, 3);
  if (k.N < head_dim || k.N % head_dim || q.N % k.N)
    return ffi::Error::InvalidArgument("query heads are no multiple of the key heads");
  const int64_t width = q.N + k.N + v.N;
  float* qkv = call.Scratch<float>(M * width);
  float* attended = call.Scratch<float>(M * q.N);

  const Inputs in = Prepare(call, x.typed_data(), M, D, Optional(norm), eps, {&q, &k, &v});
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
  a.kv_type = KVType(kv_type);
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

  AttendAll(call, a);

  const Inputs mixed = Prepare(call, attended, M, q.N, nullptr, 0, {&o});
  MultiplyAdd(call, mixed, M, rows, o, Optional(bo), Optional(post_norm), eps, x.typed_data(),
              residual_scale, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error MlpBlock(ffi::ThreadPool pool, F32 x, S32 num_tokens, F32 norm, U8 wgate, U8 wup,
                    U8 wdown, F32 bgate, F32 bup, F32 bdown, F32 post_norm, Out out,
                    ffi::Span<const int64_t> weights, int64_t activation, float eps,
                    float residual_scale) {
  if (!Within(num_tokens, x.dimensions()[0]))
    return ffi::Error::InvalidArgument("num_tokens lies outside the rows");
  Call call(pool);
  const Kernels& kernels = BestKernels();
  const int64_t rows = x.dimensions()[0], D = x.dimensions()[1];
  const int64_t M = num_tokens.typed_data()[0];
  const Weight gate = MakeWeight(wgate, weights, 0), up = MakeWeight(wup, weights, 1),
               down = MakeWeight(wdown, weights, 2);
  float* hidden = call.Scratch<float>(M * gate.N);
  const Inputs in = Prepare(call, x.typed_data(), M, D, Optional(norm), eps, {&gate, &up});
  EachPiece(call, M, {{&gate, {}}},
            [&](const Product&, int64_t r0, int64_t r1, int64_t t0, int64_t t1) {
              kernels.gated(gate, up, in.For(gate), in.For(up), r0, r1, t0, t1,
                            Activation(activation), Optional(bgate), Optional(bup), hidden, gate.N);
            });
  const Inputs mid = Prepare(call, hidden, M, gate.N, nullptr, 0, {&down});
  MultiplyAdd(call, mid, M, rows, down, Optional(bdown), Optional(post_norm), eps, x.typed_data(),
              residual_scale, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error Linear(ffi::ThreadPool pool, F32 x, S32 num_rows, U8 data, F32 bias, Out out,
                  ffi::Span<const int64_t> weights) {
  if (!Within(num_rows, x.dimensions()[0]))
    return ffi::Error::InvalidArgument("num_rows lies outside the rows");
  Call call(pool);
  const Weight w = MakeWeight(data, weights, 0);
  const int64_t rows = x.dimensions()[0], M = num_rows.typed_data()[0];
  const Inputs in = Prepare(call, x.typed_data(), M, w.K, nullptr, 0, {&w});
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
        .Attr<int64_t>("layer").Attr<int64_t>("head_dim").Attr<int64_t>("page_size")
        .Attr<int64_t>("kv_type").Attr<int64_t>("window")
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
