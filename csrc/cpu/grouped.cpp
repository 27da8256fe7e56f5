// The single operations on rows in expert order (megatron/optimus/ops/grouped.py), on the CPU. Rows of no local slot
// come out as zeros. Contents of orders are checked: here the host can read them.
#include <torch/library.h>

#include "products.h"
#include "swiglu.h"

namespace optimus::cpu {
namespace {

using at::Tensor;
using std::optional;

constexpr int64_t kRows = 64;  // of an item, where rows are independent
constexpr int64_t kBlockRows = 256;  // of a product

int64_t num_items(int64_t rows) { return (rows + kRows - 1) / kRows; }

// Calls body(row, buffer) for every row, buffer being `width` floats of the thread's own.
template <typename Body>
void for_each_row(int64_t rows, int64_t width, Body body) {
  const int64_t items = num_items(rows);
  for_each(items, [&](const auto& next) {
    std::vector<float> buffer(width);
    for (int64_t item; (item = next()) < items;)
      for (int64_t row = item * kRows; row < std::min((item + 1) * kRows, rows); ++row) body(row, buffer.data());
  });
}

// Row buffer like `rows` but of another width, zero from the first row of no local slot on.
Tensor row_buffer(const Tensor& rows, int64_t width, const Order& order) {
  Tensor made = at::empty({rows.size(0), width}, rows.options());
  made.narrow(0, order.num_rows, rows.size(0) - order.num_rows).zero_();
  return made;
}

// out = weight * grad; returns <grad, row>.
template <typename T>
float scale_and_dot(const T* grad, const T* row, float weight, int64_t width, T* out) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < width; ++d) {
    sum += static_cast<float>(grad[d]) * static_cast<float>(row[d]);
    out[d] = static_cast<T>(weight * static_cast<float>(grad[d]));
  }
  return sum;
}

int64_t topk_of(const Order& order, int64_t num_tokens) { return num_tokens == 0 ? 1 : order.num_slots / num_tokens; }

std::tuple<Tensor, Tensor, Tensor, Tensor> sort_slots_op(const Tensor& indices, int64_t num_experts) {
  SortedSlots sorted = sort_slots(indices, num_experts);
  return {sorted.slots, sorted.rows, sorted.counts, sorted.offsets};
}

Tensor gather_rows(const Tensor& x, const Tensor& slots, const Tensor& offsets) {
  const Order order = checked_order(&slots, nullptr, offsets, slots.numel());
  const int64_t width = x.size(1), topk = topk_of(order, x.size(0));
  Tensor out = at::empty({order.num_slots, width}, x.options());
  out.narrow(0, order.num_rows, order.num_slots - order.num_rows).zero_();
  OPTIMUS_DISPATCH(x.scalar_type(), "gather_rows", [&] {
    const auto* from = x.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    for_each_row(order.num_rows, 0, [&](int64_t row, float*) {
      std::copy_n(from + order.slots[row] / topk * width, width, to + row * width);
    });
  });
  return out;
}

Tensor combine(const Tensor& rows, const Tensor& row_of_slot, const Tensor& offsets, const optional<Tensor>& weights,
               int64_t num_tokens) {
  const Order order = checked_order(nullptr, &row_of_slot, offsets, row_of_slot.numel());
  Tensor y = at::empty({num_tokens, rows.size(1)}, rows.options());
  OPTIMUS_DISPATCH(rows.scalar_type(), "combine", [&] {
    sum_rows(rows.const_data_ptr<scalar_t>(), order, weights ? weights->const_data_ptr<float>() : nullptr, num_tokens,
             rows.size(1), y.mutable_data_ptr<scalar_t>());
  });
  return y;
}

