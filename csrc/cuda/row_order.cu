// Computes the row order from expert choices, without atomics on global memory.
//
// Rows are slots in expert order, stable; each expert's start at a multiple of kRowTile. Blocks count their slots of
// each expert; then each block adds up all counts for itself, which is sooner done than one block could tell the
// others, and places its slots.
#include <algorithm>
#include <cstdio>

#include "hopper.cuh"
#include "launch.h"
#include "row_order.h"

namespace optimus::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32, kRounds = 2;
constexpr int kSlots = kThreads * kRounds;             // that a block places together
constexpr int kPieces = kSlots / 32;                   // of a warp each
constexpr int kPitch = kPieces + 1;                    // so that lanes read different banks of shared memory
constexpr int kMostBlocks = 256, kMostCounts = 65536;  // what a block adds up: blocks times experts
constexpr unsigned kWarp = 0xffffffff;

template <typename Index>
__device__ __forceinline__ int expert_of(const Index* indices, int slot, int end, int num_experts) {
  if (slot >= end) return -1;
  const Index expert = indices[slot];
  if (expert < -1 || expert >= num_experts) {  // stops the device, as torch's own kernels do
    printf("moe_mlp: an expert index is outside [-1, E)\n");
    __trap();
  }
  return static_cast<int>(expert);
}

