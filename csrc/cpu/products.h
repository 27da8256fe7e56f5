// The pieces of the expert layer that moe_mlp.cpp and grouped.cpp share: weights packed, rows summed, weights' gradients.
#pragma once

#include <ATen/Parallel.h>

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

// The weight of every expert that has rows, packed as right operand. transposed: of weight[e].T, else of weight[e].
template <typename T>
struct PackedWeights {
  const Engine& engine;
  const Order& order;
  const T* data;
  bool transposed;
  int64_t size, row, lanes, depth, stride;  // size: elements of an expert, row: of a row
  at::Tensor storage;
  PackedWeights(const Engine& engine, const at::Tensor& weight, bool transposed, const Order& order)
      : engine(engine), order(order), data(weight.const_data_ptr<T>()), transposed(transposed),
        size(weight.size(1) * weight.size(2)), row(weight.size(2)), lanes(weight.size(transposed ? 1 : 2)),
        depth(weight.size(transposed ? 2 : 1)), stride(engine.size(Side::kRight, lanes, depth)),
        storage(scratch(weight.size(0) * stride)) {}
  // Packs the experts whose first block is among these: shortly before their blocks, so that they are still in cache.
  void pack(const RowBlock* blocks, int64_t num_blocks) {
    std::vector<int64_t> experts;
    for (int64_t b = 0; b < num_blocks; ++b)
      if (blocks[b].first == order.offsets[blocks[b].expert]) experts.push_back(blocks[b].expert);
    const auto count = static_cast<int64_t>(experts.size());
    float* out = storage.data_ptr<float>();
    for_each(count, [&](const auto& next) {
      for (int64_t item; (item = next()) < count;) {
        const int64_t e = experts[item];
        engine.pack(rows_of(data + e * size, row), transposed ? Depth::kAlongRows : Depth::kAcrossRows, Side::kRight,
                    lanes, depth, out + e * stride);
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

// One operand of the weights' gradients, [rows, width], for the blocks of a slab: the depth of that product is the rows.
struct PackedRows {
  const Engine& engine;
  Side side;
  int64_t width, stride;
  at::Tensor storage;
  PackedRows(const Engine& engine, Side side, int64_t width, int64_t num_blocks, int64_t most_rows)
      : engine(engine), side(side), width(width), stride(engine.size(side, width, most_rows)),
        storage(scratch(num_blocks * stride)) {}
  void pack(int64_t block, const Source& rows, int64_t num_rows) {
    engine.pack(rows, Depth::kAcrossRows, side, width, num_rows, storage.data_ptr<float>() + block * stride);
  }
  const float* of(int64_t block) const { return storage.const_data_ptr<float>() + block * stride; }
};

// Calls body(blocks, count) for one slab of blocks after another: few enough for the operands of the weights' gradients
// and the weights to stay in the caches of the threads that packed them. Slabs change no value: blocks are summed in their order.
template <typename Body>
void for_each_slab(const std::vector<RowBlock>& blocks, bool whole, int64_t per_thread, Body body) {
  const auto total = static_cast<int64_t>(blocks.size());
  const int64_t most = whole ? total : per_thread * at::get_num_threads();
  for (int64_t first = 0; first < total; first += most) body(blocks.data() + first, std::min(most, total - first));
}

// grad[e] (+)= left[rows of e].T @ right[rows of e] over the blocks of a slab, which hold all rows of their experts unless
// grad is fp32. Sums are fp32. add: to what grad held before the first block of an expert.
template <typename To>
void add_weight_gradient(const Order& order, const RowBlock* blocks, int64_t num_blocks, const PackedRows& left,
                         const PackedRows& right, bool add, To* grad) {
  constexpr int64_t kChunk = 96;  // rows of the result of an item
  const Engine& engine = left.engine;
  const int64_t chunk = round_up(kChunk, engine.rows), chunks = (left.width + chunk - 1) / chunk;
  std::vector<int64_t> firsts;  // block of each expert
  for (int64_t b = 0; b < num_blocks; ++b)
    if (b == 0 || blocks[b].expert != blocks[b - 1].expert) firsts.push_back(b);
  const int64_t items = static_cast<int64_t>(firsts.size()) * chunks;
  for_each(items, [&](const auto& next) {
    const at::Tensor sum_buffer = std::is_same_v<To, float> ? at::Tensor() : scratch(chunk * right.width);
    for (int64_t item; (item = next()) < items;) {
      int64_t b = firsts[item / chunks];
      const int64_t e = blocks[b].expert, row = item % chunks * chunk, rows = std::min(chunk, left.width - row);
      To* out = grad + (e * left.width + row) * right.width;
      bool accumulate = add || blocks[b].first > order.offsets[e];
      float* sum;
      if constexpr (std::is_same_v<To, float>) {
        sum = out;
      } else {
        sum = sum_buffer.template data_ptr<float>();
        if (accumulate) convert(out, rows * right.width, sum);
      }
      for (; b < num_blocks && blocks[b].expert == e; ++b, accumulate = true) {
        const int64_t depth = blocks[b].rows;
        const float* panels = left.of(b) + row / engine.rows * engine.panel(Side::kLeft, depth);
        multiply(engine, panels, right.of(b), rows, right.width, depth, sum, right.width, accumulate);
      }
      if constexpr (!std::is_same_v<To, float>) convert(sum, rows * right.width, out);
    }
  });
}

// The gradient of an expert without rows, of `size` elements each.
template <typename To>
void zero_without_rows(const Order& order, int64_t size, To* grad) {
  for (int64_t e = 0; e < order.num_experts; ++e)
    if (order.offsets[e] == order.offsets[e + 1]) std::fill_n(grad + e * size, size, static_cast<To>(0.0f));
}

}  // namespace optimus::cpu