std::tuple<Tensor, Tensor> combine_backward(const Tensor& dy, const Tensor& rows, const Tensor& slots,
                                            const Tensor& offsets, const Tensor& weights) {
  const Order order = checked_order(&slots, nullptr, offsets, slots.numel());
  const int64_t width = rows.size(1), topk = weights.size(1);
  Tensor drows = row_buffer(rows, width, order), dweights = at::zeros_like(weights);
  const float* weight = weights.const_data_ptr<float>();
  auto* dweight = dweights.mutable_data_ptr<float>();
  OPTIMUS_DISPATCH(rows.scalar_type(), "combine_backward", [&] {
    const auto *grad = dy.const_data_ptr<scalar_t>(), *row_data = rows.const_data_ptr<scalar_t>();
    auto* out = drows.mutable_data_ptr<scalar_t>();
    for_each_row(order.num_rows, 0, [&](int64_t row, float*) {
      const int64_t slot = order.slots[row];
      const auto *g = grad + slot / topk * width, *r = row_data + row * width;
      auto* o = out + row * width;
      const float w = weight[slot];
      dweight[slot] = scale_and_dot(g, r, w, width, o);
    });
  });
  return {drows, dweights};
}

Tensor swiglu(const Tensor& hidden, const Tensor& offsets) {
  const Order order = checked_order(nullptr, nullptr, offsets, hidden.size(0));
  const int64_t inner = hidden.size(1) / 2;
  Tensor activation = row_buffer(hidden, inner, order);
  OPTIMUS_DISPATCH(hidden.scalar_type(), "swiglu", [&] {
    const auto* from = hidden.const_data_ptr<scalar_t>();
    auto* to = activation.mutable_data_ptr<scalar_t>();
    for_each_row(order.num_rows, 3 * inner, [&](int64_t row, float* buffer) {
      convert(from + row * 2 * inner, 2 * inner, buffer);
      swiglu_row(buffer, buffer + inner, inner, buffer + 2 * inner);
      convert(buffer + 2 * inner, inner, to + row * inner);
    });
  });
  return activation;
}

Tensor swiglu_backward(const Tensor& hidden, const Tensor& grad, const Tensor& offsets) {
  const Order order = checked_order(nullptr, nullptr, offsets, hidden.size(0));
  const int64_t inner = grad.size(1);
  Tensor dhidden = row_buffer(hidden, 2 * inner, order);
  OPTIMUS_DISPATCH(hidden.scalar_type(), "swiglu_backward", [&] {
    const auto *from = hidden.const_data_ptr<scalar_t>(), *g = grad.const_data_ptr<scalar_t>();
    auto* to = dhidden.mutable_data_ptr<scalar_t>();
    for_each_row(order.num_rows, 6 * inner, [&](int64_t row, float* buffer) {
      float *dgate = buffer + 3 * inner, *activation = buffer + 5 * inner;
      convert(from + row * 2 * inner, 2 * inner, buffer);
      convert(g + row * inner, inner, buffer + 2 * inner);
      swiglu_row_backward(buffer, buffer + inner, buffer + 2 * inner, 1.0f, inner, activation, dgate, dgate + inner);
      convert(dgate, 2 * inner, to + row * 2 * inner);
    });
  });
  return dhidden;
}

// x [N, depth] times each row's weight: transposed (weight [E, cols, depth]) or as stored ([E, depth, cols]). With an
// activation [N, cols / 2], SwiGLU of each block of the result is written there while the block is in cache.
template <typename T>
void rows_times_weight(const Tensor& x, const Tensor& weight, const Order& order, bool transposed, Tensor& out,
                       Tensor* activation) {
  constexpr bool wide = std::is_same_v<T, float>;
  const Engine& engine = cpu::engine(x.scalar_type());
  const int64_t depth = x.size(1), cols = out.size(1), inner = cols / 2;
  Schedule schedule(order.blocks(kBlockRows, engine.rows), 0);
  PackedWeights<T> panels(engine, weight, transposed, schedule);
  const T* from = x.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  T* activated = activation ? activation->mutable_data_ptr<T>() : nullptr;
  schedule.run([&](const auto& next) {
    std::vector<float> row(inner);
    const Tensor packed = scratch(engine.size(Side::kLeft, schedule.most_rows(), depth)),
                 buffer = wide ? Tensor() : scratch(schedule.most_rows() * cols);
    for (Schedule::Task task; next(task);) {
      schedule.start(task, [&] { panels.pack(task); });
      const auto [expert, first, rows] = task.block;
      float *left = packed.template data_ptr<float>(), *result;
      if constexpr (wide)
        result = to + first * cols;
      else
        result = buffer.template data_ptr<float>();
      engine.pack(rows_of(from + first * depth, depth), Depth::kAlongRows, Side::kLeft, rows, depth, left);
      multiply(engine, left, panels.of(task), rows, cols, depth, result, cols, false);
      for (int64_t r = 0; activated && r < rows; ++r) {
        swiglu_row(result + r * cols, result + r * cols + inner, inner, row.data());
        convert(row.data(), inner, activated + (first + r) * inner);
      }
      if constexpr (!wide) convert(result, rows * cols, to + first * cols);
    }
  });
}

Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets, bool transposed) {
  const Order order = checked_order(nullptr, nullptr, offsets, x.size(0));
  Tensor out = row_buffer(x, weight.size(transposed ? 1 : 2), order);
  OPTIMUS_DISPATCH(x.scalar_type(), "grouped_linear",
                   [&] { rows_times_weight<scalar_t>(x, weight, order, transposed, out, nullptr); });
  return out;
}

