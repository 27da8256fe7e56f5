// All SwiGLU experts of a layer on the CPU, forward and backward.
//
// Work is cut into blocks of rows of one expert. A block gathers its rows while packing them, and runs both products and
// SwiGLU while its intermediate values are in cache; each slot writes its own row, and a last pass sums a token's rows in
// slot order. Every block computes the same numbers whichever thread runs it: results do not depend on the thread count.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "gemm.h"
#include "swiglu.h"

namespace optimus::cpu {
namespace {

constexpr int64_t kPanelsPerBlock = 16;  // rows of a block: 16 panels, 224 rows with AVX-512
// The element types with a kernel; float64 is the reference's.
#define OPTIMUS_DISPATCH(type, name, ...)                                          \
  AT_DISPATCH_SWITCH(type, name, AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)         \
                     AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__)                  \
                     AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))

constexpr int64_t kDepthBlock = 256;  // rows summed at a time by a weight gradient, so that its panels stay in cache

constexpr int64_t kSumElements = 1 << 17;  // fp32 sums of a weight gradient held by one thread at a time

struct RowBlock {
  int64_t expert, first, rows;  // [first, first + rows) in expert order
};

// Slots in expert order, stable; row r of `hidden` belongs to slot slots[r].
struct Order {
  std::vector<int64_t> slots, offsets;
  std::vector<RowBlock> blocks;
};

Order sort_slots(const at::Tensor& indices, int64_t num_experts) {
  const at::Tensor flat = indices.to(at::kLong).contiguous();
  const int64_t* expert = flat.const_data_ptr<int64_t>();
  const int64_t num_slots = flat.numel();
  Order order;
  order.offsets.assign(num_experts + 1, 0);
  for (int64_t n = 0; n < num_slots; ++n) {
    TORCH_CHECK_VALUE(expert[n] >= -1 && expert[n] < num_experts, "moe_mlp: indices hold ", expert[n],
                      "; expected values in [-1, ", num_experts, ")");
    if (expert[n] >= 0) ++order.offsets[expert[n] + 1];
  }
  for (int64_t e = 0; e < num_experts; ++e) order.offsets[e + 1] += order.offsets[e];
  std::vector<int64_t> next(order.offsets.begin(), order.offsets.end() - 1);
  order.slots.resize(order.offsets[num_experts]);
  for (int64_t n = 0; n < num_slots; ++n)
    if (expert[n] >= 0) order.slots[next[expert[n]]++] = n;
  const int64_t block_rows = kPanelsPerBlock * tile_kernel().rows;
  for (int64_t e = 0; e < num_experts; ++e)
    for (int64_t first = order.offsets[e]; first < order.offsets[e + 1]; first += block_rows)
      order.blocks.push_back({e, first, std::min(block_rows, order.offsets[e + 1] - first)});
  return order;
}

void for_each(int64_t count, const std::function<void(int64_t)>& body) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

// fp32 memory for one call, from the buffers that the calling thread kept of earlier calls: touching fresh pages of the
// operating system would cost about a tenth of a training step. At most kKept buffers stay.
at::Tensor scratch(int64_t numel) {
  constexpr size_t kKept = 8;
  thread_local std::vector<at::Tensor> kept;
  for (const at::Tensor& buffer : kept)
    if (buffer.use_count() == 1 && buffer.numel() >= numel && buffer.numel() <= 2 * numel) return buffer;
  if (kept.size() >= kKept)
    kept.erase(std::remove_if(kept.begin(), kept.end(), [](const at::Tensor& b) { return b.use_count() == 1; }),
               kept.end());
  kept.push_back(at::empty({numel}, at::kFloat));
  return kept.back();
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
    for_each(num_experts, [&](int64_t e) {
      if (order.offsets[e] == order.offsets[e + 1]) return;
      auto row = [&](int64_t r) { return data + (e * rows + r) * cols; };
      if (transposed)
        pack_transposed<T>(row, rows, cols, lanes, out + e * stride);
      else
        pack_direct<T>(row, rows, cols, lanes, out + e * stride);
    });
  }
  const float* of(int64_t expert) const { return storage.const_data_ptr<float>() + expert * stride; }
};

template <typename T>
void store(const float* src, int64_t n, T* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<T>(src[i]);
}

template <typename T>
void load(const T* src, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<float>(src[i]);
}

// out[t] = sum over the local slots of t of scale(slot) * rows[slot]
template <typename T, typename Scale>
void gather_sum(const float* rows, const at::Tensor& indices, int64_t width, Scale scale, T* out) {
  const at::Tensor flat = indices.to(at::kLong).contiguous();
  const int64_t* expert = flat.const_data_ptr<int64_t>();
  const int64_t num_tokens = indices.size(0), topk = indices.size(1);
  at::parallel_for(0, num_tokens, 32, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(width);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t n = t * topk; n < (t + 1) * topk; ++n) {
        if (expert[n] < 0) continue;
        const float weight = scale(n);
        const float* row = rows + n * width;
        for (int64_t d = 0; d < width; ++d) sum[d] += weight * row[d];
      }
      store(sum.data(), width, out + t * width);
    }
  });
}

