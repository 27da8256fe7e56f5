// Products by rows run in parts of the experts, so that work bound by memory on one part is an errand of the product on
// another: spreading tokens to rows goes one part ahead of the product that reads them, SwiGLU's backward one part
// behind the product before it. Only the first part of a spread and the sum of the forward have the device for
// themselves.
#include "layer.h"

#include <array>

namespace optimus::cuda {
namespace {

// Where parts end, in sixteenths of the experts. A part's errand should take no longer than the product beside it: the
// first is small, as nothing hides its own spread, and they grow.
constexpr int kParts = 3;
constexpr std::array<int, kParts> kForwardEnds = {3, 8, 16}, kBackwardEnds = {4, 9, 16};

Part part(const std::array<int, kParts>& ends, int experts, int i) {
  return {i == 0 ? 0 : experts * ends[i - 1] / 16, experts * ends[i] / 16};
}

Errand spread(const Part& experts, const void* from, void* to, int width, const Plan& plan) {
  Errand errand{Task::kSpread, width, experts.first, experts.end};
  errand.from = from, errand.to = to, errand.row_of_slot = plan.row;
  return errand;
}

Order order_of(const Sizes& sizes, const Plan& plan) {
  return {plan.slot,    plan.first_row, plan.count,    plan.tile_expert, plan.num_tiles,
          plan.by_size, sizes.rows(),   sizes.experts, sizes.tokens,     sizes.topk};
}

// Runs calls until one fails.
struct Steps {
  cudaError_t error = cudaSuccess;
  template <typename Call>
  void operator()(Call call) {
    if (error == cudaSuccess) error = call();
  }
};

}  // namespace

int Sizes::rows() const {
  const int slots = tokens * topk;
  return (slots / kRowTile + (experts < slots ? experts : slots)) * kRowTile + kRowTile;
}

cudaError_t forward(Type type, const Sizes& sizes, const Plan& plan, const Forward& to, cudaStream_t stream) {
  const Order order = order_of(sizes, plan);
  const int D = sizes.width, F = sizes.inner;
  const Part all{0, sizes.experts};
  Steps step;
  step([&] {
    return order_rows(to.indices, to.wide_indices, to.block_counts, plan, sizes.tokens * sizes.topk, sizes.experts,
                      sizes.rows(), stream);
  });
  const auto spread_part = [&](int i) {
    return spread(part(kForwardEnds, sizes.experts, i), to.x, to.x_rows, D, plan);
  };
  step([&] { return run(type, spread_part(0), order, stream); });
  for (int i = 0; i < kParts; ++i) {
    const Errand next = i + 1 < kParts ? spread_part(i + 1) : Errand{};
    step([&] {
      return up_swiglu(type, to.x_rows, to.gate_up, to.hidden, to.activation, order, D, F,
                       part(kForwardEnds, sizes.experts, i), next, stream);
    });
  }
  void* y_rows = to.x_rows;
  step([&] { return rows_times_weight(type, to.activation, to.down, y_rows, order, F, D, true, all, {}, stream); });
  Errand sum{Task::kSum, D};
  sum.from = y_rows, sum.to = to.y, sum.row_of_slot = plan.row, sum.weights = to.weights;
  step([&] { return run(type, sum, order, stream); });
  return step.error;
}

cudaError_t backward(Type type, const Sizes& sizes, const Plan& plan, const Backward& to, cudaStream_t stream) {
  const Order order = order_of(sizes, plan);
  const int D = sizes.width, F = sizes.inner;
  const auto part_of = [&](int i) { return part(kBackwardEnds, sizes.experts, i); };
  const auto spread_part = [&](int i) { return spread(part_of(i), to.dy, to.dy_rows, D, plan); };
  const auto swiglu_part = [&](int i) {
    Errand errand{Task::kSwigluBackward, F, part_of(i).first, part_of(i).end};
    errand.from = to.hidden, errand.to = to.activation, errand.to_too = to.dhidden;
    errand.weights = to.weights, errand.dweights = to.dweights;
    return errand;
  };
  Steps step;
  const size_t weights = static_cast<size_t>(sizes.tokens) * sizes.topk * sizeof(float);
  step([&] { return cudaMemsetAsync(to.dweights, 0, weights, stream); });  // slots of no local expert keep it
  step([&] { return run(type, spread_part(0), order, stream); });
  for (int i = 0; i < kParts; ++i) {  // to.activation is its gradient until SwiGLU's backward
    const Errand beside = i + 1 < kParts ? spread_part(i + 1) : swiglu_part(0);
    step([&] {
      return rows_times_weight(type, to.dy_rows, to.down, to.activation, order, D, F, false, part_of(i), beside,
                               stream);
    });
  }
  for (int i = 0; i < kParts; ++i) {
    const Errand beside = i + 1 < kParts ? swiglu_part(i + 1) : spread({0, sizes.experts}, to.x, to.x_rows, D, plan);
    step([&] {
      return rows_times_weight(type, to.dhidden, to.gate_up, to.dx_rows, order, 2 * F, D, false, part_of(i), beside,
                               stream);
    });
  }
  Errand sum{Task::kSum, D};
  sum.from = to.dx_rows, sum.to = to.dx, sum.row_of_slot = plan.row;
  step([&] {
    return weight_gradient(type, to.dhidden, to.x_rows, to.dgate_up, to.add_gate_up, order, 2 * F, D, sum, stream);
  });
  step(
      [&] { return weight_gradient(type, to.dy_rows, to.activation, to.ddown, to.add_down, order, D, F, {}, stream); });
  return step.error;
}

}  // namespace optimus::cuda
