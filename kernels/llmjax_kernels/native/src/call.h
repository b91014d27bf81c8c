// What every handler does: share its work among the team's threads, prepare activations, multiply.
#pragma once

#include <algorithm>
#include <cmath>
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

// A weight from its buffer and the attributes that describe it: offset, format, N, K, exponent,
// and the offset of its order, -1 for none.
Weight MakeWeight(const U8& data, ffi::Span<const int64_t> about, int index) {
  const int64_t* a = about.begin() + 6 * index;
  const uint8_t* order = a[5] < 0 ? nullptr : data.typed_data() + a[5];
  return {data.typed_data() + a[0],      Format::Decode(a[1]), a[2], a[3],
          std::ldexp(1.0f, int(a[4])), reinterpret_cast<const int32_t*>(order)};
}

// Rows as several weights read them. Those that have the same order of inputs share them.
class Inputs {
 public:
  // Adds what `w` reads, with room for the codes of M rows where it is quantised.
  void Add(Call& call, const Weight& w, int64_t M) {
    int i = 0;
    while (i < count_ && orders_[i] != w.order) ++i;
    if (i == count_) orders_[count_++] = w.order;
    Activations& a = made_[i];
    if (!w.format.quantised() || a.codes) return;
    const int64_t room = Activations::Padded(M) * w.K;
    a.codes = call.Scratch<int8_t>(room);
    a.scales = call.Scratch<float>(room / 32);
    a.sums = call.Scratch<float>(room / 32);
    a.half_sums = call.Scratch<float>(room / 16);
  }
  const Activations& For(const Weight& w) const {
    int i = 0;
    while (orders_[i] != w.order) ++i;
    return made_[i];
  }
  bool codes() const {
    bool any = false;
    for (const Activations& a : made_) any |= a.codes != nullptr;
    return any;
  }
  void SetValues(const float* x) {
    for (Activations& a : made_) a.values = x;
  }
  void Quantize(const float* x, int64_t K, int64_t row) const {
    for (int i = 0; i < count_; ++i)
      if (made_[i].codes) BestKernels().quantize(x, orders_[i], K, row, made_[i]);
  }

 private:
  static constexpr int kMost = 3;  // weights of one input: queries, keys, values
  int count_ = 0;
  const int32_t* orders_[kMost] = {};
  Activations made_[kMost] = {};
};

// Rows of `x`, normed if `norm`, as the weights that follow read them.
Inputs Prepare(Call& call, const float* x, int64_t M, int64_t K, const float* norm, float eps,
               std::initializer_list<const Weight*> weights) {
  Inputs in;
  for (const Weight* w : weights) in.Add(call, *w, M);
  float* normed = norm ? call.Scratch<float>(M * K) : nullptr;
  in.SetValues(norm ? normed : x);
  if (!in.codes() && !norm) return in;
  call.Ranges(M, Activations::kRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x + row * K;
      if (norm) {
        BestKernels().rms_norm(from, norm, eps, K, normed + row * K);
        from = normed + row * K;
      }
      in.Quantize(from, K, row);
    }
  });
  return in;
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
  const Kernels& kernels = BestKernels();
  const int64_t rows = kernels.rows_of_piece, at_once = kernels.tiles_at_once;
  int64_t tiles = 0;
  for (const Product& p : products) tiles += p.weight->tiles();
  // Few rows: long runs of weights, which memory delivers best. Many: pieces that balance.
  const int64_t count = call.threads() * (M <= 8 ? 2 : 8), row_blocks = (M + rows - 1) / rows;
  const int64_t share = std::max<int64_t>(1, (tiles * row_blocks + count - 1) / count);
  const int64_t step = (share + at_once - 1) / at_once * at_once;
  std::vector<Piece> pieces;
  for (const Product& p : products)
    for (int64_t tile = 0; tile < p.weight->tiles(); tile += step)
      for (int64_t row = 0; row < M; row += rows)
        pieces.push_back(
            {&p, row, std::min(M, row + rows), tile, std::min(p.weight->tiles(), tile + step)});
  call.Each(int64_t(pieces.size()), [&](int64_t i) {
    const Piece& p = pieces[i];
    fn(*p.product, p.row_begin, p.row_end, p.tile_begin, p.tile_end);
  });
}

void Multiply(Call& call, const Inputs& in, int64_t M, std::initializer_list<Product> products) {
  const Kernels& kernels = BestKernels();
  EachPiece(call, M, products, [&](const Product& p, int64_t r0, int64_t r1, int64_t t0, int64_t t1) {
    kernels.matmul(*p.weight, in.For(*p.weight), r0, r1, t0, t1, p.to);
  });
}

// out = residual + residual_scale * norm?(a W^T + bias); the rows behind M are cleared.
void MultiplyAdd(Call& call, const Inputs& in, int64_t M, int64_t rows, const Weight& w,
                 const float* bias, const float* post_norm, float eps, const float* residual,
                 float residual_scale, float* out) {
  const int64_t D = w.N;
  if (!post_norm) {
    Multiply(call, in, M, {{&w, {out, D, bias, residual, residual_scale}}});
  } else {
    float* product = call.Scratch<float>(M * D);
    Multiply(call, in, M, {{&w, {product, D, bias, nullptr, 0}}});
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

}  // namespace