template <typename Index>
__global__ void __launch_bounds__(kThreads)
    count_slots(const Index* indices, int* block_counts, int num_slots, int slots_of_block, int num_experts, int* zeros,
                int num_zeros) {
  extern __shared__ int counts[];
  hopper::launch_dependents();
  const int first = blockIdx.x * slots_of_block, end = min(num_slots, first + slots_of_block);
  if (blockIdx.x == 0 && threadIdx.x < num_zeros) zeros[threadIdx.x] = 0;
  for (int e = threadIdx.x; e < num_experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  for (int slot = first + threadIdx.x; slot < end; slot += kThreads) {
    const int expert = expert_of(indices, slot, end, num_experts);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kThreads) block_counts[e * gridDim.x + blockIdx.x] = counts[e];
}

__device__ __forceinline__ int scan_warp(int value) {
  const int lane = threadIdx.x % 32;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(kWarp, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

__device__ __forceinline__ int sum_warp(int value) {
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(kWarp, value, d);
  return value;
}

// What a block knows of each expert, in shared memory.
struct Experts {
  int *count, *first_tile, *first_slot, *next;  // first_tile has one entry more; next: the row of the next slot
};

// An expert's slots in all blocks, and in those before this one.
__device__ __forceinline__ void add_up(const int* block_counts, int num_experts, const Experts& to) {
  constexpr int kTogether = 4;
  const int lane = threadIdx.x % 32, blocks = gridDim.x;
  for (int e = threadIdx.x / 32; e < num_experts; e += kWarps) {
    const int* counts = block_counts + static_cast<size_t>(e) * blocks;
    int total = 0, before = 0;
    for (int start = lane; start < blocks; start += 32 * kTogether) {
      int values[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) values[i] = start + 32 * i < blocks ? __ldcg(counts + start + 32 * i) : 0;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        total += values[i];
        before += start + 32 * i < static_cast<int>(blockIdx.x) ? values[i] : 0;
      }
    }
    total = sum_warp(total), before = sum_warp(before);
    if (lane == 0) to.count[e] = total, to.next[e] = before;
  }
}

// The first tile and slot of each expert; by one warp.
__device__ __forceinline__ void lay_out(int num_experts, const Experts& to) {
  const int lane = threadIdx.x % 32;
  int tiles = 0, slots = 0;
  for (int start = 0; start < num_experts; start += 32) {
    const int e = start + lane, count = e < num_experts ? to.count[e] : 0, mine = (count + kRowTile - 1) / kRowTile;
    const int until = scan_warp(mine), slots_until = scan_warp(count);
    if (e < num_experts) {
      to.first_slot[e] = slots + slots_until - count;
      to.first_tile[e] = tiles + until - mine;
      to.next[e] += to.first_tile[e] * kRowTile;
    }
    tiles += __shfl_sync(kWarp, until, 31), slots += __shfl_sync(kWarp, slots_until, 31);
  }
  if (lane == 0) to.first_tile[num_experts] = tiles;
}

// What follows from the counts alone; the experts and the unused rows are dealt out to the blocks.
__device__ __forceinline__ void write_plan(const RowOrderBuffers& to, const Experts& from, int num_experts,
                                           int num_rows) {
  const int used = from.first_tile[num_experts];
  if (blockIdx.x == 0 && threadIdx.x == 0) to.num_tiles[0] = used;
  for (int e = blockIdx.x; e < num_experts; e += gridDim.x) {
    const int count = from.count[e], first = from.first_tile[e], end = from.first_tile[e + 1];
    int rank = 0;
    for (int start = 0; start < num_experts; start += kThreads) {
      const int other = start + threadIdx.x;
      const int its = other < num_experts ? from.count[other] : -1;
      rank += __syncthreads_count(its > count || (its == count && other < e));
    }
    if (threadIdx.x == 0) to.by_size[rank] = e, to.count[e] = count, to.first_row[e] = first * kRowTile;
    for (int tile = first + threadIdx.x; tile < end; tile += kThreads) {
      to.tile_expert[tile] = e;
      to.tile_shift[tile] = first * kRowTile - from.first_slot[e];
    }
    for (int row = first * kRowTile + count + threadIdx.x; row < end * kRowTile; row += kThreads) to.slot[row] = -1;
  }
  const int thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads;
  for (int tile = used + thread; tile < num_rows / kRowTile; tile += threads) to.tile_expert[tile] = -1;
  for (int row = used * kRowTile + thread; row < num_rows; row += threads) to.slot[row] = -1;
}

template <typename Index>
__global__ void __launch_bounds__(kThreads) place(const Index* indices, const int* block_counts, RowOrderBuffers to,
                                                  int num_slots, int slots_of_block, int num_experts, int num_rows) {
  extern __shared__ int shared[];
  const Experts experts{shared, shared + num_experts, shared + 2 * num_experts + 1, shared + 3 * num_experts + 1};
  int* piece_counts = shared + 4 * num_experts + 1;  // [E, kPitch]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = blockIdx.x * slots_of_block, end = min(num_slots, begin + slots_of_block);
  hopper::wait_for_previous_launch();
  add_up(block_counts, num_experts, experts);
  __syncthreads();
  if (warp == 0) lay_out(num_experts, experts);
  __syncthreads();
  write_plan(to, experts, num_experts, num_rows);
  for (int start = begin; start < end; start += kSlots) {
    int expert[kRounds], before[kRounds];
    for (int i = threadIdx.x; i < num_experts * kPitch; i += kThreads) piece_counts[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      expert[i] = expert_of(indices, start + i * kThreads + threadIdx.x, end, num_experts);
      const unsigned same = __match_any_sync(kWarp, expert[i]);
      before[i] = __popc(same & ((1u << lane) - 1));
      if (expert[i] >= 0 && before[i] == 0) piece_counts[expert[i] * kPitch + i * kWarps + warp] = __popc(same);
    }
    __syncthreads();
    for (int e = warp; e < num_experts; e += kWarps) {  // counts of pieces to the row of each piece's first slot
      const int mine = piece_counts[e * kPitch + lane], until = scan_warp(mine), next = experts.next[e];
      piece_counts[e * kPitch + lane] = next + until - mine;
      if (lane == 31) experts.next[e] = next + until;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int slot = start + i * kThreads + threadIdx.x;
      if (expert[i] >= 0) {
        const int row = piece_counts[expert[i] * kPitch + i * kWarps + warp] + before[i];
        to.slot[row] = slot;
        to.row[slot] = row;
      } else if (slot < end) {
        to.row[slot] = -1;
      }
    }
    __syncthreads();
  }
}

int shared_bytes(int num_experts) { return (num_experts * (4 + kPitch) + 1) * 4; }  // of place

// As many slots a block as keep the counts that each block adds up few.
int slots_of_block(int num_slots, int num_experts) {
  const int most = std::clamp(kMostCounts / num_experts, 1, kMostBlocks);
  const int pieces = (num_slots + kSlots - 1) / kSlots;
  return (pieces + most - 1) / most * kSlots;
}

template <typename Index>
cudaError_t order(const Index* indices, int* block_counts, const RowOrderBuffers& to, int num_slots, int num_experts,
                  int num_rows, int* zeros, int num_zeros, cudaStream_t stream) {
  static_assert(kPieces == 32);  // a lane each
  const int blocks = order_blocks(num_slots, num_experts), each = slots_of_block(num_slots, num_experts);
  static SharedMemoryLimit limit;
  if (auto error = limit(place<Index>, shared_bytes(kMaxExperts)); error != cudaSuccess) return error;
  count_slots<<<blocks, kThreads, num_experts * 4, stream>>>(indices, block_counts, num_slots, each, num_experts, zeros,
                                                             num_zeros);
  if (auto error = cudaGetLastError(); error != cudaSuccess) return error;
  const int* counts = block_counts;
  return launch({blocks, kThreads, shared_bytes(num_experts), true, stream}, place<Index>, indices, counts, to,
                num_slots, each, num_experts, num_rows);
}

}  // namespace

int order_blocks(int num_slots, int num_experts) {
  const int each = slots_of_block(num_slots, num_experts);
  return (num_slots + each - 1) / each;
}
cudaError_t order_rows(const void* indices, bool wide_indices, int* block_counts, const RowOrderBuffers& to,
                       int num_slots, int num_experts, int num_rows, int* zeros, int num_zeros, cudaStream_t stream) {
  const auto run = [&](const auto* choices) {
    return order(choices, block_counts, to, num_slots, num_experts, num_rows, zeros, num_zeros, stream);
  };
  return wide_indices ? run(static_cast<const int64_t*>(indices)) : run(static_cast<const int32_t*>(indices));
}

}  // namespace optimus::cuda