template <typename T>
void forward(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down, const at::Tensor& weights,
             const at::Tensor& indices, at::Tensor& y, at::Tensor& hidden) {
  const int64_t width = x.size(1), inner = down.size(2), topk = indices.size(1);
  const Order order = sort_slots(indices, down.size(0));
  const PackedWeights<T> up_panels(gate_up, true, order), down_panels(down, true, order);
  const int lanes = tile_kernel().rows;
  at::Tensor slot_rows = scratch(indices.numel() * width);
  const T* x_data = x.const_data_ptr<T>();
  T* hidden_data = hidden.mutable_data_ptr<T>();
  float* slot_data = slot_rows.data_ptr<float>();

  at::parallel_for(0, static_cast<int64_t>(order.blocks.size()), 1, [&](int64_t begin, int64_t end) {
    const int64_t most = kPanelsPerBlock * lanes;
    std::vector<float> panels(most * std::max(width, inner)), gate_up_rows(most * 2 * inner), activation(most * inner),
        out(most * width);
    for (int64_t b = begin; b < end; ++b) {
      const auto [expert, first, rows] = order.blocks[b];
      const int64_t* slots = order.slots.data() + first;
      pack_transposed<T>([&](int64_t r) { return x_data + slots[r] / topk * width; }, rows, width, lanes, panels.data());
      multiply_packed(panels.data(), up_panels.of(expert), rows, 2 * inner, width, gate_up_rows.data(), 2 * inner, false);
      store(gate_up_rows.data(), rows * 2 * inner, hidden_data + first * 2 * inner);
      for (int64_t r = 0; r < rows; ++r) {
        const float* gate = gate_up_rows.data() + r * 2 * inner;
        swiglu_row(gate, gate + inner, inner, activation.data() + r * inner);
      }
      pack_transposed<float>([&](int64_t r) { return activation.data() + r * inner; }, rows, inner, lanes, panels.data());
      multiply_packed(panels.data(), down_panels.of(expert), rows, width, inner, out.data(), width, false);
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(out.data() + r * width, width, slot_data + slots[r] * width);
    }
  });
  const float* weight = weights.const_data_ptr<float>();
  gather_sum(slot_data, indices, width, [&](int64_t n) { return weight[n]; }, y.mutable_data_ptr<T>());
}

// grad[e] = left[rows of e].T @ right[rows of e], cut into blocks of rows of the result.
template <typename T, typename Left, typename Right, typename LeftRow, typename RightRow>
void weight_gradient(const Order& order, int64_t left_width, int64_t right_width, LeftRow left_row, RightRow right_row,
                     at::Tensor& grad) {
  const TileKernel& kernel = tile_kernel();
  const int64_t num_experts = grad.size(0);
  // Packing `right` again for every chunk costs time, so a chunk is as large as the second-level cache likes.
  const int64_t limit = std::max<int64_t>(kSumElements / right_width, 2 * kernel.rows);
  const int64_t chunks = (left_width + limit - 1) / limit;
  const int64_t chunk = round_up((left_width + chunks - 1) / chunks, kernel.rows);
  T* grad_data = grad.mutable_data_ptr<T>();
  at::parallel_for(0, num_experts * chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> left(kDepthBlock * chunk), right(kDepthBlock * round_up(right_width, kernel.cols)),
        sum(chunk * right_width);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t expert = item / chunks, col = item % chunks * chunk, cols = std::min(chunk, left_width - col);
      if (cols <= 0) continue;
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t row = order.offsets[expert]; row < order.offsets[expert + 1]; row += kDepthBlock) {
        const int64_t depth = std::min(kDepthBlock, order.offsets[expert + 1] - row);
        pack_direct<Left>([&](int64_t k) { return left_row(row + k) + col; }, depth, cols, kernel.rows, left.data());
        pack_direct<Right>([&](int64_t k) { return right_row(row + k); }, depth, right_width, kernel.cols, right.data());
        multiply_packed(left.data(), right.data(), cols, right_width, depth, sum.data(), right_width, true);
      }
      store(sum.data(), cols * right_width, grad_data + (expert * left_width + col) * right_width);
    }
  });
}

