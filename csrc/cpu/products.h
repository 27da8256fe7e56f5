// The pieces of the expert layer that moe_mlp.cpp and grouped.cpp share: rows gathered, summed and multiplied.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm.h"
#include "order.h"

namespace optimus::cpu {

template <typename From, typename To>
void convert(const From* src, int64_t n, To* dst) {
  if constexpr (std::is_same_v<From, To>)
    std::copy_n(src, n, dst);
  else
    for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<To>(src[i]);
}

// B panels of every expert that has rows. transposed: the operand is weight[e].T, else weight[e] as stored.
template <typename T>
struct PackedWeights {
  at::Tensor storage;
  int64_t stride = 0;
  PackedWeights(const at::Tensor& weight, bool transposed, const Order& order) {
    const int64_t num_experts = weight.size(0), rows = weight.size(1), cols = weight.size(2);
    const int lanes = tile_kernel().cols;
    stride = transposed ? round_up(rows, lanes) * cols : round_up(cols, lanes) * rows;
    storage = scratch(num_experts * stride);
    float* out = storage.data_ptr<float>();
    const T* data = weight.const_data_ptr<T>();
    for_each(num_experts, [&](const auto& next) {
      for (int64_t e; (e = next()) < num_experts;) {
        if (order.offsets[e] == order.offsets[e + 1]) continue;
        const auto row = [&](int64_t r) { return data + (e * rows + r) * cols; };
        if (transposed)
          pack_transposed<T>(row, rows, cols, lanes, out + e * stride);
        else
          pack_direct<T>(row, rows, cols, lanes, out + e * stride);
      }
    });
  }
  const float* of(int64_t expert) const { return storage.const_data_ptr<float>() + expert * stride; }
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

// grad[e] (+)= left[rows of e].T @ right[rows of e], in blocks of rows of the result. left: [R, left_width], fp32 rows
// in expert order; right_row(r): the start of row r. Sums are fp32; an expert without rows gets zeros.
template <typename Right, typename To, typename RightRow>
void weight_gradient(const Order& order, const float* left, int64_t left_width, int64_t right_width, RightRow right_row,
                     bool accumulate, To* grad) {
  constexpr int64_t kDepth = 256;             // rows summed at a time, so that a panel of them stays in cache
  constexpr int64_t kSumElements = 1 << 17;   // of the result held by one thread at a time
  const TileKernel& kernel = tile_kernel();
  // Packing `right` again for every chunk costs time, so a chunk is as large as the second-level cache likes.
  const int64_t limit = std::max<int64_t>(kSumElements / right_width, 2 * kernel.rows);
  const int64_t chunks = (left_width + limit - 1) / limit;
  const int64_t chunk = round_up((left_width + chunks - 1) / chunks, kernel.rows);
  const int64_t items = order.num_experts * chunks;
  for_each(items, [&](const auto& next) {
    const at::Tensor right_buffer = scratch(kDepth * round_up(right_width, kernel.cols));
    const at::Tensor sum_buffer = std::is_same_v<To, float> ? at::Tensor() : scratch(chunk * right_width);
    float* right = right_buffer.template data_ptr<float>();
    for (int64_t item; (item = next()) < items;) {
      const int64_t e = item / chunks, col = item % chunks * chunk, cols = std::min(chunk, left_width - col);
      if (cols <= 0) continue;
      To* out = grad + (e * left_width + col) * right_width;
      float* sum;
      if constexpr (std::is_same_v<To, float>) {
        sum = out;
      } else {
        sum = sum_buffer.template data_ptr<float>();
        if (accumulate) convert(out, cols * right_width, sum);
      }
      bool add = accumulate;
      for (int64_t row = order.offsets[e]; row < order.offsets[e + 1]; row += kDepth, add = true) {
        const int64_t depth = std::min<int64_t>(kDepth, order.offsets[e + 1] - row);
        pack_direct<Right>([&](int64_t k) { return right_row(row + k); }, depth, right_width, kernel.cols, right);
        multiply({left + row * left_width + col, left_width, false}, right, cols, right_width, depth, sum, right_width,
                 add);
      }
      if (!add) std::fill_n(sum, cols * right_width, 0.0f);
      if constexpr (!std::is_same_v<To, float>) convert(sum, cols * right_width, out);
    }
  });
}

}  // namespace optimus::cpu
