// Sums of rows that were copied to several positions (megatron/optimus/ops/row_copies.py), on the CPU.
#include <torch/library.h>

#include "moe_parts.h"

namespace optimus::cpu {
namespace {

// copies [S, D] and positions [T, P], int32, both contiguous -> [T, D]: row t is the sum, in fp32 and in the order of P,
// of the copies at its positions; -1 stands for no copy. Raises ValueError for a position outside [-1, S).
at::Tensor sum_copies(const at::Tensor& copies, const at::Tensor& positions) {
  const int64_t num_copies = copies.size(0), num_positions = positions.numel();
  const int32_t* position = positions.const_data_ptr<int32_t>();
  for (int64_t n = 0; n < num_positions; ++n)
    TORCH_CHECK_VALUE(position[n] >= -1 && position[n] < num_copies, "positions hold ", position[n],
                      "; expected values in [-1, ", num_copies, ")");
  const Order order{nullptr, position, nullptr, num_positions, 1, num_copies};
  at::Tensor sums = at::empty({positions.size(0), copies.size(1)}, copies.options());
  OPTIMUS_DISPATCH(copies.scalar_type(), "sum_copies", [&] {
    sum_rows(copies.const_data_ptr<scalar_t>(), order, nullptr, positions.size(0), copies.size(1),
             sums.mutable_data_ptr<scalar_t>());
  });
  return sums;
}

}  // namespace

TORCH_LIBRARY_IMPL(optimus, CPU, m) { m.impl("cpu_sum_copies", &sum_copies); }

}  // namespace optimus::cpu
