// All SwiGLU experts of a layer on the CPU, forward and backward.
//
// Work is cut into blocks of rows of one expert. A block gathers its rows and runs both products and SwiGLU while its
// values are in cache; a last pass sums a token's rows in slot order. Every block computes the same numbers whichever
// thread runs it: results do not depend on the thread count.
#include <torch/library.h>

#include "products.h"
#include "swiglu.h"

namespace optimus::cpu {
namespace {

// Rows of tokens, in the order of `slots`, as fp32.
template <typename T>
void gather(const T* x, const int32_t* slots, int64_t rows, int64_t topk, int64_t width, float* out) {
  for (int64_t r = 0; r < rows; ++r) convert(x + slots[r] / topk * width, width, out + r * width);
}

int64_t most_rows(const std::vector<RowBlock>& blocks) {
  int64_t most = 0;
  for (const RowBlock& block : blocks) most = std::max(most, block.rows);
  return most;
}

template <typename T>
void forward(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down, const at::Tensor& weights,
             const at::Tensor& indices, at::Tensor& y, at::Tensor& hidden) {
  const int64_t width = x.size(1), inner = down.size(2), topk = indices.size(1);
  const SortedSlots sorted = sort_slots(indices, down.size(0));
  const Order order = sorted.view();
  const PackedWeights<T> up_panels(gate_up, true, order), down_panels(down, true, order);
  const std::vector<RowBlock> blocks = order.blocks();
  const auto count = static_cast<int64_t>(blocks.size());
  const int64_t most = most_rows(blocks);
  const at::Tensor out_rows = scratch(order.num_rows * width);
  const T* x_data = x.const_data_ptr<T>();
  T* hidden_data = hidden.mutable_data_ptr<T>();
  float* out_data = out_rows.data_ptr<float>();

  for_each(count, [&](const auto& next) {
    const at::Tensor x_buffer = scratch(most * width), activation_buffer = scratch(most * inner),
                     hidden_buffer = std::is_same_v<T, float> ? at::Tensor() : scratch(most * 2 * inner);
    float *x_rows = x_buffer.template data_ptr<float>(), *activation = activation_buffer.template data_ptr<float>();
    for (int64_t b; (b = next()) < count;) {
      const auto [expert, first, rows] = blocks[b];
      float* gate_up_rows;
      if constexpr (std::is_same_v<T, float>)
        gate_up_rows = hidden_data + first * 2 * inner;
      else
        gate_up_rows = hidden_buffer.template data_ptr<float>();
      gather(x_data, order.slots + first, rows, topk, width, x_rows);
      multiply({x_rows, width, true}, up_panels.of(expert), rows, 2 * inner, width, gate_up_rows, 2 * inner, false);
      for (int64_t r = 0; r < rows; ++r) {
        const float* gate = gate_up_rows + r * 2 * inner;
        swiglu_row(gate, gate + inner, inner, activation + r * inner);
      }
      if constexpr (!std::is_same_v<T, float>)
        convert(gate_up_rows, rows * 2 * inner, hidden_data + first * 2 * inner);
      multiply({activation, inner, true}, down_panels.of(expert), rows, width, inner, out_data + first * width, width,
               false);
    }
  });
  sum_rows(out_data, order, weights.const_data_ptr<float>(), x.size(0), width, y.mutable_data_ptr<T>());
}

// Where the gradient of a weight goes: fp32 or the weight's dtype, written or added to what is there.
struct WeightGradient {
  const at::Tensor& out;
  bool add;
  template <typename T, typename Run>
  void write(const Run& run) const {
    if (out.scalar_type() == at::kFloat)
      run(add, out.mutable_data_ptr<float>());
    else
      run(add, out.mutable_data_ptr<T>());
  }
};

template <typename T>
void backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
              const at::Tensor& weights, const at::Tensor& indices, const at::Tensor& hidden, at::Tensor& dx,
              const WeightGradient& dgate_up, const WeightGradient& ddown, at::Tensor& dweights) {
  const int64_t width = x.size(1), inner = down.size(2), topk = indices.size(1);
  const SortedSlots sorted = sort_slots(indices, down.size(0));
  const Order order = sorted.view();
  const PackedWeights<T> down_panels(down, false, order), up_panels(gate_up, false, order);
  const std::vector<RowBlock> blocks = order.blocks();
  const auto count = static_cast<int64_t>(blocks.size());
  const int64_t most = most_rows(blocks);
  const at::Tensor dy_buffer = scratch(order.num_rows * width), dx_buffer = scratch(order.num_rows * width),
                   dhidden_buffer = scratch(order.num_rows * 2 * inner),
                   activation_buffer = scratch(order.num_rows * inner);
  float *dy_rows = dy_buffer.data_ptr<float>(), *dx_rows = dx_buffer.data_ptr<float>(),
        *dhidden = dhidden_buffer.data_ptr<float>(), *activation = activation_buffer.data_ptr<float>();
  const T *dy_data = dy.const_data_ptr<T>(), *x_data = x.const_data_ptr<T>(), *hidden_data = hidden.const_data_ptr<T>();
  const float* weight = weights.const_data_ptr<float>();
  float* dweight = dweights.mutable_data_ptr<float>();

  for_each(count, [&](const auto& next) {
    const at::Tensor grad_buffer = scratch(most * inner);
    float* grad = grad_buffer.template data_ptr<float>();
    std::vector<float> wide(2 * inner);
    for (int64_t b; (b = next()) < count;) {
      const auto [expert, first, rows] = blocks[b];
      const int32_t* slots = order.slots + first;
      gather(dy_data, slots, rows, topk, width, dy_rows + first * width);
      multiply({dy_rows + first * width, width, true}, down_panels.of(expert), rows, inner, width, grad, inner, false);
      for (int64_t r = 0; r < rows; ++r) {
        const T* row = hidden_data + (first + r) * 2 * inner;
        const float* gate = wide.data();
        if constexpr (std::is_same_v<T, float>)
          gate = row;
        else
          convert(row, 2 * inner, wide.data());
        float* dgate = dhidden + (first + r) * 2 * inner;
        dweight[slots[r]] = swiglu_row_backward(gate, gate + inner, grad + r * inner, weight[slots[r]], inner,
                                                activation + (first + r) * inner, dgate, dgate + inner);
      }
      multiply({dhidden + first * 2 * inner, 2 * inner, true}, up_panels.of(expert), rows, width, 2 * inner,
               dx_rows + first * width, width, false);
    }
  });
  sum_rows(dx_rows, order, nullptr, x.size(0), width, dx.mutable_data_ptr<T>());
  dgate_up.write<T>([&](bool add, auto* to) {
    weight_gradient<T>(
        order, dhidden, 2 * inner, width, [&](int64_t row) { return x_data + order.slots[row] / topk * width; }, add,
        to);
  });
  ddown.write<T>([&](bool add, auto* to) {
    weight_gradient<float>(
        order, dy_rows, width, inner, [&](int64_t row) { return activation + row * inner; }, add, to);
  });
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

std::tuple<at::Tensor, at::Tensor> moe_mlp_backward_into(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
    const at::Tensor& weights, const at::Tensor& indices, const at::Tensor& hidden, at::Tensor& dgate_up,
    at::Tensor& ddown, bool add_gate_up, bool add_down) {
  const auto fits = [&](const at::Tensor& out, const at::Tensor& weight) {
    const auto dtype = out.scalar_type();
    return out.sizes() == weight.sizes() && out.is_contiguous() && (dtype == at::kFloat || dtype == x.scalar_type());
  };
  TORCH_CHECK_VALUE(fits(dgate_up, gate_up) && fits(ddown, down), "moe_mlp_backward_into: dgate_up ",
                    dgate_up.scalar_type(), " ", dgate_up.sizes(), " and ddown ", ddown.scalar_type(), " ",
                    ddown.sizes(), " must be contiguous, of the weights' shapes, in float or ", x.scalar_type());
  at::Tensor dx = at::empty_like(x, at::MemoryFormat::Contiguous),
             dweights = at::zeros_like(weights, at::MemoryFormat::Contiguous);
  OPTIMUS_DISPATCH(x.scalar_type(), "moe_mlp_backward", [&] {
    backward<scalar_t>(dy.contiguous(), x.contiguous(), gate_up.contiguous(), down.contiguous(), weights.contiguous(),
                       indices.contiguous(), hidden, dx, {dgate_up, add_gate_up}, {ddown, add_down}, dweights);
  });
  return {dx, dweights};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> moe_mlp_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
    const at::Tensor& weights, const at::Tensor& indices, const at::Tensor& hidden) {
  at::Tensor dgate_up = at::empty_like(gate_up, at::MemoryFormat::Contiguous),
             ddown = at::empty_like(down, at::MemoryFormat::Contiguous);
  auto [dx, dweights] =
      moe_mlp_backward_into(dy, x, gate_up, down, weights, indices, hidden, dgate_up, ddown, false, false);
  return {dx, dgate_up, ddown, dweights};
}

}  // namespace

TORCH_LIBRARY_IMPL(optimus, CPU, m) {
  m.impl("moe_mlp", &moe_mlp);
  m.impl("moe_mlp_backward", &moe_mlp_backward);
  m.impl("moe_mlp_backward_into", &moe_mlp_backward_into);
}

}  // namespace optimus::cpu
