// Parts of the expert layer's grouped products: packed weights, combine (the sum of a token's rows), weight gradients.
// No function here is a whole grouped product: moe_mlp.cpp runs `multiply` (gemm.h) for each block of an expert's rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm.h"
#include "row_order.h"
#include "schedule.h"

namespace optimus::cpu {

template <typename From, typename To>
void convert(const From* src, int64_t n, To* dst) {
  if constexpr (std::is_same_v<From, To>)
    std::copy_n(src, n, dst);
  else
    for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<To>(src[i]);
}

// An expert's weight packed as right operand, for the experts under way. transposed: of weight[e].T, else of weight[e].
template <typename T>
struct PackedWeights {
  const Engine& engine;
  const T* data;
  bool transposed;
  int64_t size, row, lanes, depth, stride;  // size: elements of an expert, row: of a row
  at::Tensor storage;
  PackedWeights(const Engine& engine, const at::Tensor& weight, bool transposed, const Schedule& schedule)
      : engine(engine), data(weight.const_data_ptr<T>()), transposed(transposed),
        size(weight.size(1) * weight.size(2)), row(weight.size(2)), lanes(weight.size(transposed ? 1 : 2)),
        depth(weight.size(transposed ? 2 : 1)), stride(engine.size(Side::kRight, lanes, depth)),
        storage(scratch(schedule.slots() * stride)) {}
  void pack(const Schedule::Task& task) {
    engine.pack(rows_of(data + task.block.expert * size, row), transposed ? Depth::kContiguous : Depth::kStrided,
                Side::kRight, lanes, depth, storage.data_ptr<float>() + task.slot * stride);
  }
  const float* of(const Schedule::Task& task) const { return storage.const_data_ptr<float>() + task.slot * stride; }
};

// out[t] = sum over the local slots of t, in slot order, of weight (null: one) times its row
template <typename From, typename To>
void sum_rows(const From* rows, const Order& order, const float* weights, int64_t num_tokens, int64_t width, To* out) {
  constexpr int64_t kTokens = 64;  // of an item
  const int64_t topk = num_tokens == 0 ? 0 : order.num_slots / num_tokens, items = (num_tokens + kTokens - 1) / kTokens;
  for_each(items, [&](const auto& next) {
    std::vector<float> buffer(width);
    for (int64_t item; (item = next()) < items;)
      for (int64_t t = item * kTokens; t < std::min((item + 1) * kTokens, num_tokens); ++t) {
        float* sum = buffer.data();
        if constexpr (std::is_same_v<To, float>) sum = out + t * width;
        bool first = true;
        for (int64_t n = t * topk; n < (t + 1) * topk; ++n) {
          if (order.rows[n] < 0) continue;
          const float weight = weights ? weights[n] : 1.0f;
          const From* row = rows + order.rows[n] * width;
          if (first)
            for (int64_t d = 0; d < width; ++d) sum[d] = weight * static_cast<float>(row[d]);
          else
            for (int64_t d = 0; d < width; ++d) sum[d] += weight * static_cast<float>(row[d]);
          first = false;
        }
        if (first) std::fill_n(sum, width, 0.0f);
        if constexpr (!std::is_same_v<To, float>) convert(sum, width, out + t * width);
      }
  });
}

// The gradient of the weights of all experts, grad[e] (+)= left[rows of e].T @ right[rows of e], [E, left, right], in
// fp32 or the weights' dtype. Blocks are added in their order and in fp32, a piece of the rows of grad[e] after another.
template <typename T>
class WeightGradient {
 public:
  // add: to what `out` held before. first_piece: where this gradient's counters of the schedule begin.
  WeightGradient(const Engine& engine, const at::Tensor& out, bool add, Schedule& schedule, int64_t first_piece = 0)
      : engine_(engine), schedule_(schedule), add_(add), first_piece_(first_piece), rows_(out.size(1)),
        cols_(out.size(2)) {
    if (out.scalar_type() == at::kFloat) {
      wide_ = out.mutable_data_ptr<float>();
    } else {
      narrow_ = out.mutable_data_ptr<T>();
      sums_ = scratch(schedule.slots() * rows_ * cols_);
    }
  }

  static constexpr int64_t kMostPieces = 16;

  // Adds one block's product of packed operands; depth: the block's rows.
  void add(const Schedule::Task& task, const float* left, const float* right) {
    const int64_t depth = task.block.rows, threads = schedule_.threads();
    const int64_t piece = round_up((rows_ + std::min(threads, kMostPieces) - 1) / std::min(threads, kMostPieces),
                                   engine_.rows * kTiles);
    for (int64_t row = 0; row < rows_; row += piece)
      schedule_.in_order(task, first_piece_ + row / piece, [&] {
        add_rows(task, left + row / engine_.rows * engine_.panel(Side::kLeft, depth), right, row,
                 std::min(piece, rows_ - row));
      });
  }

  // Experts without rows have a gradient of zero.
  void zero_without_rows(const Order& order) const {
    if (add_) return;
    for (int64_t e = 0; e < order.num_experts; ++e) {
      if (order.offsets[e] != order.offsets[e + 1]) continue;
      if (wide_)
        std::fill_n(wide_ + e * rows_ * cols_, rows_ * cols_, 0.0f);
      else
        std::fill_n(narrow_ + e * rows_ * cols_, rows_ * cols_, static_cast<T>(0.0f));
    }
  }

 private:
  static constexpr int64_t kTiles = 3;  // of the engine in a piece, at least: a packed panel serves that many

  void add_rows(const Schedule::Task& task, const float* left, const float* right, int64_t row, int64_t rows) {
    const int64_t at = (task.block.expert * rows_ + row) * cols_, size = rows * cols_;
    float* sum = wide_ ? wide_ + at : sums_.template data_ptr<float>() + (task.slot * rows_ + row) * cols_;
    if (!wide_ && add_ && task.index == 0) convert(narrow_ + at, size, sum);
    multiply(engine_, left, right, rows, cols_, task.block.rows, sum, cols_, add_ || task.index > 0);
    if (!wide_ && task.last) convert(sum, size, narrow_ + at);
  }

  const Engine& engine_;
  Schedule& schedule_;
  const bool add_;
  const int64_t first_piece_, rows_, cols_;
  float* wide_ = nullptr;
  T* narrow_ = nullptr;
  at::Tensor sums_;  // fp32, of the experts under way
};

}  // namespace optimus::cpu
