// Row order (slots sorted by expert) on the CPU, loops over threads, and scratch memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <cstdint>
#include <functional>
#include <vector>

// The element types with a kernel; float64 is the reference's.
#define OPTIMUS_DISPATCH(type, name, ...)                                          \
  AT_DISPATCH_SWITCH(type, name, AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)         \
                     AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__)                  \
                     AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))

namespace optimus::cpu {

struct RowBlock {
  int64_t expert, first, rows;  // [first, first + rows) in expert order
};

// The order of reference.py: N rows, of which the first num_rows belong to local slots. Views of tensors held elsewhere.
struct Order {
  const int32_t* slots;    // [N] slot of each row, foreign slots last
  const int32_t* rows;     // [N] row of each slot, -1 for a foreign slot; null where it is not needed
  const int32_t* offsets;  // [E+3] first row of each expert; then num_rows, N, N
  int64_t num_slots, num_experts, num_rows;

  // Cuts each expert's rows into equal blocks of at most about `most` rows, whole tiles of `tile` rows but for the last.
  std::vector<RowBlock> blocks(int64_t most, int64_t tile) const;
};

// slots, rows, counts, offsets as int32 tensors. Raises ValueError for an index outside [-1, E).
struct SortedSlots {
  at::Tensor slots, rows, counts, offsets;
  Order view() const;
};
SortedSlots sort_slots(const at::Tensor& indices, int64_t num_experts);

// Dynamic work queue: calls work once on each thread; next() returns items in [0, count), then count. Items are
// independent and each is done by one thread, so the result does not depend on which thread takes it.
void for_each(int64_t count, const std::function<void(const std::function<int64_t()>& next)>& work);

// fp32 memory for one call, from the buffers that the calling thread kept of earlier calls: touching fresh pages of the
// operating system would cost about a tenth of a training step.
at::Tensor scratch(int64_t numel);

}  // namespace optimus::cpu