template <typename T>
void backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
              const at::Tensor& weights, const at::Tensor& indices, const at::Tensor& hidden, at::Tensor& dx,
              at::Tensor& dgate_up, at::Tensor& ddown, at::Tensor& dweights) {
  const int64_t width = x.size(1), inner = down.size(2), topk = indices.size(1);
  const Order order = sort_slots(indices, down.size(0));
  const PackedWeights<T> down_panels(down, false, order), up_panels(gate_up, false, order);
  const int lanes = tile_kernel().rows;
  const int64_t num_rows = static_cast<int64_t>(order.slots.size());
  at::Tensor slot_rows = scratch(indices.numel() * width), dhidden = scratch(num_rows * 2 * inner),
             activation = scratch(num_rows * inner);
  const T *dy_data = dy.const_data_ptr<T>(), *x_data = x.const_data_ptr<T>(), *hidden_data = hidden.const_data_ptr<T>();
  const float* weight = weights.const_data_ptr<float>();
  float *slot_data = slot_rows.data_ptr<float>(), *dhidden_data = dhidden.data_ptr<float>(),
        *activation_data = activation.data_ptr<float>(), *dweight = dweights.mutable_data_ptr<float>();

  at::parallel_for(0, static_cast<int64_t>(order.blocks.size()), 1, [&](int64_t begin, int64_t end) {
    const int64_t most = kPanelsPerBlock * lanes;
    std::vector<float> panels(most * std::max(width, 2 * inner)), grad(most * inner), gate(2 * inner), out(most * width);
    for (int64_t b = begin; b < end; ++b) {
      const auto [expert, first, rows] = order.blocks[b];
      const int64_t* slots = order.slots.data() + first;
      float* block_dhidden = dhidden_data + first * 2 * inner;
      pack_transposed<T>([&](int64_t r) { return dy_data + slots[r] / topk * width; }, rows, width, lanes, panels.data());
      multiply_packed(panels.data(), down_panels.of(expert), rows, inner, width, grad.data(), inner, false);
      for (int64_t r = 0; r < rows; ++r) {
        load(hidden_data + (first + r) * 2 * inner, 2 * inner, gate.data());
        float* dgate = block_dhidden + r * 2 * inner;
        dweight[slots[r]] =
            swiglu_row_backward(gate.data(), gate.data() + inner, grad.data() + r * inner, weight[slots[r]], inner,
                                activation_data + (first + r) * inner, dgate, dgate + inner);
      }
      pack_transposed<float>([&](int64_t r) { return block_dhidden + r * 2 * inner; }, rows, 2 * inner, lanes,
                             panels.data());
      multiply_packed(panels.data(), up_panels.of(expert), rows, width, 2 * inner, out.data(), width, false);
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(out.data() + r * width, width, slot_data + slots[r] * width);
    }
  });
  gather_sum(slot_data, indices, width, [](int64_t) { return 1.0f; }, dx.mutable_data_ptr<T>());
  auto token = [&](int64_t row) { return order.slots[row] / topk; };
  weight_gradient<T, float, T>(
      order, 2 * inner, width, [&](int64_t row) { return dhidden_data + row * 2 * inner; },
      [&](int64_t row) { return x_data + token(row) * width; }, dgate_up);
  weight_gradient<T, T, float>(
      order, width, inner, [&](int64_t row) { return dy_data + token(row) * width; },
      [&](int64_t row) { return activation_data + row * inner; }, ddown);
}

std::tuple<at::Tensor, at::Tensor> moe_mlp(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                                           const at::Tensor& weights, const at::Tensor& indices) {
  at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  at::Tensor hidden = at::empty({indices.numel(), gate_up.size(1)}, x.options());
  OPTIMUS_DISPATCH(x.scalar_type(), "moe_mlp", [&] {
    forward<scalar_t>(x.contiguous(), gate_up.contiguous(), down.contiguous(), weights.contiguous(),
                      indices.contiguous(), y, hidden);
  });
  return {y, hidden};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> moe_mlp_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
    const at::Tensor& weights, const at::Tensor& indices, const at::Tensor& hidden) {
  at::Tensor dx = at::empty_like(x, at::MemoryFormat::Contiguous),
             dgate_up = at::empty_like(gate_up, at::MemoryFormat::Contiguous),
             ddown = at::empty_like(down, at::MemoryFormat::Contiguous),
             dweights = at::zeros_like(weights, at::MemoryFormat::Contiguous);
  OPTIMUS_DISPATCH(x.scalar_type(), "moe_mlp_backward", [&] {
    backward<scalar_t>(dy.contiguous(), x.contiguous(), gate_up.contiguous(), down.contiguous(), weights.contiguous(),
                       indices.contiguous(), hidden, dx, dgate_up, ddown, dweights);
  });
  return {dx, dgate_up, ddown, dweights};
}

}  // namespace

TORCH_LIBRARY_IMPL(optimus, CPU, m) {
  m.impl("moe_mlp", &moe_mlp);
  m.impl("moe_mlp_backward", &moe_mlp_backward);
}

}  // namespace optimus::cpu
