// Table of all operations by name, on arrays: each checks its arguments before it launches anything. What an argument
// means: megatron/optimus/ops/sycl.py.
#pragma once

#include "moe_mlp.hpp"

#include <map>

namespace optimus {

using Arguments = const Array*;

struct Operation {
  size_t num_arguments;
  void (*run)(Launcher&, Arguments);
};

// The order behind a call's `offsets` [E+3] and, where they are used, `slots` and `rows` [N]. Where the host can read
// them, what they hold is checked as well; on a device they are trusted to come from sort_slots.
inline Order checked_order(const Launcher& launcher, const Array& offsets, int64_t num_slots, const Array* slots,
                           const Array* rows) {
  check_dims(offsets, "offsets", 1);
  const int32_t num_experts = count32(offsets.size(0) - 3, "E (offsets has E + 3 elements)", 1);
  check(offsets, "offsets", DType::i32, {num_experts + 3});
  count32(num_slots, "N", 0);
  if (slots) check(*slots, "slots", DType::i32, {num_slots});
  if (rows) check(*rows, "rows", DType::i32, {num_slots});
  const Order order{slots ? static_cast<const int32_t*>(slots->data) : nullptr,
                    rows ? static_cast<const int32_t*>(rows->data) : nullptr,
                    static_cast<const int32_t*>(offsets.data), num_slots, num_experts};
  if (!launcher.host_memory) return order;
  if (order.offsets[0] != 0 || order.offsets[num_experts + 2] != num_slots)
    fail("offsets run from ", order.offsets[0], " to ", order.offsets[num_experts + 2], "; expected 0 to N = ",
         num_slots);
  for (int32_t e = 0; e < num_experts + 2; ++e)
    if (order.offsets[e + 1] < order.offsets[e])
      fail("offsets fall from ", order.offsets[e], " to ", order.offsets[e + 1], " at ", e);
  for (int64_t n = 0; n < num_slots; ++n) {
    if (order.slots && (order.slots[n] < 0 || order.slots[n] >= num_slots))
      fail("slots hold ", order.slots[n], "; expected values in [0, ", num_slots, ")");
    if (order.rows && (order.rows[n] < -1 || order.rows[n] >= num_slots))
      fail("rows hold ", order.rows[n], "; expected values in [-1, ", num_slots, ")");
  }
  return order;
}

inline int32_t topk_of(int64_t num_slots, int64_t num_tokens) {
  if (num_tokens == 0 ? num_slots != 0 : num_slots % num_tokens != 0 || num_slots == 0)
    fail("N = ", num_slots, " slots are not a multiple of T = ", num_tokens, " tokens");
  return num_tokens == 0 ? 1 : static_cast<int32_t>(num_slots / num_tokens);
}

inline void sort_slots_op(Launcher& launcher, Arguments a) {  // indices, slots, rows, offsets, counts
  check_indices(a[0]);
  check_dims(a[4], "counts", 1);
  const int32_t num_experts = count32(a[4].size(0), "E", 1);
  const int64_t num_slots = a[0].size(0) * a[0].size(1);
  check(a[1], "slots", DType::i32, {num_slots});
  check(a[2], "rows", DType::i32, {num_slots});
  check(a[3], "offsets", DType::i32, {static_cast<int64_t>(num_experts) + 3});
  check(a[4], "counts", DType::i32, {num_experts});
  launch_sort(launcher, a[0], num_experts, static_cast<int32_t*>(a[1].data), static_cast<int32_t*>(a[2].data),
              static_cast<int32_t*>(a[3].data), static_cast<int32_t*>(a[4].data));
}

inline void combine_op(Launcher& launcher, Arguments a) {  // expert_rows, rows, offsets, weights or absent, y
  check_float(a[0], "expert_rows");
  check_dims(a[0], "expert_rows", 2);
  check_dims(a[4], "y", 2);
  const DType type = a[0].type();
  const int64_t num_slots = a[0].size(0), width = a[0].size(1), num_tokens = a[4].size(0);
  count32(width, "D", 1);
  check(a[0], "expert_rows", type, {num_slots, width});
  check(a[4], "y", type, {num_tokens, width});
  const int64_t topk = topk_of(num_slots, num_tokens);
  if (!a[3].absent() && num_tokens > 0) check(a[3], "weights", DType::f32, {num_tokens, topk});
  const Order order = checked_order(launcher, a[2], num_slots, nullptr, &a[1]);
  const auto* weights = a[3].absent() ? nullptr : static_cast<const float*>(a[3].data);
  launch_combine(launcher, type, a[0].data, order, weights, num_tokens, width, a[4].data);
}

// hidden, grad, slots, offsets, weights, dhidden, weighted, dweights
inline void swiglu_backward_op(Launcher& launcher, Arguments a) {
  check_float(a[0], "hidden");
  check_dims(a[1], "grad", 2);
  const DType type = a[0].type();
  const int64_t num_slots = a[1].size(0), inner = a[1].size(1);
  count32(2 * inner, "2F", 2);
  check(a[0], "hidden", type, {num_slots, 2 * inner});
  check(a[1], "grad", type, {num_slots, inner});
  check(a[5], "dhidden", type, {num_slots, 2 * inner});
  check(a[6], "weighted", type, {num_slots, inner});
  check_dims(a[4], "weights", 2);
  const int64_t topk = a[4].size(1);
  check(a[4], "weights", DType::f32, {topk == 0 ? 0 : num_slots / topk, topk});
  if (a[4].size(0) * topk != num_slots) fail("weights hold ", a[4].size(0) * topk, " slots; expected ", num_slots);
  check(a[7], "dweights", DType::f32, {a[4].size(0), topk});
  const Order order = checked_order(launcher, a[3], num_slots, &a[2], nullptr);
  launch_swiglu_backward(launcher, type, a[0].data, a[1].data, order, static_cast<const float*>(a[4].data), inner,
                         a[5].data, a[6].data, static_cast<float*>(a[7].data));
}

// dout, weight [E, O, I], slots or absent, offsets, out: out = dout @ weight
inline void gemm_input_gradient_op(Launcher& launcher, Arguments a) {
  check_float(a[0], "dout");
  check_dims(a[0], "dout", 2);
  check_dims(a[1], "weight", 3);
  check_dims(a[4], "out", 2);
  const DType type = a[0].type();
  const int64_t num_slots = a[4].size(0);
  const int64_t depth = a[1].size(1), cols = a[1].size(2);
  count32(depth, "depth", 1);
  count32(cols, "cols", 1);
  const bool gathered = !a[2].absent();
  check(a[0], "dout", type, {gathered ? a[0].size(0) : num_slots, depth});
  check(a[1], "weight", type, {a[3].size(0) - 3, a[1].size(1), a[1].size(2)});
  check(a[4], "out", type, {num_slots, cols});
  const int32_t topk = gathered ? topk_of(num_slots, a[0].size(0)) : 1;
  const Order order = checked_order(launcher, a[3], num_slots, gathered ? &a[2] : nullptr, nullptr);
  launch_gemm_rows(launcher, type, a[0].data, a[1].data, order.slots, topk, order, depth, cols, false, a[4].data);
}

// left, right, slots, offsets, out: the operand that is in token order, left or right, is read through the slots.
inline void gemm_weight_gradient_op(Launcher& launcher, Arguments a, bool gather_left, bool accumulate) {
  check_float(a[0], "left");
  check_float(a[4], "out");
  check_dims(a[0], "left", 2);
  check_dims(a[1], "right", 2);
  check_dims(a[2], "slots", 1);
  const DType type = a[0].type(), out_type = a[4].type();
  if (out_type != type && out_type != DType::f32)
    fail("out has dtype ", name_of(out_type), "; expected ", name_of(type), " or f32");
  const int64_t num_slots = a[2].size(0), left_width = a[0].size(1), right_width = a[1].size(1);
  count32(left_width, "left width", 1);
  count32(right_width, "right width", 1);
  check(a[0], "left", type, {gather_left ? a[0].size(0) : num_slots, left_width});
  check(a[1], "right", type, {gather_left ? num_slots : a[1].size(0), right_width});
  const Order order = checked_order(launcher, a[3], num_slots, &a[2], nullptr);
  check(a[4], "out", out_type, {order.num_experts, left_width, right_width});
  const int32_t topk = topk_of(num_slots, a[gather_left ? 0 : 1].size(0));
  launch_gemm_weights(launcher, type, out_type, a[0].data, a[1].data, gather_left ? order.slots : nullptr,
                      gather_left ? nullptr : order.slots, topk, order, left_width, right_width, accumulate, a[4].data);
}

struct RouterShape {
  int64_t tokens;
  int32_t experts, topk;
};

inline RouterShape check_router(const Array& scores, const char* name, const Array& weights, const Array& indices) {
  check_dims(scores, name, 2);
  check_dims(weights, "weights", 2);
  const RouterShape shape{scores.size(0), count32(scores.size(1), "E", 1), count32(weights.size(1), "K", 1)};
  if (shape.topk > shape.experts) fail("K = ", shape.topk, "; expected 1 to E = ", shape.experts);
  check(scores, name, DType::f32, {shape.tokens, shape.experts});
  check(weights, "weights", DType::f32, {shape.tokens, shape.topk});
  check(indices, "indices", DType::i64, {shape.tokens, shape.topk});
  return shape;
}

template <bool kSigmoid, bool kNormalize>
void router_topk_op(Launcher& launcher, Arguments a) {  // logits, bias or absent, weights, indices, scores
  const RouterShape s = check_router(a[0], "logits", a[2], a[3]);
  check(a[4], "scores", DType::f32, {s.tokens, s.experts});
  if (!a[1].absent()) check(a[1], "bias", DType::f32, {s.experts});
  launcher.launch("router_topk", sycl::range<1>(s.tokens), sycl::range<1>(row_items(launcher, s.experts, DType::f32, 0)),
                  static_cast<const void*>(a[0].data), static_cast<const void*>(a[1].absent() ? nullptr : a[1].data),
                  s.experts, s.topk, int32_t{kSigmoid}, int32_t{kNormalize}, a[2].data, a[3].data, a[4].data);
}

// scores, indices, dweights, dscores, dlogits
template <bool kSigmoid, bool kNormalize>
void router_topk_backward_op(Launcher& launcher, Arguments a) {
  const RouterShape s = check_router(a[0], "scores", a[2], a[1]);
  check(a[3], "dscores", DType::f32, {s.tokens, s.experts});
  check(a[4], "dlogits", DType::f32, {s.tokens, s.experts});
  launcher.launch("router_topk_backward", sycl::range<1>(s.tokens),
                  sycl::range<1>(row_items(launcher, s.experts, DType::f32, 0)), static_cast<const void*>(a[0].data),
                  static_cast<const void*>(a[1].data), static_cast<const void*>(a[2].data),
                  static_cast<const void*>(a[3].data), s.experts, s.topk, int32_t{kSigmoid}, int32_t{kNormalize},
                  a[4].data);
}

inline const std::map<std::string, Operation>& operations() {
  static const std::map<std::string, Operation> table = {
      {"sort_slots", {5, sort_slots_op}},
      {"combine", {5, combine_op}},
      {"swiglu_backward", {8, swiglu_backward_op}},
      {"gemm_input_gradient", {5, gemm_input_gradient_op}},
      {"router_topk_softmax", {5, router_topk_op<false, false>}},
      {"router_topk_softmax_normalized", {5, router_topk_op<false, true>}},
      {"router_topk_sigmoid", {5, router_topk_op<true, false>}},
      {"router_topk_sigmoid_normalized", {5, router_topk_op<true, true>}},
      {"router_topk_backward_softmax", {5, router_topk_backward_op<false, false>}},
      {"router_topk_backward_softmax_normalized", {5, router_topk_backward_op<false, true>}},
      {"router_topk_backward_sigmoid", {5, router_topk_backward_op<true, false>}},
      {"router_topk_backward_sigmoid_normalized", {5, router_topk_backward_op<true, true>}},
      {"gemm_weight_gradient_left",
       {5, [](Launcher& l, Arguments a) { gemm_weight_gradient_op(l, a, true, false); }}},
      {"gemm_weight_gradient_left_add",
       {5, [](Launcher& l, Arguments a) { gemm_weight_gradient_op(l, a, true, true); }}},
      {"gemm_weight_gradient_right",
       {5, [](Launcher& l, Arguments a) { gemm_weight_gradient_op(l, a, false, false); }}},
      {"gemm_weight_gradient_right_add",
       {5, [](Launcher& l, Arguments a) { gemm_weight_gradient_op(l, a, false, true); }}},
      {"moe_mlp", {7, [](Launcher& l, Arguments a) { moe_mlp(l, a[0], a[1], a[2], a[3], a[4], a[5], a[6]); }}},
      {"moe_mlp_backward", {11, [](Launcher& l, Arguments a) {
                              moe_mlp_backward(l, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
                            }}},
  };
  return table;
}

inline void run(Launcher& launcher, const std::string& name, const std::vector<Array>& arguments) {
  const auto found = operations().find(name);
  if (found == operations().end()) fail("no SYCL operation ", name);
  if (arguments.size() != found->second.num_arguments)
    fail(name, " takes ", found->second.num_arguments, " arguments, not ", arguments.size());
  found->second.run(launcher, arguments.data());
}

}  // namespace optimus
