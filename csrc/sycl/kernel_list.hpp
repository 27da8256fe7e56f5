// Every kernel, with the file that holds it. The ahead-of-time build takes the kernels' addresses from this list, and JIT
// compilation refuses a name that is not on it: what continuous integration runs is what a GPU build finds.
#pragma once

#define OPTIMUS_KERNELS_PER_TYPE(X, type)   \
  X(permute, combine_##type)                \
  X(swiglu, swiglu_backward_##type)         \
  X(grouped_gemm, gemm_rows_##type##_64)    \
  X(grouped_gemm, gemm_rows_##type##_16)    \
  X(grouped_gemm, gemm_swiglu_##type##_64)  \
  X(grouped_gemm, gemm_swiglu_##type##_16)  \
  X(grouped_gemm, gemm_weights_##type##_64) \
  X(grouped_gemm, gemm_weights_##type##_16)

#define OPTIMUS_KERNELS(X)                  \
  X(row_order, count_slots_i32)             \
  X(row_order, count_slots_i64)             \
  X(row_order, scan_blocks)                 \
  X(row_order, scan_bins)                   \
  X(row_order, place_slots_i32)             \
  X(row_order, place_slots_i64)             \
  X(router, router_topk)                    \
  X(router, router_topk_backward)           \
  OPTIMUS_KERNELS_PER_TYPE(X, f32)          \
  OPTIMUS_KERNELS_PER_TYPE(X, bf16)         \
  OPTIMUS_KERNELS_PER_TYPE(X, f16)
