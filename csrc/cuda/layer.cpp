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

constexpr int kExpertParts = 32;
// SwiGLU's backward of the experts before kFirstSwigluEnd runs beside the product before it, in two parts after that.
constexpr int kFirstSwigluEnd = 12, kSecondSwigluEnd = 20;
constexpr std::array<PermuteSlice, 3> kPermuteSlices = {{{1, 3}, {4, 3}, {kFirstSwigluEnd, 3}}};
// Besides these: the permutes of the rest of dy and of x, SwiGLU's backward in three slices, and the combine of dx.
static_assert(kTaskCounters == 2 * (kPermuteSlices.size() + 6));

ExpertRange part(int experts, int from, int to) { return {experts * from / kExpertParts, experts * to / kExpertParts}; }

BackgroundTask permute(const ExpertRange& experts, const void* from, void* to, int width,
                       const RowOrderBuffers& buffers) {
  BackgroundTask task{TaskKind::kPermute, width, experts.first, experts.end};
  task.from = from, task.to = to, task.row_of_slot = buffers.row;
  return task;
}

BackgroundTask combine_dx(const Sizes& sizes, const RowOrderBuffers& buffers, const void* dx_rows, void* dx) {
  BackgroundTask task{TaskKind::kCombine, sizes.width};
  task.from = dx_rows, task.to = dx, task.row_of_slot = buffers.row;
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
                             const RowOrderBuffers& buffers, int*& progress) {
  int start = 0;
  for (const auto& [end, warps] : kPermuteSlices) {
    BackgroundTask task = permute(part(sizes.experts, start, end), from, to, sizes.width, buffers);
    task.warps = warps, start = end;
    list = add_dependency(list, task, progress);
  }
  return list;
}

Order order_of(const Sizes& sizes, const RowOrderBuffers& buffers) {
  return {buffers.slot,    buffers.first_row, buffers.count, buffers.tile_expert, buffers.tile_shift, buffers.num_tiles,
          buffers.by_size, sizes.rows(),      sizes.experts, sizes.tokens,        sizes.topk};
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

cudaError_t forward(Type type, const Sizes& sizes, const RowOrderBuffers& buffers, const Forward& to,
                    cudaStream_t stream) {
  const Order order = order_of(sizes, buffers);
  const int D = sizes.width, F = sizes.inner, E = sizes.experts;
  CallChain calls;
  calls([&] {
    return order_rows(to.indices, to.wide_indices, to.block_counts, buffers, sizes.tokens * sizes.topk, E, sizes.rows(),
                      to.tile_counters, kForwardProducts, stream);
  });
  calls([&] {
    return up_swiglu(type, to.x, to.gate_up, to.hidden, to.activation, order, D, F, to.tile_counters, stream);
  });
  calls([&] {
    return grouped_gemm(type, to.activation, to.down, to.y_rows, order, F, D, true, {0, E}, {}, to.tile_counters + 1,
                        Start::kLate, stream);
  });
  BackgroundTask combine{TaskKind::kCombine, D};
  combine.from = to.y_rows, combine.to = to.y, combine.row_of_slot = buffers.row, combine.weights = to.weights;
  calls([&] { return run(type, combine, order, stream); });
  return calls.error;
}

cudaError_t backward_inputs(Type type, const Sizes& sizes, const RowOrderBuffers& buffers, const BackwardInputs& to,
                            cudaStream_t stream) {
  const Order order = order_of(sizes, buffers);
  const int D = sizes.width, F = sizes.inner, E = sizes.experts;
  int* progress = to.progress;
  const auto swiglu = [&](const ExpertRange& experts) {  // to.activation is its gradient until then
    BackgroundTask task{TaskKind::kSwigluBackward, F, experts.first, experts.end};
    task.from = to.hidden, task.to = to.activation, task.second_output = to.pending.dhidden;
    task.weights = to.weights, task.dweights = to.dweights;
    return task;
  };
  const ExpertRange first = part(E, 0, kFirstSwigluEnd), rest = part(E, kFirstSwigluEnd, kExpertParts);
  CallChain calls;
  // Slots of experts on other ranks keep a gradient of zero.
  const size_t weights = static_cast<size_t>(sizes.tokens) * sizes.topk * sizeof(float);
  calls([&] { return cudaMemsetAsync(to.dweights, 0, weights + kProgressBytes, stream); });
  const bool sums_later = to.pending.dx_rows != nullptr;
  int* tile_counter = progress + kTaskCounters;
  // backward_up_weights uses the first two pairs of counters.
  BackgroundTask permute_x = with_counters(permute({0, E}, to.x, to.pending.x_rows, D, buffers), progress);
  const BackgroundTask combine = with_counters(combine_dx(sizes, buffers, to.dx_rows, to.dx), progress);
  BackgroundTasks permutes, swiglu_of_first, swiglu_of_rest, last;
  BackgroundTask* list = add_permutes(permutes.list, sizes, to.dy, to.dy_rows, buffers, progress);
  *list = with_counters(permute(rest, to.dy, to.dy_rows, D, buffers), progress);
  list->warps = 2;
  swiglu_of_first.list[0] = dependency_on(*list);
  swiglu_of_first.list[1] = with_counters(swiglu(first), progress);
  calls([&] {
    return grouped_gemm(type, to.dy_rows, to.down, to.activation, order, D, F, false, first, permutes, tile_counter++,
                        Start::kAfter, stream);
  });
  calls([&] {
    return grouped_gemm(type, to.dy_rows, to.down, to.activation, order, D, F, false, rest, swiglu_of_first,
                        tile_counter++, Start::kEarly, stream);
  });
  swiglu_of_rest.list[0] = dependency_on(swiglu_of_first.list[1]);
  list = add_dependency(swiglu_of_rest.list + 1, swiglu(part(E, kFirstSwigluEnd, kSecondSwigluEnd)), progress);
  list = add_dependency(list, swiglu(part(E, kSecondSwigluEnd, kExpertParts)), progress);
  BackgroundTask* next = std::transform(swiglu_of_rest.list + 1, list, last.list, dependency_on);
  if (sums_later) {
    *next = permute_x, next->warps = 1;
  } else {
    *list = permute_x, list->warps = 2;
    *next = combine;
  }
  calls([&] {
    return grouped_gemm(type, to.pending.dhidden, to.gate_up, to.dx_rows, order, 2 * F, D, false, {0, E},
                        swiglu_of_rest, tile_counter++, Start::kEarly, stream);
  });
  calls([&] {
    return weight_gradient(type, to.dy_rows, to.activation, to.ddown, to.down_mode, order, D, F, last, tile_counter++,
                           Start::kEarly, stream);
  });
  return calls.error;
}

cudaError_t backward_up_weights(Type type, const Sizes& sizes, const RowOrderBuffers& buffers, const UpWeights& from,
                                void* dgate_up, StoreMode store_mode, cudaStream_t stream) {
  const ExpertRange all{0, sizes.experts};
  BackgroundTasks tasks;
  const bool continues = from.dx_rows != nullptr;
  if (continues) {
    int* progress = from.progress;
    tasks.list[0] = dependency_on(with_counters(permute(all, nullptr, from.x_rows, sizes.width, buffers), progress));
    tasks.list[1] = with_counters(combine_dx(sizes, buffers, from.dx_rows, from.dx), progress);
  }
  return weight_gradient(type, from.dhidden, from.x_rows, dgate_up, store_mode, order_of(sizes, buffers),
                         2 * sizes.inner, sizes.width, tasks, from.tile_counter,
                         continues ? Start::kEarly : Start::kAfter, stream);
}

}  // namespace optimus::cuda
