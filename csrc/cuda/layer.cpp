// The order of kernels in an expert layer.
//
// Memory-bound work runs as background tasks inside GEMMs: permutes and SwiGLU's backward run ahead of the GEMM that
// needs their rows, a slice of the experts at a time; what a later GEMM needs runs at any time. The up projection
// gathers tokens itself, because their rows are needed nowhere else. Only the forward's combine has the device for
// itself. Consecutive launches overlap (programmatic dependent launch): between two GEMMs of the backward there is
// always a task, and the second GEMM waits for that task, not for the first GEMM.
#include <algorithm>
#include <array>

#include "layer.h"

namespace optimus::cuda {
namespace {

// A slice of a permute: its end in 32nds of the experts, and the warps of a block that do it. While the GEMM works on
// one slice the next is prepared; nothing hides the first, so it is small. A permute by all idle warps takes bandwidth
// from the GEMM and costs what it would alone; one that takes as long as it may is nearly free
// (docs/design/expert_kernels.md).
struct PermuteSlice {
  int end, warps;
};

constexpr int kWhole = 32;
// SwiGLU's backward of the experts before kFirst runs beside the product before it, in two parts after that.
constexpr int kFirst = 12, kSecond = 20;
constexpr std::array<PermuteSlice, 3> kPermuteSlices = {{{1, 3}, {4, 3}, {kFirst, 3}}};
// Besides these: the permutes of the rest of dy and of x, SwiGLU's backward in three slices, and the combine of dx.
static_assert(kTaskCounters == 2 * (kPermuteSlices.size() + 6));

ExpertRange part(int experts, int from, int to) { return {experts * from / kWhole, experts * to / kWhole}; }

BackgroundTask permute(const ExpertRange& experts, const void* from, void* to, int width, const RowOrderBuffers& plan) {
  BackgroundTask task{TaskKind::kPermute, width, experts.first, experts.end};
  task.from = from, task.to = to, task.row_of_slot = plan.row;
  return task;
}

BackgroundTask combine_dx(const Sizes& sizes, const RowOrderBuffers& plan, const void* dx_rows, void* dx) {
  BackgroundTask task{TaskKind::kCombine, sizes.width};
  task.from = dx_rows, task.to = dx, task.row_of_slot = plan.row;
  return task;
}

// Gives a task its two progress counters.
BackgroundTask with_counters(BackgroundTask task, int*& progress) {
  task.progress = progress, progress += 2;
  return task;
}

// The same task as a dependency of another GEMM, which waits for it but does not run it.
BackgroundTask dependency_on(BackgroundTask task) {
  task.warps = 0, task.is_dependency = true;
  return task;
}

// Appends a task that the GEMM runs and waits for.
BackgroundTask* add_dependency(BackgroundTask* list, const BackgroundTask& task, int*& progress) {
  if (task.first_expert == task.end_expert) return list;
  *list = with_counters(task, progress);
  list->is_dependency = true;
  return list + 1;
}

BackgroundTask* add_permutes(BackgroundTask* list, const Sizes& sizes, const void* from, void* to,
                             const RowOrderBuffers& plan, int*& progress) {
  int start = 0;
  for (const auto& [end, warps] : kPermuteSlices) {
    BackgroundTask task = permute(part(sizes.experts, start, end), from, to, sizes.width, plan);
    task.warps = warps, start = end;
    list = add_dependency(list, task, progress);
  }
  return list;
}

Order order_of(const Sizes& sizes, const RowOrderBuffers& plan) {
  return {plan.slot,    plan.first_row, plan.count,    plan.tile_expert, plan.tile_shift, plan.num_tiles,
          plan.by_size, sizes.rows(),   sizes.experts, sizes.tokens,     sizes.topk};
}

// Runs calls until one fails.
struct CallChain {
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

cudaError_t forward(Type type, const Sizes& sizes, const RowOrderBuffers& plan, const Forward& to,
                    cudaStream_t stream) {
  const Order order = order_of(sizes, plan);
  const int D = sizes.width, F = sizes.inner, E = sizes.experts;
  CallChain step;
  step([&] {
    return order_rows(to.indices, to.wide_indices, to.block_counts, plan, sizes.tokens * sizes.topk, E, sizes.rows(),
                      to.next_items, kForwardProducts, stream);
  });
  step([&] { return up_swiglu(type, to.x, to.gate_up, to.hidden, to.activation, order, D, F, to.next_items, stream); });
  step([&] {
    return grouped_gemm(type, to.activation, to.down, to.y_rows, order, F, D, true, {0, E}, {}, to.next_items + 1,
                        Start::kLate, stream);
  });
  BackgroundTask sum{TaskKind::kCombine, D};
  sum.from = to.y_rows, sum.to = to.y, sum.row_of_slot = plan.row, sum.weights = to.weights;
  step([&] { return run(type, sum, order, stream); });
  return step.error;
}

cudaError_t backward_inputs(Type type, const Sizes& sizes, const RowOrderBuffers& plan, const BackwardInputs& to,
                            cudaStream_t stream) {
  const Order order = order_of(sizes, plan);
  const int D = sizes.width, F = sizes.inner, E = sizes.experts;
  int* progress = to.progress;
  const auto swiglu = [&](const ExpertRange& experts) {  // to.activation is its gradient until then
    BackgroundTask task{TaskKind::kSwigluBackward, F, experts.first, experts.end};
    task.from = to.hidden, task.to = to.activation, task.second_output = to.pending.dhidden;
    task.weights = to.weights, task.dweights = to.dweights;
    return task;
  };
  const ExpertRange first = part(E, 0, kFirst), rest = part(E, kFirst, kWhole);
  CallChain step;
  // Slots of experts on other ranks keep a gradient of zero.
  const size_t weights = static_cast<size_t>(sizes.tokens) * sizes.topk * sizeof(float);
  step([&] { return cudaMemsetAsync(to.dweights, 0, weights + kProgressBytes, stream); });
  const bool sums_later = to.pending.dx_rows != nullptr;
  int* next_item = progress + kTaskCounters;
  // backward_up_weights uses the first two pairs of counters.
  BackgroundTask permute_x = with_counters(permute({0, E}, to.x, to.pending.x_rows, D, plan), progress);
  const BackgroundTask sum = with_counters(combine_dx(sizes, plan, to.dx_rows, to.dx), progress);
  BackgroundTasks permutes, swiglu_of_first, swiglu_of_rest, last;
  BackgroundTask* list = add_permutes(permutes.list, sizes, to.dy, to.dy_rows, plan, progress);
  *list = with_counters(permute(rest, to.dy, to.dy_rows, D, plan), progress);
  list->warps = 2;
  swiglu_of_first.list[0] = dependency_on(*list);
  swiglu_of_first.list[1] = with_counters(swiglu(first), progress);
  step([&] {
    return grouped_gemm(type, to.dy_rows, to.down, to.activation, order, D, F, false, first, permutes, next_item++,
                        Start::kAfter, stream);
  });
  step([&] {
    return grouped_gemm(type, to.dy_rows, to.down, to.activation, order, D, F, false, rest, swiglu_of_first,
                        next_item++, Start::kEarly, stream);
  });
  swiglu_of_rest.list[0] = dependency_on(swiglu_of_first.list[1]);
  list = add_dependency(swiglu_of_rest.list + 1, swiglu(part(E, kFirst, kSecond)), progress);
  list = add_dependency(list, swiglu(part(E, kSecond, kWhole)), progress);
  BackgroundTask* next = std::transform(swiglu_of_rest.list + 1, list, last.list, dependency_on);
  if (sums_later) {
    *next = permute_x, next->warps = 1;
  } else {
    *list = permute_x, list->warps = 2;
    *next = sum;
  }
  step([&] {
    return grouped_gemm(type, to.pending.dhidden, to.gate_up, to.dx_rows, order, 2 * F, D, false, {0, E},
                        swiglu_of_rest, next_item++, Start::kEarly, stream);
  });
  step([&] {
    return weight_gradient(type, to.dy_rows, to.activation, to.ddown, to.down_mode, order, D, F, last, next_item++,
                           Start::kEarly, stream);
  });
  return step.error;
}

cudaError_t backward_up_weights(Type type, const Sizes& sizes, const RowOrderBuffers& plan, const UpWeights& from,
                                void* dgate_up, StoreMode put, cudaStream_t stream) {
  const ExpertRange all{0, sizes.experts};
  BackgroundTasks tasks;
  const bool continues = from.dx_rows != nullptr;
  if (continues) {
    int* progress = from.progress;
    tasks.list[0] = dependency_on(with_counters(permute(all, nullptr, from.x_rows, sizes.width, plan), progress));
    tasks.list[1] = with_counters(combine_dx(sizes, plan, from.dx_rows, from.dx), progress);
  }
  return weight_gradient(type, from.dhidden, from.x_rows, dgate_up, put, order_of(sizes, plan), 2 * sizes.inner,
                         sizes.width, tasks, from.next_item, continues ? Start::kEarly : Start::kAfter, stream);
}

}  // namespace optimus::cuda
