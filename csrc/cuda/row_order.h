// Row order (row_order.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "grouped_gemm.h"

namespace optimus::cuda {

constexpr int kMaxExperts = 1024;  // what the counts of a block hold in shared memory

struct RowOrderBuffers {  // an Order to be written, and [T*K] the row of each slot, -1 for a foreign one
  int *slot, *row, *first_row, *count, *tile_expert, *num_tiles, *by_size, *tile_shift;
};

// The order of expert choices [T*K], int32 or int64, -1 for a foreign slot; any other value outside [0, E) stops the
// device. block_counts: scratch of num_experts * order_blocks(num_slots, num_experts). On the way num_zeros numbers are
// set to zero, for what comes later in the stream.
cudaError_t order_rows(const void* indices, bool wide_indices, int* block_counts, const RowOrderBuffers&, int num_slots,
                       int num_experts, int num_rows, int* zeros, int num_zeros, cudaStream_t);
int order_blocks(int num_slots, int num_experts);

}  // namespace optimus::cuda