std::tuple<Tensor, Tensor> grouped_linear_swiglu(const Tensor& x, const Tensor& weight, const Tensor& offsets) {
  const Order order = checked_order(nullptr, nullptr, offsets, x.size(0));
  Tensor hidden = row_buffer(x, weight.size(1), order), activation = row_buffer(x, weight.size(1) / 2, order);
  OPTIMUS_DISPATCH(x.scalar_type(), "grouped_linear_swiglu",
                   [&] { rows_times_weight<scalar_t>(x, weight, order, true, hidden, &activation); });
  return {activation, hidden};
}

void grouped_weight_gradient(const Tensor& dout, const Tensor& x, const Tensor& offsets, Tensor& out, bool accumulate) {
  const Order order = checked_order(nullptr, nullptr, offsets, x.size(0));
  const Engine& engine = cpu::engine(x.scalar_type());
  const int64_t left_width = dout.size(1), right_width = x.size(1);
  OPTIMUS_DISPATCH(x.scalar_type(), "grouped_weight_gradient", [&] {
    const auto *left_rows = dout.const_data_ptr<scalar_t>(), *right_rows = x.const_data_ptr<scalar_t>();
    Schedule schedule(order.blocks(kBlockRows, engine.rows), WeightGradient<scalar_t>::kMostPieces);
    WeightGradient<scalar_t> gradient(engine, out, accumulate, schedule);
    gradient.zero_without_rows(order);
    schedule.run([&](const auto& next) {
      const Tensor left = scratch(engine.size(Side::kLeft, left_width, schedule.most_rows())),
                   right = scratch(engine.size(Side::kRight, right_width, schedule.most_rows()));
      float *left_data = left.data_ptr<float>(), *right_data = right.data_ptr<float>();
      for (Schedule::Task task; next(task);) {
        const auto [expert, first, rows] = task.block;
        engine.pack(rows_of(left_rows + first * left_width, left_width), Depth::kAcrossRows, Side::kLeft, left_width,
                    rows, left_data);
        engine.pack(rows_of(right_rows + first * right_width, right_width), Depth::kAcrossRows, Side::kRight,
                    right_width, rows, right_data);
        gradient.add(task, left_data, right_data);
      }
    });
  });
}

std::string joined_instruction_sets() {
  std::string names;
  for (const std::string& name : instruction_sets()) names += (names.empty() ? "" : ",") + name;
  return names;
}

}  // namespace

TORCH_LIBRARY_IMPL(optimus, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_sets", &joined_instruction_sets);
  m.impl("cpu_use_instructions", [](std::string name) { use_instructions(name); });
}

TORCH_LIBRARY_IMPL(optimus, CPU, m) {
  m.impl("cpu_sort_slots", &sort_slots_op);
  m.impl("cpu_gather_rows", &gather_rows);
  m.impl("cpu_combine", &combine);
  m.impl("cpu_combine_backward", &combine_backward);
  m.impl("cpu_swiglu", &swiglu);
  m.impl("cpu_swiglu_backward", &swiglu_backward);
  m.impl("cpu_grouped_linear", &grouped_linear);
  m.impl("cpu_grouped_linear_swiglu", &grouped_linear_swiglu);
  m.impl("cpu_grouped_weight_gradient", &grouped_weight_gradient);
}

}  // namespace optimus::cpu
