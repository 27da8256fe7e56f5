// All SwiGLU experts of a layer on the CPU, forward and backward.
//
// Work is cut into blocks of rows of one expert. A block packs its rows as they are gathered and runs both products and
// SwiGLU while its values are in cache; a last pass sums a token's rows in slot order. In the backward a block also adds
// its products to the weights' gradients, after the expert's blocks before it (schedule.h). Every block computes the same
// numbers whichever thread runs it: results do not depend on the thread count.
#include <torch/library.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "moe_parts.h"
#include "swiglu.h"

namespace optimus::cpu {
namespace {

// Rows of a block: 64 where an expert's weights and gradients fit into a second-level cache together with the operands
// of 64 rows. Larger weights are read through the cache once for each block, so their blocks have 256 rows.
int64_t block_rows(int64_t width, int64_t inner) { return 3 * width * inner <= 128 * 1024 ? 64 : 256; }

struct Buffer {
  at::Tensor storage;
  float* data;
  explicit Buffer(int64_t numel) : storage(scratch(numel)), data(storage.data_ptr<float>()) {}
};

// What one thread needs for a block, in one piece of memory: two operands packed, a product, its gradient by the gate and
// up rows, and the activation. Operands follow one another in the same place, which so stays in cache.
struct Workspace {
  Buffer all;
  float *left, *right, *product, *dhidden, *activation;
  // right_size, gradients: what the backward needs besides.
  Workspace(int64_t left_size, int64_t right_size, int64_t product_size, int64_t gradient_size, int64_t activation_size)
      : all(left_size + right_size + product_size + gradient_size + activation_size),
        left(all.data),
        right(left + left_size),
        product(right + right_size),
        dhidden(product + product_size),
        activation(dhidden + gradient_size) {}
};

// Rows times an expert's packed weight, into row-major out: a buffer in cache, from which whole rows are copied to where
// they are kept. Tiles written there at once would wait for memory, a few lines of many rows at a time.
void multiply_rows(const Engine& engine, const Source& source, int64_t rows, int64_t depth, const float* weight,
                   int64_t cols, float* packed, float* out) {
  engine.pack(source, Depth::kContiguous, Side::kLeft, rows, depth, packed);
  multiply(engine, packed, weight, rows, cols, depth, out, cols, false);
}

// Writes finished rows to a buffer of `total` elements. One beyond the caches is written past them, which saves reading
// its lines before and leaves the block's operands where they are.
template <typename T>
void keep_rows(const float* src, int64_t n, T* dst, int64_t total) {
  constexpr int64_t kCached = 256 * 1024;
#if defined(__SSE2__)
  if constexpr (std::is_same_v<T, float>) {
    if (total > kCached && n % 4 == 0 && reinterpret_cast<uintptr_t>(dst) % 16 == 0) {
      for (int64_t i = 0; i < n; i += 4) _mm_stream_ps(dst + i, _mm_loadu_ps(src + i));
      _mm_sfence();  // before another thread is told that the rows are there
      return;
    }
  }
#endif
  convert(src, n, dst);
}

template <typename T>
void forward(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down, const at::Tensor& weights,
             const at::Tensor& indices, at::Tensor& y, at::Tensor& hidden) {
  const Engine& engine = cpu::engine(x.scalar_type());
  const int64_t width = x.size(1), inner = down.size(2), topk = indices.size(1);
  const SortedSlots sorted = sort_slots(indices, down.size(0));
  const Order order = sorted.view();
  Schedule schedule(order.blocks(block_rows(width, inner), engine.rows), 0);
  const int64_t most = schedule.most_rows();
  PackedWeights<T> up_panels(engine, gate_up, true, schedule), down_panels(engine, down, true, schedule);
  const Buffer out_rows(order.num_rows * width);
  const T* x_data = x.const_data_ptr<T>();
  T* hidden_data = hidden.mutable_data_ptr<T>();

  schedule.run([&](const auto& next) {
    const Workspace w(engine.size(Side::kLeft, most, std::max(width, inner)), 0, most * std::max(width, 2 * inner), 0,
                      most * inner);
    for (Schedule::Task task; next(task);) {
      schedule.start(task, [&] {
        up_panels.pack(task);
        down_panels.pack(task);
      });
      const auto [expert, first, rows] = task.block;
      multiply_rows(engine, rows_of(x_data, width, order.slots + first, topk), rows, width, up_panels.of(task),
                    2 * inner, w.left, w.product);
      for (int64_t r = 0; r < rows; ++r) {
        const float* gate = w.product + r * 2 * inner;
        swiglu_row(gate, gate + inner, inner, w.activation + r * inner);
      }
      keep_rows(w.product, rows * 2 * inner, hidden_data + first * 2 * inner, hidden.numel());
      multiply_rows(engine, rows_of(w.activation, inner), rows, inner, down_panels.of(task), width, w.left,
                    w.product);
      keep_rows(w.product, rows * width, out_rows.data + first * width, order.num_rows * width);
    }
  });
  sum_rows(out_rows.data, order, weights.const_data_ptr<float>(), x.size(0), width, y.mutable_data_ptr<T>());
}

// Where the gradient of a weight goes: fp32 or the weight's dtype, written or added to what is there.
struct Target {
  const at::Tensor& out;
  bool add;
};

template <typename T>
void backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
              const at::Tensor& weights, const at::Tensor& indices, const at::Tensor& hidden, at::Tensor& dx,
              const Target& to_gate_up, const Target& to_down, at::Tensor& dweights) {
  const Engine& engine = cpu::engine(x.scalar_type());
  const int64_t width = x.size(1), inner = down.size(2), topk = indices.size(1);
  const SortedSlots sorted = sort_slots(indices, down.size(0));
  const Order order = sorted.view();
  constexpr int64_t pieces = WeightGradient<T>::kMostPieces;
  Schedule schedule(order.blocks(block_rows(width, inner), engine.rows), 2 * pieces);
  const int64_t most = schedule.most_rows(), wider = std::max(width, 2 * inner);
  PackedWeights<T> down_panels(engine, down, false, schedule), up_panels(engine, gate_up, false, schedule);
  WeightGradient<T> dgate_up(engine, to_gate_up.out, to_gate_up.add, schedule),
      ddown(engine, to_down.out, to_down.add, schedule, pieces);
  dgate_up.zero_without_rows(order);
  ddown.zero_without_rows(order);
  const Buffer dx_rows(order.num_rows * width);
  const T *dy_data = dy.const_data_ptr<T>(), *x_data = x.const_data_ptr<T>(), *hidden_data = hidden.const_data_ptr<T>();
  const float* weight = weights.const_data_ptr<float>();
  float* dweight = dweights.mutable_data_ptr<float>();

  schedule.run([&](const auto& next) {
    const int64_t left_size = std::max(engine.size(Side::kLeft, most, wider), engine.size(Side::kLeft, wider, most));
    const Workspace w(left_size, engine.size(Side::kRight, std::max(width, inner), most), most * std::max(width, inner),
                      most * 2 * inner, most * inner);
    std::vector<float> wide(2 * inner);
    for (Schedule::Task task; next(task);) {
      schedule.start(task, [&] {
        down_panels.pack(task);
        up_panels.pack(task);
      });
      const auto [expert, first, rows] = task.block;
      const int32_t* slots = order.slots + first;
      const Source dy_rows = rows_of(dy_data, width, slots, topk), dhidden = rows_of(w.dhidden, 2 * inner);
      multiply_rows(engine, dy_rows, rows, width, down_panels.of(task), inner, w.left, w.product);
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
      multiply_rows(engine, dhidden, rows, 2 * inner, up_panels.of(task), width, w.left, w.product);
      keep_rows(w.product, rows * width, dx_rows.data + first * width, order.num_rows * width);
      const auto add_product = [&](WeightGradient<T>& gradient, const Source& left, int64_t left_width,
                                   const Source& right, int64_t right_width) {
        engine.pack(left, Depth::kStrided, Side::kLeft, left_width, rows, w.left);
        engine.pack(right, Depth::kStrided, Side::kRight, right_width, rows, w.right);
        gradient.add(task, w.left, w.right);
      };
      add_product(dgate_up, dhidden, 2 * inner, rows_of(x_data, width, slots, topk), width);
      add_product(ddown, dy_rows, width, rows_of(w.activation, inner), inner);
    }
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
