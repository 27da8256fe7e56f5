// The experts of a layer, forward and backward: which kernel runs when (layer.cpp).
#pragma once

#include "order.h"

namespace optimus::cuda {

struct Sizes {
  int tokens, topk, width, inner, experts;
  int rows() const;  // P that suffice for any routing, as index.py's max_rows says
};

constexpr int kProgressBytes = 2 * kMaxErrands * sizeof(int);  // for all errands of a direction that are waited for

struct Forward {
  const void *x, *gate_up, *down;
  const float* weights;
  const void* indices;
  bool wide_indices;
  int* block_counts;          // scratch, experts * order_blocks(tokens * topk)
  int* progress;              // scratch, kProgressBytes
  void *x_rows, *activation;  // scratch [P, D] and [P, F]; the experts' outputs replace x_rows
  void *hidden, *y;           // results [T K, 2F] and [T, D]
};

struct Backward {
  const void *dy, *x, *gate_up, *down, *hidden;
  const float* weights;
  void *dy_rows, *x_rows, *dx_rows;  // scratch [P, D]
  void *activation, *dhidden;        // scratch [P, F] and [P, 2F]
  void *dx, *dgate_up, *ddown;       // results
  bool add_gate_up, add_down;        // to what is there in fp32
  float* dweights;
  int* progress;  // scratch, kProgressBytes
};

cudaError_t forward(Type, const Sizes&, const Plan&, const Forward&, cudaStream_t);
cudaError_t backward(Type, const Sizes&, const Plan&, const Backward&, cudaStream_t);

}  // namespace optimus::cuda
