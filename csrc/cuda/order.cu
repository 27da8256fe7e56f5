// From expert choices to row order. No atomics on global memory.
//
// Rows are slots in expert order, stable; each expert's start at a multiple of kRowTile. A block of kSlots slots counts
// its slots per expert, one block turns counts into places, and each block places its slots.
#include <cstdio>

#include "order.h"

namespace optimus::cuda {
namespace {

constexpr int kSlots = 1024, kPlacers = 256, kPlanners = 1024;
constexpr unsigned kWarp = 0xffffffff;

template <typename Index>
__device__ __forceinline__ int expert_of(const Index* indices, int slot, int num_slots, int num_experts) {
  if (slot >= num_slots) return -1;
  const Index expert = indices[slot];
  if (expert < -1 || expert >= num_experts) {  // stops the device, as torch's own kernels do
    printf("moe_mlp: an expert index is outside [-1, E)\n");
    __trap();
  }
  return static_cast<int>(expert);
}

template <typename Index>
__global__ void count_slots(const Index* indices, int* block_counts, int num_slots, int num_experts) {
  extern __shared__ int counts[];
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < kSlots; i += blockDim.x) {
    const int expert = expert_of(indices, blockIdx.x * kSlots + i, num_slots, num_experts);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) block_counts[e * gridDim.x + blockIdx.x] = counts[e];
}

__device__ __forceinline__ int scan_warp(int value) {
  const int lane = threadIdx.x % 32;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(kWarp, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// One block. Counts of blocks become counts of all blocks before; the rest of the order follows from their totals.
__global__ void __launch_bounds__(kPlanners)
    plan(int* block_counts, int num_blocks, Plan to, int num_experts, int num_rows) {
  extern __shared__ int shared[];
  int *count = shared, *first_slot = count + num_experts;
  int* first_tile = first_slot + num_experts;  // it has a last entry for the end
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = kPlanners / 32;
  for (int e = warp; e < num_experts; e += num_warps) {
    int total = 0;
    int* mine = block_counts + static_cast<size_t>(e) * num_blocks;
    for (int start = 0; start < num_blocks; start += 256) {
      int values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int block = start + 32 * i + lane;
        values[i] = block < num_blocks ? mine[block] : 0;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int block = start + 32 * i + lane, until = scan_warp(values[i]);
        if (block < num_blocks) mine[block] = total + until - values[i];
        total += __shfl_sync(kWarp, until, 31);
      }
    }
    if (lane == 0) count[e] = to.count[e] = total;
  }
  __syncthreads();
  if (warp == 0) {
    int tiles = 0, slots = 0;
    for (int start = 0; start < num_experts; start += 32) {
      const int e = start + lane, mine = e < num_experts ? (count[e] + kRowTile - 1) / kRowTile : 0;
      const int until = scan_warp(mine), slots_until = scan_warp(e < num_experts ? count[e] : 0);
      if (e < num_experts) {
        first_slot[e] = slots + slots_until - count[e];
        first_tile[e] = tiles + until - mine;
        to.first_row[e] = first_tile[e] * kRowTile;
      }
      tiles += __shfl_sync(kWarp, until, 31), slots += __shfl_sync(kWarp, slots_until, 31);
    }
    if (lane == 0) first_tile[num_experts] = to.num_tiles[0] = tiles;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kPlanners) {
    int rank = 0;
    for (int other = 0; other < num_experts; ++other) {
      rank += count[other] > count[e] || (count[other] == count[e] && other < e);
    }
    to.by_size[rank] = e;
  }
  for (int e = warp; e < num_experts; e += num_warps) {
    for (int tile = first_tile[e] + lane; tile < first_tile[e + 1]; tile += 32) {
      to.tile_expert[tile] = e;
      to.tile_shift[tile] = first_tile[e] * kRowTile - first_slot[e];
    }
    const int end = first_tile[e + 1] * kRowTile;
    for (int row = first_tile[e] * kRowTile + count[e] + lane; row < end; row += 32) to.slot[row] = -1;
  }
  const int used = first_tile[num_experts];
  for (int tile = used + threadIdx.x; tile < num_rows / kRowTile; tile += kPlanners) to.tile_expert[tile] = -1;
  for (int row = used * kRowTile + threadIdx.x; row < num_rows; row += kPlanners) to.slot[row] = -1;
}

template <typename Index>
__global__ void __launch_bounds__(kPlacers)
    place(const Index* indices, const int* block_counts, Plan to, int num_slots, int num_experts) {
  constexpr int kWarps = kPlacers / 32;
  extern __shared__ int shared[];
  int *next = shared, *warp_counts = shared + num_experts;  // [E] and [warps, E]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int e = threadIdx.x; e < num_experts; e += kPlacers)
    next[e] = to.first_row[e] + block_counts[e * gridDim.x + blockIdx.x];
  for (int start = 0; start < kSlots; start += kPlacers) {
    for (int i = threadIdx.x; i < kWarps * num_experts; i += kPlacers) warp_counts[i] = 0;
    __syncthreads();
    const int slot = blockIdx.x * kSlots + start + threadIdx.x;
    const int expert = expert_of(indices, slot, num_slots, num_experts);
    const unsigned same = __match_any_sync(kWarp, expert);
    const int before = __popc(same & ((1u << lane) - 1));
    if (expert >= 0 && before == 0) warp_counts[warp * num_experts + expert] = __popc(same);
    __syncthreads();
    if (expert >= 0) {
      int row = next[expert] + before;
      for (int w = 0; w < warp; ++w) row += warp_counts[w * num_experts + expert];
      to.slot[row] = slot;
      to.row[slot] = row;
    } else if (slot < num_slots) {
      to.row[slot] = -1;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts; e += kPlacers) {
      for (int w = 0; w < kWarps; ++w) next[e] += warp_counts[w * num_experts + e];
    }
    __syncthreads();
  }
}

template <typename Index>
cudaError_t order(const Index* indices, int* block_counts, const Plan& to, int num_slots, int num_experts, int num_rows,
                  cudaStream_t stream) {
  const int blocks = order_blocks(num_slots), bytes = num_experts * 4;
  count_slots<<<blocks, kPlacers, bytes, stream>>>(indices, block_counts, num_slots, num_experts);
  plan<<<1, kPlanners, 3 * bytes + 4, stream>>>(block_counts, blocks, to, num_experts, num_rows);
  place<<<blocks, kPlacers, bytes * (1 + kPlacers / 32), stream>>>(indices, block_counts, to, num_slots, num_experts);
  return cudaGetLastError();
}

}  // namespace

int order_blocks(int num_slots) { return (num_slots + kSlots - 1) / kSlots; }

cudaError_t order_rows(const void* indices, bool wide_indices, int* block_counts, const Plan& to, int num_slots,
                       int num_experts, int num_rows, cudaStream_t stream) {
  return wide_indices
             ? order(static_cast<const int64_t*>(indices), block_counts, to, num_slots, num_experts, num_rows, stream)
             : order(static_cast<const int32_t*>(indices), block_counts, to, num_slots, num_experts, num_rows, stream);
}

}  // namespace optimus::cuda
