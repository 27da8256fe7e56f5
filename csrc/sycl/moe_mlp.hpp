// The whole expert layer composed of the kernels: which buffer goes where, and what is kept for the backward pass.
//
// Kept: the arguments and hidden [N, 2F], the rows before SwiGLU, 4F bytes a slot in bf16. The order of the slots is
// made again (it costs four small kernels); no matrix product is repeated: the gradient of the router's weights comes
// out of SwiGLU's backward (swiglu.sycl) instead of from the experts' outputs.
#pragma once

#include "launch.hpp"

namespace optimus {

struct MoeShape {
  DType type;
  int64_t tokens, topk, width, inner;
  int32_t experts;
};

inline MoeShape check_moe(const Array& x, const Array& gate_up, const Array& down, const Array& weights,
                          const Array& indices) {
  check_float(x, "x");
  check_dims(x, "x", 2);
  check_dims(down, "down", 3);
  check_indices(indices);
  const MoeShape shape{x.type(),      x.size(0), indices.size(1), x.size(1), down.size(2),
                       count32(down.size(0), "E", 1)};
  count32(shape.width, "D", 1);
  count32(2 * shape.inner, "2F", 2);
  check(x, "x", shape.type, {indices.size(0), shape.width});
  check(gate_up, "gate_up", shape.type, {shape.experts, 2 * shape.inner, shape.width});
  check(down, "down", shape.type, {shape.experts, shape.width, shape.inner});
  check(weights, "weights", DType::f32, {shape.tokens, shape.topk});
  return shape;
}

inline void moe_mlp(Launcher& launcher, const Array& x, const Array& gate_up, const Array& down, const Array& weights,
                    const Array& indices, const Array& y, const Array& hidden) {
  const MoeShape s = check_moe(x, gate_up, down, weights, indices);
  const int64_t num_slots = s.tokens * s.topk, bytes = size_of(s.type);
  check(y, "y", s.type, {s.tokens, s.width});
  check(hidden, "hidden", s.type, {num_slots, 2 * s.inner});
  const auto topk = static_cast<int32_t>(s.topk);
  const Order order = sort_in_scratch(launcher, indices, s.experts);
  void* activation = launcher.scratch<char>(num_slots * s.inner * bytes);
  void* expert_rows = launcher.scratch<char>(num_slots * s.width * bytes);
  launch_gemm_swiglu(launcher, s.type, x.data, gate_up.data, order.slots, topk, order, s.width, s.inner, hidden.data,
                     activation);
  launch_gemm_rows(launcher, s.type, activation, down.data, nullptr, 1, order, s.inner, s.width, true, expert_rows);
  launch_combine(launcher, s.type, expert_rows, order, static_cast<const float*>(weights.data), s.tokens, s.width,
                 y.data);
}

inline void moe_mlp_backward(Launcher& launcher, const Array& dy, const Array& x, const Array& gate_up,
                             const Array& down, const Array& weights, const Array& indices, const Array& hidden,
                             const Array& dx, const Array& dgate_up, const Array& ddown, const Array& dweights) {
  const MoeShape s = check_moe(x, gate_up, down, weights, indices);
  const int64_t num_slots = s.tokens * s.topk, bytes = size_of(s.type);
  check(dy, "dy", s.type, {s.tokens, s.width});
  check(hidden, "hidden", s.type, {num_slots, 2 * s.inner});
  check(dx, "dx", s.type, {s.tokens, s.width});
  check(dgate_up, "dgate_up", s.type, {s.experts, 2 * s.inner, s.width});
  check(ddown, "ddown", s.type, {s.experts, s.width, s.inner});
  check(dweights, "dweights", DType::f32, {s.tokens, s.topk});
  const auto topk = static_cast<int32_t>(s.topk);
  const Order order = sort_in_scratch(launcher, indices, s.experts);
  void* grad = launcher.scratch<char>(num_slots * s.inner * bytes);          // of the unweighted activation
  void* weighted = launcher.scratch<char>(num_slots * s.inner * bytes);      // weight times activation
  void* dhidden = launcher.scratch<char>(num_slots * 2 * s.inner * bytes);
  void* dx_rows = launcher.scratch<char>(num_slots * s.width * bytes);
  launch_gemm_rows(launcher, s.type, dy.data, down.data, order.slots, topk, order, s.width, s.inner, false, grad);
  launch_swiglu_backward(launcher, s.type, hidden.data, grad, order, static_cast<const float*>(weights.data), s.inner,
                         dhidden, weighted, static_cast<float*>(dweights.data));
  launch_gemm_weights(launcher, s.type, s.type, dy.data, weighted, order.slots, nullptr, topk, order, s.width, s.inner,
                      false, ddown.data);
  launch_gemm_weights(launcher, s.type, s.type, dhidden, x.data, nullptr, order.slots, topk, order, 2 * s.inner,
                      s.width, false, dgate_up.data);
  launch_gemm_rows(launcher, s.type, dhidden, gate_up.data, nullptr, 1, order, 2 * s.inner, s.width, false, dx_rows);
  launch_combine(launcher, s.type, dx_rows, order, nullptr, s.tokens, s.width, dx.data);
}

}  // namespace optimus
