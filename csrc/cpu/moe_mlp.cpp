// All SwiGLU experts of a layer on the CPU, forward and backward.
//
// Work is cut into blocks of rows of one expert. A block packs its rows as they are gathered and runs both products and
// SwiGLU while its values are in cache; a last pass sums a token's rows in slot order. In the backward a block also packs
// its operands of the weights' gradients, which follow after every few blocks. Every block computes the same numbers
// whichever thread runs it: results do not depend on the thread count.
#include <torch/library.h>

#include "products.h"
#include "swiglu.h"

namespace optimus::cpu {
namespace {

int64_t most_rows(const std::vector<RowBlock>& blocks) {
  int64_t most = 0;
  for (const RowBlock& block : blocks) most = std::max(most, block.rows);
  return most;
}

struct Buffer {
  at::Tensor storage;
  float* data;
  explicit Buffer(int64_t numel) : storage(scratch(numel)), data(storage.data_ptr<float>()) {}
};

// What one thread needs for a block, in one piece of memory: operands packed, a product, its gradient by the gate and
// up rows, and the activation.
struct Workspace {
  Buffer all;
  float *packed, *product, *dhidden, *activation;
  Workspace(const Engine& engine, int64_t rows, int64_t width, int64_t inner)
      : Workspace(engine.size(Side::kLeft, rows, std::max(width, 2 * inner)), rows * std::max(width, 2 * inner),
                  rows * inner) {}
  Workspace(int64_t packed_size, int64_t product_size, int64_t activation_size)
      : all(packed_size + product_size + 3 * activation_size),
        packed(all.data),
        product(packed + packed_size),
        dhidden(product + product_size),
        activation(dhidden + 2 * activation_size) {}
};

// Rows times an expert's packed weight, into row-major out: a buffer in cache, from which whole rows are copied to where
// they are kept. Tiles written there at once would wait for memory, a few lines of many rows at a time.
void multiply_rows(const Engine& engine, const Source& source, int64_t rows, int64_t depth, const float* weight,
                   int64_t cols, float* packed, float* out, const Ahead& ahead) {
  engine.pack(source, Depth::kAlongRows, Side::kLeft, rows, depth, packed);
  multiply(engine, packed, weight, rows, cols, depth, out, cols, false, ahead);
}

template <typename T>
Ahead ahead_of(const T* data, int64_t numel) {
  return {data, numel * static_cast<int64_t>(sizeof(T))};
}

template <typename T>
void forward(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down, const at::Tensor& weights,
             const at::Tensor& indices, at::Tensor& y, at::Tensor& hidden) {
  const Engine& engine = cpu::engine(x.scalar_type());
  const int64_t width = x.size(1), inner = down.size(2), topk = indices.size(1);
  const SortedSlots sorted = sort_slots(indices, down.size(0));
  const Order order = sorted.view();
  PackedWeights<T> up_panels(engine, gate_up, true, order), down_panels(engine, down, true, order);
  const std::vector<RowBlock> blocks = order.blocks();
  const int64_t most = most_rows(blocks);
  const Buffer out_rows(order.num_rows * width);
  const T* x_data = x.const_data_ptr<T>();
  T* hidden_data = hidden.mutable_data_ptr<T>();

  for_each_slab(blocks, false, 4, [&](const RowBlock* slab, int64_t count) {
    up_panels.pack(slab, count);
    down_panels.pack(slab, count);
    for_each(count, [&](const auto& next) {
      const Workspace w(engine, most, width, inner);
      for (int64_t b; (b = next()) < count;) {
        const auto [expert, first, rows] = slab[b];
        multiply_rows(engine, rows_of(x_data, width, order.slots + first, topk), rows, width, up_panels.of(expert),
                      2 * inner, w.packed, w.product, ahead_of(hidden_data + first * 2 * inner, rows * 2 * inner));
        for (int64_t r = 0; r < rows; ++r) {
          const float* gate = w.product + r * 2 * inner;
          swiglu_row(gate, gate + inner, inner, w.activation + r * inner);
          convert(gate, 2 * inner, hidden_data + (first + r) * 2 * inner);
        }
        multiply_rows(engine, rows_of(w.activation, inner), rows, inner, down_panels.of(expert), width, w.packed,
                      w.product, ahead_of(out_rows.data + first * width, rows * width));
        convert(w.product, rows * width, out_rows.data + first * width);
      }
    });
  });
  sum_rows(out_rows.data, order, weights.const_data_ptr<float>(), x.size(0), width, y.mutable_data_ptr<T>());
}

// Where the gradient of a weight goes: fp32 or the weight's dtype, written or added to what is there.
struct WeightGradient {
  const at::Tensor& out;
  bool add;
  bool is_narrow() const { return out.scalar_type() != at::kFloat; }
  template <typename T, typename Run>
  void write(const Run& run) const {
    if (!is_narrow())
      run(add, out.mutable_data_ptr<float>());
    else
      run(add, out.mutable_data_ptr<T>());
  }
};

template <typename T>
void backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
              const at::Tensor& weights, const at::Tensor& indices, const at::Tensor& hidden, at::Tensor& dx,
              const WeightGradient& dgate_up, const WeightGradient& ddown, at::Tensor& dweights) {
  const Engine& engine = cpu::engine(x.scalar_type());
  const int64_t width = x.size(1), inner = down.size(2), topk = indices.size(1);
  const SortedSlots sorted = sort_slots(indices, down.size(0));
  const Order order = sorted.view();
  PackedWeights<T> down_panels(engine, down, false, order), up_panels(engine, gate_up, false, order);
  const std::vector<RowBlock> blocks = order.blocks();
  const int64_t most = most_rows(blocks);
  const Buffer dx_rows(order.num_rows * width);
  const T *dy_data = dy.const_data_ptr<T>(), *x_data = x.const_data_ptr<T>(), *hidden_data = hidden.const_data_ptr<T>();
  const float* weight = weights.const_data_ptr<float>();
  float* dweight = dweights.mutable_data_ptr<float>();
  const auto zero = [&](int64_t size) {
    return [&order, size](bool add, auto* to) {
      if (!add) zero_without_rows(order, size, to);
    };
  };
  dgate_up.write<T>(zero(2 * inner * width));
  ddown.write<T>(zero(inner * width));

  const bool whole = dgate_up.is_narrow() || ddown.is_narrow();
  for_each_slab(blocks, whole, 1, [&](const RowBlock* slab, int64_t count) {
    down_panels.pack(slab, count);
    up_panels.pack(slab, count);
    const auto operand = [&](Side side, int64_t columns) { return PackedRows(engine, side, columns, count, most); };
    PackedRows dhidden_left = operand(Side::kLeft, 2 * inner), x_right = operand(Side::kRight, width),
               dy_left = operand(Side::kLeft, width), activation_right = operand(Side::kRight, inner);
    for_each(count, [&](const auto& next) {
      const Workspace w(engine, most, width, inner);
      std::vector<float> wide(2 * inner);
      for (int64_t b; (b = next()) < count;) {
        const auto [expert, first, rows] = slab[b];
        const int32_t* slots = order.slots + first;
        const Source dy_rows = rows_of(dy_data, width, slots, topk);
        multiply_rows(engine, dy_rows, rows, width, down_panels.of(expert), inner, w.packed, w.product,
                      ahead_of(hidden_data + first * 2 * inner, rows * 2 * inner));
        for (int64_t r = 0; r < rows; ++r) {
          const T* row = hidden_data + (first + r) * 2 * inner;
          const float* gate = wide.data();
          if constexpr (std::is_same_v<T, float>)
            gate = row;
          else
            convert(row, 2 * inner, wide.data());
          float* dgate = w.dhidden + r * 2 * inner;
          dweight[slots[r]] = swiglu_row_backward(gate, gate + inner, w.product + r * inner, weight[slots[r]], inner,
                                                  w.activation + r * inner, dgate, dgate + inner);
        }
        multiply_rows(engine, rows_of(w.dhidden, 2 * inner), rows, 2 * inner, up_panels.of(expert), width, w.packed,
                      w.product, ahead_of(dx_rows.data + first * width, rows * width));
        convert(w.product, rows * width, dx_rows.data + first * width);
        dhidden_left.pack(b, rows_of(w.dhidden, 2 * inner), rows);
        x_right.pack(b, rows_of(x_data, width, slots, topk), rows);
        dy_left.pack(b, dy_rows, rows);
        activation_right.pack(b, rows_of(w.activation, inner), rows);
      }
    });
    dgate_up.write<T>([&](bool add, auto* to) {
      add_weight_gradient(order, slab, count, dhidden_left, x_right, add, to);
    });
    ddown.write<T>([&](bool add, auto* to) {
      add_weight_gradient(order, slab, count, dy_left, activation_right, add, to);
    });
  });
  sum_rows(dx_rows.data, order, nullptr, x.size(0), width, dx.mutable_data_ptr<T>());
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
