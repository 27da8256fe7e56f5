// The experts of a layer, forward and backward: which kernel runs when (layer.cpp).
#pragma once

#include "order.h"

namespace optimus::cuda {

struct Sizes {
  int tokens, topk, width, inner, experts;
  int rows() const;  // P that suffice for any routing, as index.py's max_rows says
};

constexpr int kForwardProducts = 2, kBackwardProducts = 5;
// What a backward counts in: two for each errand, one for each product.
constexpr int kErrandCounters = 2 * 9, kProgressBytes = (kErrandCounters + kBackwardProducts) * sizeof(int);

struct Forward {
  const void *x, *gate_up, *down;
  const float* weights;
  const void* indices;
  bool wide_indices;
  int* block_counts;          // scratch, experts * order_blocks(tokens * topk, experts)
  int* next_items;            // scratch, kForwardProducts
  void *activation, *y_rows;  // scratch [P, F] and [P, D]
  void *hidden, *y;           // results [T K, 2F] and [T, D]
};

// What the gradient of gate_up is made of: the only product that may wait, for dx does not need it.
struct UpWeights {
  void *dhidden = nullptr, *x_rows = nullptr;  // [P, 2F] and [P, D]
  // Rows [P, D] that are yet to be summed to dx [T, D], if the first half left that to the second.
  const void* dx_rows = nullptr;
  void* dx = nullptr;
  int* progress = nullptr;   // with dx_rows: the first half's, which came right before, in the stream and in memory
  int* next_item = nullptr;  // a zero
};

struct BackwardInputs {
  const void *dy, *x, *gate_up, *down, *hidden;
  const float* weights;
  void *dy_rows, *dx_rows, *activation;  // scratch [P, D], [P, D] and [P, F]
  void *dx, *ddown;                      // results
  Put put_down;
  float* dweights;
  int* progress;  // scratch, kProgressBytes, right behind dweights: both start as zeros
  UpWeights pending;  // with dx_rows, dx is complete only after the second half
};

cudaError_t forward(Type, const Sizes&, const Plan&, const Forward&, cudaStream_t);

// The backward in two halves: everything but the gradient of gate_up, then that. Where nothing happens in between the
// sum of dx is cheapest in the second.
cudaError_t backward_inputs(Type, const Sizes&, const Plan&, const BackwardInputs&, cudaStream_t);
cudaError_t backward_up_weights(Type, const Sizes&, const Plan&, const UpWeights&, void* dgate_up, Put,
                                cudaStream_t);

}  // namespace optimus::cuda
