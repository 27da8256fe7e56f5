// The expert layer as operations of PyTorch: checks, memory, streams. What runs is layer.cpp's.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "layer.h"

namespace optimus::cuda {
namespace {

using at::Tensor;

// An order's tensors in one of int32: those of triton/index.py's RowOrder, then tile_shift.
Plan plan_of(const Tensor& order, const Sizes& sizes) {
  int* at = order.data_ptr<int>();
  const auto next = [&](int size) { return std::exchange(at, at + size); };
  Plan plan;
  plan.slot = next(sizes.rows());
  plan.row = next(sizes.tokens * sizes.topk);
  plan.first_row = next(sizes.experts);
  plan.count = next(sizes.experts);
  plan.tile_expert = next(sizes.rows() / kRowTile);
  plan.num_tiles = next(1);
  plan.by_size = next(sizes.experts);
  plan.tile_shift = next(sizes.rows() / kRowTile);
  return plan;
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
  const Tensor counts = at::empty({int64_t{sizes.experts} * order_blocks(static_cast<int>(slots))}, ints);
  const Tensor progress = at::empty({kProgressBytes / 4}, ints);
  const Tensor x_rows = at::empty({rows, sizes.width}, x.options());
  const Tensor activation = at::empty({rows, sizes.inner}, x.options());
  Forward to{};
  to.x = x.data_ptr(), to.gate_up = gate_up.data_ptr(), to.down = down.data_ptr();
  to.weights = weights.data_ptr<float>();
  to.indices = indices.data_ptr(), to.wide_indices = indices.scalar_type() == at::kLong;
  to.block_counts = counts.data_ptr<int>(), to.progress = progress.data_ptr<int>();
  to.x_rows = x_rows.data_ptr(), to.activation = activation.data_ptr();
  to.hidden = hidden.data_ptr(), to.y = y.data_ptr();
  C10_CUDA_CHECK(forward(type_of(x), sizes, plan_of(order, sizes), to, c10::cuda::getCurrentCUDAStream()));
  return {y, hidden, order};
}

// Gradients of x and weights; those of gate_up and down go to dgate_up and ddown.
std::tuple<Tensor, Tensor> backward_into(const Tensor& dy_in, const Tensor& x_in, const Tensor& gate_up_in,
                                         const Tensor& down_in, const Tensor& weights_in, const Tensor& hidden,
                                         const Tensor& order, const Tensor& dgate_up, const Tensor& ddown,
                                         bool add_gate_up, bool add_down) {
  const c10::cuda::CUDAGuard guard(x_in.device());
  const Tensor dy = dy_in.contiguous(), x = x_in.contiguous(), gate_up = gate_up_in.contiguous();
  const Tensor down = down_in.contiguous(), weights = weights_in.contiguous();
  const Sizes sizes = checked_sizes(x, down, weights);
  TORCH_CHECK_VALUE(dy.sizes() == x.sizes() && order.numel() == order_size(sizes) &&
                        hidden.size(0) == int64_t{sizes.tokens} * sizes.topk,
                    "moe_mlp_backward: dy ", dy.sizes(), ", order ", order.sizes(), " and hidden ", hidden.sizes(),
                    " do not fit x ", x.sizes(), " and weights ", weights.sizes());
  for (const auto& [out, weight, add] : {std::tie(dgate_up, gate_up, add_gate_up), std::tie(ddown, down, add_down)}) {
    TORCH_CHECK_VALUE(out.sizes() == weight.sizes() && out.is_contiguous() &&
                          out.scalar_type() == (add ? at::kFloat : weight.scalar_type()),
                      "moe_mlp_backward: a gradient ", out.scalar_type(), " ", out.sizes(), " of a weight ",
                      weight.scalar_type(), " ", weight.sizes(),
                      ": expected a contiguous one of its shape, fp32 to add");
  }
  Tensor dx = at::empty_like(x), dweights = at::empty_like(weights);
  if (dweights.numel() == 0) {
    if (!add_gate_up) dgate_up.zero_();
    if (!add_down) ddown.zero_();
    return {dx.zero_(), dweights};
  }
  const int64_t rows = sizes.rows();
  const Tensor progress = at::empty({kProgressBytes / 4}, order.options());
  const Tensor wide = at::empty({3, rows, sizes.width}, x.options());
  const Tensor activation = at::empty({rows, sizes.inner}, x.options());
  const Tensor dhidden = at::empty({rows, gate_up.size(1)}, x.options());
  Backward to{};
  to.dy = dy.data_ptr(), to.x = x.data_ptr(), to.gate_up = gate_up.data_ptr(), to.down = down.data_ptr();
  to.hidden = hidden.data_ptr(), to.weights = weights.data_ptr<float>();
  to.dy_rows = wide[0].data_ptr(), to.x_rows = wide[1].data_ptr(), to.dx_rows = wide[2].data_ptr();
  to.activation = activation.data_ptr(), to.dhidden = dhidden.data_ptr();
  to.dx = dx.data_ptr(), to.dgate_up = dgate_up.data_ptr(), to.ddown = ddown.data_ptr();
  to.add_gate_up = add_gate_up, to.add_down = add_down;
  to.dweights = dweights.data_ptr<float>(), to.progress = progress.data_ptr<int>();
  C10_CUDA_CHECK(backward(type_of(x), sizes, plan_of(order, sizes), to, c10::cuda::getCurrentCUDAStream()));
  return {dx, dweights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_mlp_backward(const Tensor& dy, const Tensor& x, const Tensor& gate_up,
                                                            const Tensor& down, const Tensor& weights,
                                                            const Tensor& hidden, const Tensor& order) {
  const Tensor dgate_up = at::empty(gate_up.sizes(), gate_up.options());
  const Tensor ddown = at::empty(down.sizes(), down.options());
  const auto [dx, dweights] =
      backward_into(dy, x, gate_up, down, weights, hidden, order, dgate_up, ddown, false, false);
  return {dx, dgate_up, ddown, dweights};
}

}  // namespace
}  // namespace optimus::cuda

TORCH_LIBRARY_IMPL(optimus, CUDA, m) {
  m.impl("cuda_moe_mlp", optimus::cuda::moe_mlp);
  m.impl("cuda_moe_mlp_backward", optimus::cuda::moe_mlp_backward);
  m.impl("cuda_moe_mlp_backward_into", optimus::cuda::backward_into);
}
