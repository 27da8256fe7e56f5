// Work bound by memory is done beside products, as their errands: the spread of tokens to rows and SwiGLU's backward
// ahead of the product that needs the rows, part by part of the experts, what a later product needs at any time. The up
// projection reads tokens itself, as their rows are needed nowhere else. Only the sum of the forward has the device
// for itself. Where no launch but these is in between, a product's blocks start where those of the one before leave:
// between two products of the backward there is always an errand, and the second waits for that, not for the first.
#include "layer.h"

#include <algorithm>
#include <array>

namespace optimus::cuda {
namespace {

// A part of a spread: where it ends, in 32nds of the experts, and how many warps of a block do it. Beside the product
// on one part the next is made ready, so the first is small, as nothing hides it. A spread by all idle warps takes
// bandwidth from the product for a while, and costs what it would alone; one that takes as long as it may is nearly free
// (benchmarks/results/cuda_kernels_h200.txt, sections 8, 9 and 23).
struct SpreadPart {
  int end, warps;
};

constexpr int kWhole = 32;
// SwiGLU's backward of the experts before kFirst runs beside the product before it, in two parts after that.
constexpr int kFirst = 12, kSecond = 20;
constexpr std::array<SpreadPart, 3> kSpreads = {{{1, 3}, {4, 3}, {kFirst, 3}}};
// Besides these the spread of the rest of dy, that of x, SwiGLU's backward in three parts, and the sum of dx.
static_assert(kErrandCounters == 2 * (kSpreads.size() + 6));

Part part(int experts, int from, int to) { return {experts * from / kWhole, experts * to / kWhole}; }

Errand spread(const Part& experts, const void* from, void* to, int width, const Plan& plan) {
  Errand errand{Task::kSpread, width, experts.first, experts.end};
  errand.from = from, errand.to = to, errand.row_of_slot = plan.row;
  return errand;
}

Errand sum_of_dx(const Sizes& sizes, const Plan& plan, const void* dx_rows, void* dx) {
  Errand errand{Task::kSum, sizes.width};
  errand.from = dx_rows, errand.to = dx, errand.row_of_slot = plan.row;
  return errand;
}

// With a place to count its chunks.
Errand counted(Errand errand, int*& progress) {
  errand.progress = progress, progress += 2;
  return errand;
}

// As a product awaits it that another one takes along.
Errand done_elsewhere(Errand errand) {
  errand.warps = 0, errand.awaited = true;
  return errand;
}

// Adds an errand that the product awaits.
Errand* add_ahead(Errand* list, const Errand& errand, int*& progress) {
  if (errand.first_expert == errand.end_expert) return list;
  *list = counted(errand, progress);
  list->awaited = true;
  return list + 1;
}

Errand* spread_ahead(Errand* list, const Sizes& sizes, const void* from, void* to, const Plan& plan, int*& progress) {
  int start = 0;
  for (const auto& [end, warps] : kSpreads) {
    Errand errand = spread(part(sizes.experts, start, end), from, to, sizes.width, plan);
    errand.warps = warps, start = end;
    list = add_ahead(list, errand, progress);
  }
  return list;
}

Order order_of(const Sizes& sizes, const Plan& plan) {
  return {plan.slot,    plan.first_row, plan.count,    plan.tile_expert, plan.tile_shift, plan.num_tiles,
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
  const int D = sizes.width, F = sizes.inner, E = sizes.experts;
  Steps step;
  step([&] {
    return order_rows(to.indices, to.wide_indices, to.block_counts, plan, sizes.tokens * sizes.topk, E, sizes.rows(),
                      to.next_items, kForwardProducts, stream);
  });
  step([&] { return up_swiglu(type, to.x, to.gate_up, to.hidden, to.activation, order, D, F, to.next_items, stream); });
  step([&] {
    return rows_times_weight(type, to.activation, to.down, to.y_rows, order, F, D, true, {0, E}, {},
                             to.next_items + 1, Start::kLate, stream);
  });
  Errand sum{Task::kSum, D};
  sum.from = to.y_rows, sum.to = to.y, sum.row_of_slot = plan.row, sum.weights = to.weights;
  step([&] { return run(type, sum, order, stream); });
  return step.error;
}

cudaError_t backward_inputs(Type type, const Sizes& sizes, const Plan& plan, const BackwardInputs& to,
                            cudaStream_t stream) {
  const Order order = order_of(sizes, plan);
  const int D = sizes.width, F = sizes.inner, E = sizes.experts;
  int* progress = to.progress;
  const auto swiglu = [&](const Part& experts) {  // to.activation is its gradient until then
    Errand errand{Task::kSwigluBackward, F, experts.first, experts.end};
    errand.from = to.hidden, errand.to = to.activation, errand.to_too = to.pending.dhidden;
    errand.weights = to.weights, errand.dweights = to.dweights;
    return errand;
  };
  const Part first = part(E, 0, kFirst), rest = part(E, kFirst, kWhole);
  Steps step;
  // A slot of no local expert keeps its zero.
  const size_t weights = static_cast<size_t>(sizes.tokens) * sizes.topk * sizeof(float);
  step([&] { return cudaMemsetAsync(to.dweights, 0, weights + kProgressBytes, stream); });
  const bool sums_later = to.pending.dx_rows != nullptr;
  int* next_item = progress + kErrandCounters;
  // Of the first two pairs of counters the second half knows.
  Errand spread_x = counted(spread({0, E}, to.x, to.pending.x_rows, D, plan), progress);
  const Errand sum = counted(sum_of_dx(sizes, plan, to.dx_rows, to.dx), progress);
  Errands spreads, swiglu_of_first, swiglu_of_rest, last;
  Errand* list = spread_ahead(spreads.list, sizes, to.dy, to.dy_rows, plan, progress);
  *list = counted(spread(rest, to.dy, to.dy_rows, D, plan), progress);
  list->warps = 2;
  swiglu_of_first.list[0] = done_elsewhere(*list);
  swiglu_of_first.list[1] = counted(swiglu(first), progress);
  step([&] {
    return rows_times_weight(type, to.dy_rows, to.down, to.activation, order, D, F, false, first, spreads,
                             next_item++, Start::kAfter, stream);
  });
  step([&] {
    return rows_times_weight(type, to.dy_rows, to.down, to.activation, order, D, F, false, rest, swiglu_of_first,
                             next_item++, Start::kEarly, stream);
  });
  swiglu_of_rest.list[0] = done_elsewhere(swiglu_of_first.list[1]);
  list = add_ahead(swiglu_of_rest.list + 1, swiglu(part(E, kFirst, kSecond)), progress);
  list = add_ahead(list, swiglu(part(E, kSecond, kWhole)), progress);
  Errand* next = std::transform(swiglu_of_rest.list + 1, list, last.list, done_elsewhere);
  if (sums_later) {
    *next = spread_x, next->warps = 1;
  } else {
    *list = spread_x, list->warps = 2;
    *next = sum;
  }
  step([&] {
    return rows_times_weight(type, to.pending.dhidden, to.gate_up, to.dx_rows, order, 2 * F, D, false, {0, E},
                             swiglu_of_rest, next_item++, Start::kEarly, stream);
  });
  step([&] {
    return weight_gradient(type, to.dy_rows, to.activation, to.ddown, to.put_down, order, D, F, last, next_item++,
                           Start::kEarly, stream);
  });
  return step.error;
}

cudaError_t backward_up_weights(Type type, const Sizes& sizes, const Plan& plan, const UpWeights& from, void* dgate_up,
                                Put put, cudaStream_t stream) {
  const Part all{0, sizes.experts};
  Errands errands;
  const bool continues = from.dx_rows != nullptr;
  if (continues) {
    int* progress = from.progress;
    errands.list[0] = done_elsewhere(counted(spread(all, nullptr, from.x_rows, sizes.width, plan), progress));
    errands.list[1] = counted(sum_of_dx(sizes, plan, from.dx_rows, from.dx), progress);
  }
  return weight_gradient(type, from.dhidden, from.x_rows, dgate_up, put, order_of(sizes, plan), 2 * sizes.inner,
                         sizes.width, errands, from.next_item, continues ? Start::kEarly : Start::kAfter, stream);
}

}  // namespace optimus::cuda
