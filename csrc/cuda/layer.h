// Forward and backward of an expert layer: which kernel runs when (layer.cpp).
#pragma once

#include "row_order.h"

namespace optimus::cuda {

struct Sizes {
  int tokens, topk, width, inner, experts;
  int rows() const;  // P that suffice for any routing, as row_order.py's max_rows says
};

constexpr int kForwardProducts = 2, kBackwardProducts = 5;
// Counters of a backward: two for each background task, one for each GEMM.
constexpr int kTaskCounters = 2 * 9, kProgressBytes = (kTaskCounters + kBackwardProducts) * sizeof(int);

struct Forward {
  const void *x, *gate_up, *down;
  const float* weights;
  const void* indices;
  bool wide_indices;
  int* block_counts;          // scratch, experts * order_blocks(tokens * topk, experts)
  int* tile_counters;         // scratch, kForwardProducts
  void *activation, *y_rows;  // scratch [P, F] and [P, D]
  void *hidden, *y;           // results [T K, 2F] and [T, D]
};

// Operands of gate_up's gradient: the only GEMM that may run later, because dx does not need it.
struct UpWeights {
  void *dhidden = nullptr, *x_rows = nullptr;  // [P, 2F] and [P, D]
  // Rows [P, D] whose combine into dx [T, D] was left to backward_up_weights, or null.
  const void* dx_rows = nullptr;
  void* dx = nullptr;
  int* progress = nullptr;      // with dx_rows: the counters of backward_inputs, which must be the launch right before
  int* tile_counter = nullptr;  // a zero
};

struct BackwardInputs {
  const void *dy, *x, *gate_up, *down, *hidden;
  const float* weights;
  void *dy_rows, *dx_rows, *activation;  // scratch [P, D], [P, D] and [P, F]
  void *dx, *ddown;                      // results
  StoreMode down_mode;
  float* dweights;
  int* progress;      // scratch, kProgressBytes, right behind dweights: both start as zeros
  UpWeights pending;  // with dx_rows, dx is complete only after the second half
};

cudaError_t forward(Type, const Sizes&, const RowOrderBuffers&, const Forward&, cudaStream_t);

// The backward in two calls: everything but the gradient of gate_up, then that gradient. If nothing runs in between,
// the combine of dx is cheapest in the second call.
cudaError_t backward_inputs(Type, const Sizes&, const RowOrderBuffers&, const BackwardInputs&, cudaStream_t);
cudaError_t backward_up_weights(Type, const Sizes&, const RowOrderBuffers&, const UpWeights&, void* dgate_up, StoreMode,
                                cudaStream_t);

}  // namespace optimus::cuda
