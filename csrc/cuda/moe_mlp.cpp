// The expert layer as PyTorch operations: checks, allocations, streams. layer.cpp launches the kernels.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "layer.h"

namespace optimus::cuda {
namespace {

using at::Tensor;

// An order's tensors in one of int32: those of triton/row_order.py's PaddedRowOrder.
RowOrderBuffers row_order_buffers(const Tensor& order, const Sizes& sizes) {
  int* at = order.data_ptr<int>();
  const auto next = [&](int size) { return std::exchange(at, at + size); };
  RowOrderBuffers buffers;
  buffers.slot = next(sizes.rows());
  buffers.row = next(sizes.tokens * sizes.topk);
  buffers.first_row = next(sizes.experts);
  buffers.count = next(sizes.experts);
  buffers.tile_expert = next(sizes.rows() / kRowTile);
  buffers.num_tiles = next(1);
  buffers.by_size = next(sizes.experts);
  buffers.tile_shift = next(sizes.rows() / kRowTile);
  return buffers;
}

int64_t order_size(const Sizes& sizes) {
  return sizes.rows() + 2 * (sizes.rows() / kRowTile) + int64_t{sizes.tokens} * sizes.topk + 3 * sizes.experts + 1;
}

// Element counts whose products fit what the kernels index with, widths that the tensor memory engine takes.
Sizes checked_sizes(const Tensor& x, const Tensor& down, const Tensor& weights) {
  const int64_t tokens = x.size(0), width = x.size(1), experts = down.size(0), inner = down.size(2),
                topk = weights.size(1);
  TORCH_CHECK_VALUE(experts <= kMaxExperts, "moe_mlp: ", experts, " experts; the cuda backend takes ", kMaxExperts,
                    " at most, use set_backend('triton')");
  TORCH_CHECK_VALUE(width % 8 == 0 && inner % 8 == 0, "moe_mlp: widths ", width, " and ", inner,
                    " must be multiples of 8 here");
  TORCH_CHECK_VALUE(tokens * topk + (experts + 1) * kRowTile < (int64_t{1} << 31), "moe_mlp: ", tokens * topk,
                    " slots; at most 2^31 rows fit");
  TORCH_CHECK_VALUE(tokens * width < (int64_t{1} << 34), "moe_mlp: ", tokens, " tokens of width ", width,
                    "; less than 2^34 elements fit, split them");
  const auto kind = x.scalar_type();
  TORCH_CHECK_VALUE(kind == at::kBFloat16 || kind == at::kHalf, "moe_mlp: ", kind,
                    " rows; expected bfloat16 or float16");
  return {static_cast<int>(tokens), static_cast<int>(topk), static_cast<int>(width), static_cast<int>(inner),
          static_cast<int>(experts)};
}

Type type_of(const Tensor& x) { return x.scalar_type() == at::kBFloat16 ? Type::bf16 : Type::fp16; }

std::tuple<Tensor, Tensor, Tensor> moe_mlp(const Tensor& x_in, const Tensor& gate_up_in, const Tensor& down_in,
                                           const Tensor& weights_in, const Tensor& indices_in) {
  const c10::cuda::CUDAGuard guard(x_in.device());
  const Tensor x = x_in.contiguous(), gate_up = gate_up_in.contiguous(), down = down_in.contiguous();
  const Tensor weights = weights_in.contiguous(), indices = indices_in.contiguous();
  const Sizes sizes = checked_sizes(x, down, weights);
  const auto ints = x.options().dtype(at::kInt);
  const int64_t rows = sizes.rows(), slots = int64_t{sizes.tokens} * sizes.topk;
  Tensor y = at::empty_like(x), hidden = at::empty({slots, gate_up.size(1)}, x.options());
  Tensor order = at::empty({order_size(sizes)}, ints);
  if (slots == 0) return {y.zero_(), hidden, order.zero_()};
  const int64_t blocks = order_blocks(static_cast<int>(slots), sizes.experts);
  const Tensor counts = at::empty({sizes.experts * blocks + kForwardProducts}, ints);
  const Tensor activation = at::empty({rows, sizes.inner}, x.options());
  const Tensor y_rows = at::empty({rows, sizes.width}, x.options());
  Forward to{};
  to.x = x.data_ptr(), to.gate_up = gate_up.data_ptr(), to.down = down.data_ptr();
  to.weights = weights.data_ptr<float>();
  to.indices = indices.data_ptr(), to.wide_indices = indices.scalar_type() == at::kLong;
  to.block_counts = counts.data_ptr<int>(), to.tile_counters = to.block_counts + sizes.experts * blocks;
  to.activation = activation.data_ptr(), to.y_rows = y_rows.data_ptr();
  to.hidden = hidden.data_ptr(), to.y = y.data_ptr();
  C10_CUDA_CHECK(forward(type_of(x), sizes, row_order_buffers(order, sizes), to, c10::cuda::getCurrentCUDAStream()));
  return {y, hidden, order};
}

// A weight's gradient is written in the weight's dtype or fp32 or, with add, added in fp32.
StoreMode checked_store_mode(const char* name, const Tensor& gradient, at::IntArrayRef shape, at::ScalarType dtype,
                             bool add) {
  const bool wide = gradient.scalar_type() == at::kFloat;
  TORCH_CHECK_VALUE(
      gradient.sizes() == shape && gradient.is_contiguous() && (wide || (!add && gradient.scalar_type() == dtype)),
      "moe_mlp_backward: ", name, " ", gradient.scalar_type(), " ", gradient.sizes(), " of a weight ", dtype, " ",
      shape, ": expected a contiguous one of its shape, in its dtype or fp32, fp32 to add");
  return add ? StoreMode::kAdd : wide ? StoreMode::kWriteWide : StoreMode::kWrite;
}

// What the halves of a backward return and hand over. dx is complete after the first half, or after the second if that
// is to sum the rows of dx.
struct Gradients {
  Tensor dx, dweights, dhidden, x_rows, dx_rows, progress;
};

Gradients first_half(const Tensor& dy_in, const Tensor& x_in, const Tensor& gate_up_in, const Tensor& down_in,
                     const Tensor& weights_in, const Tensor& hidden, const Tensor& order, const Tensor& ddown,
                     bool add_down, bool sums_later) {
  const c10::cuda::CUDAGuard guard(x_in.device());
  const Tensor dy = dy_in.contiguous(), x = x_in.contiguous(), gate_up = gate_up_in.contiguous();
  const Tensor down = down_in.contiguous(), weights = weights_in.contiguous();
  const Sizes sizes = checked_sizes(x, down, weights);
  TORCH_CHECK_VALUE(dy.sizes() == x.sizes() && order.numel() == order_size(sizes) &&
                        hidden.size(0) == int64_t{sizes.tokens} * sizes.topk,
                    "moe_mlp_backward: dy ", dy.sizes(), ", order ", order.sizes(), " and hidden ", hidden.sizes(),
                    " do not fit x ", x.sizes(), " and weights ", weights.sizes());
  const StoreMode down_mode = checked_store_mode("ddown", ddown, down.sizes(), down.scalar_type(), add_down);
  Gradients out{at::empty_like(x), {}, {}, {}, {}, {}};
  const Tensor zeroed = at::empty({weights.numel() + kProgressBytes / 4}, weights.options());
  out.dweights = zeroed.narrow(0, 0, weights.numel()).view(weights.sizes());
  const int64_t rows = weights.numel() == 0 ? 0 : sizes.rows();
  out.dhidden = at::empty({rows, gate_up.size(1)}, x.options());
  out.x_rows = at::empty({rows, sizes.width}, x.options());
  if (rows == 0) {
    if (!add_down) ddown.zero_();
    out.dx.zero_();
    return out;
  }
  out.progress = zeroed.narrow(0, weights.numel(), kProgressBytes / 4);
  const Tensor dy_rows = at::empty({rows, sizes.width}, x.options());
  const Tensor activation = at::empty({rows, sizes.inner}, x.options());
  out.dx_rows = at::empty({rows, sizes.width}, x.options());
  BackwardInputs to{};
  to.dy = dy.data_ptr(), to.x = x.data_ptr(), to.gate_up = gate_up.data_ptr(), to.down = down.data_ptr();
  to.hidden = hidden.data_ptr(), to.weights = weights.data_ptr<float>();
  to.dy_rows = dy_rows.data_ptr(), to.dx_rows = out.dx_rows.data_ptr(), to.activation = activation.data_ptr();
  to.dx = out.dx.data_ptr(), to.ddown = ddown.data_ptr(), to.down_mode = down_mode;
  to.dweights = out.dweights.data_ptr<float>(), to.progress = static_cast<int*>(out.progress.data_ptr());
  to.pending = {out.dhidden.data_ptr(), out.x_rows.data_ptr(), sums_later ? to.dx_rows : nullptr, to.dx};
  C10_CUDA_CHECK(
      backward_inputs(type_of(x), sizes, row_order_buffers(order, sizes), to, c10::cuda::getCurrentCUDAStream()));
  if (!sums_later) out.dx_rows = Tensor();
  return out;
}

// The gradient of gate_up, from what the first half left, to dgate_up.
void second_half(const Gradients& of, const Tensor& order, int64_t tokens, int64_t topk, const Tensor& dgate_up,
                 bool add) {
  const c10::cuda::CUDAGuard guard(of.x_rows.device());
  const int64_t experts = dgate_up.size(0), width = of.x_rows.size(1), inner = of.dhidden.size(1) / 2;
  const StoreMode store_mode =
      checked_store_mode("dgate_up", dgate_up, {experts, 2 * inner, width}, of.x_rows.scalar_type(), add);
  if (of.x_rows.size(0) == 0) {
    if (!add) dgate_up.zero_();
    return;
  }
  const Sizes sizes{static_cast<int>(tokens), static_cast<int>(topk), static_cast<int>(width), static_cast<int>(inner),
                    static_cast<int>(experts)};
  TORCH_CHECK_VALUE(order.numel() == order_size(sizes) && of.x_rows.size(0) == sizes.rows() &&
                        of.dhidden.size(0) == sizes.rows() && of.x_rows.is_contiguous() && of.dhidden.is_contiguous(),
                    "moe_mlp_backward: order ", order.sizes(), ", dhidden ", of.dhidden.sizes(), " and x_rows ",
                    of.x_rows.sizes(), " are not what the first half returned for ", tokens, " tokens of ", topk,
                    " experts each");
  UpWeights from{of.dhidden.data_ptr(), of.x_rows.data_ptr()};
  Tensor zero;
  if (of.dx_rows.defined()) {
    from.dx_rows = of.dx_rows.data_ptr(), from.dx = of.dx.data_ptr();
    from.progress = static_cast<int*>(of.progress.data_ptr());
    from.tile_counter = from.progress + kTaskCounters + kBackwardProducts - 1;
  } else {
    zero = at::zeros({1}, order.options());
    from.tile_counter = zero.data_ptr<int>();
  }
  C10_CUDA_CHECK(backward_up_weights(type_of(of.x_rows), sizes, row_order_buffers(order, sizes), from,
                                     dgate_up.data_ptr(), store_mode, c10::cuda::getCurrentCUDAStream()));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_mlp_backward_inputs(const Tensor& dy, const Tensor& x,
                                                                   const Tensor& gate_up, const Tensor& down,
                                                                   const Tensor& weights, const Tensor& hidden,
                                                                   const Tensor& order, const Tensor& ddown,
                                                                   bool add_down) {
  const Gradients out = first_half(dy, x, gate_up, down, weights, hidden, order, ddown, add_down, false);
  return {out.dx, out.dweights, out.dhidden, out.x_rows};
}

void moe_mlp_backward_up_weights(const Tensor& dhidden, const Tensor& x_rows, const Tensor& order, int64_t tokens,
                                 int64_t topk, const Tensor& dgate_up, bool add) {
  second_half({{}, {}, dhidden, x_rows, {}, {}}, order, tokens, topk, dgate_up, add);
}

// Gradients of x and weights; those of gate_up and down go to dgate_up and ddown.
std::tuple<Tensor, Tensor> moe_mlp_backward_into(const Tensor& dy, const Tensor& x, const Tensor& gate_up,
                                                 const Tensor& down, const Tensor& weights, const Tensor& hidden,
                                                 const Tensor& order, const Tensor& dgate_up, const Tensor& ddown,
                                                 bool add_gate_up, bool add_down) {
  const Gradients out = first_half(dy, x, gate_up, down, weights, hidden, order, ddown, add_down, true);
  second_half(out, order, x.size(0), weights.size(1), dgate_up, add_gate_up);
  return {out.dx, out.dweights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_mlp_backward(const Tensor& dy, const Tensor& x, const Tensor& gate_up,
                                                            const Tensor& down, const Tensor& weights,
                                                            const Tensor& hidden, const Tensor& order) {
  const Tensor dgate_up = at::empty(gate_up.sizes(), gate_up.options());
  const Tensor ddown = at::empty(down.sizes(), down.options());
  const auto [dx, dweights] =
      moe_mlp_backward_into(dy, x, gate_up, down, weights, hidden, order, dgate_up, ddown, false, false);
  return {dx, dgate_up, ddown, dweights};
}

}  // namespace
}  // namespace optimus::cuda

TORCH_LIBRARY_IMPL(optimus, CUDA, m) {
  m.impl("cuda_moe_mlp", optimus::cuda::moe_mlp);
  m.impl("cuda_moe_mlp_backward", optimus::cuda::moe_mlp_backward);
  m.impl("cuda_moe_mlp_backward_into", optimus::cuda::moe_mlp_backward_into);
  m.impl("cuda_moe_mlp_backward_inputs", optimus::cuda::moe_mlp_backward_inputs);
  m.impl("cuda_moe_mlp_backward_up_weights", optimus::cuda::moe_mlp_backward_up_weights);
}
