// Background tasks: memory-bound work on rows (permute, SwiGLU's backward, combine).
//
// A task runs in a kernel of its own, or inside a GEMM on warps that the GEMM leaves idle. In the second case the GEMM
// may need the task's rows (a dependency, which runs ahead of it) or not. A worker is one warp; workers share out the
// task's rows or tokens.
//
// A new task is a TaskKind (grouped_gemm.h), a function over a WorkQueue, and a line in run_background_task. One that a
// GEMM waits for counts its chunks in num_chunks and ends each with WorkQueue::finish. layer.cpp puts it on a GEMM's
// list; each task there has two counters of its own (kTaskCounters in layer.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "grouped_gemm.h"
#include "hopper.cuh"

namespace optimus::cuda {

using namespace hopper;

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t both) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&both));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&both));
  }
}

// Prefetches a row of `pieces` x 16 bytes into the L2 cache.
__device__ __forceinline__ void fetch_row(const void* row, int pieces) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "r"(pieces * 16) : "memory");
}

__device__ __forceinline__ float sigmoid(float gate) { return __fdividef(1.0f, 1.0f + __expf(-gate)); }

// The first row of an expert. With expert == num_experts: the end of the last used tile.
__device__ __forceinline__ int first_row_of(const Order& order, int expert) {
  return expert == order.num_experts ? order.num_tiles[0] * kRowTile : order.first_row[expert];
}

// A task is done in chunks. Their number follows from the row order alone.
constexpr int kRowsPerChunk = 8;  // in SwiGLU's backward

// Tokens whose slots one warp reads at once, a slot a lane.
__device__ __forceinline__ int tokens_per_chunk(int topk) { return topk < 32 ? 32 / topk : 1; }

__device__ __forceinline__ int token_chunks(const Order& order) {
  const int tokens = tokens_per_chunk(order.topk);
  return (order.num_tokens + tokens - 1) / tokens;
}

__device__ __forceinline__ int num_chunks(const BackgroundTask& task, const Order& order) {
  const int experts = task.end_expert - task.first_expert;
  if (experts == 0) return 0;
  if (task.kind == TaskKind::kPermute) return token_chunks(order) + experts;
  return (first_row_of(order, task.end_expert) - first_row_of(order, task.first_expert)) / kRowsPerChunk;
}

// The chunks of one worker. In a kernel of its own (progress == nullptr) chunks are assigned round robin. Inside a GEMM
// a worker takes the next chunk from a global counter: a static assignment would leave chunks to blocks that cannot
// start before others have ended. The atomic takes long, so a worker asks for its chunk two chunks in advance.
struct WorkQueue {
  int* progress;
  int workers, lane, current, next, asked;

  __device__ WorkQueue(const BackgroundTask& task, int worker, int workers, int lane)
      : progress(task.progress), workers(workers), lane(lane), current(worker), next(worker + workers), asked(0) {
    if (progress == nullptr) return;
    const int first = take(), second = take();
    current = __shfl_sync(0xffffffff, first, 0), next = __shfl_sync(0xffffffff, second, 0);
  }

  __device__ int take() const { return lane == 0 ? atomicAdd(progress, 1) : 0; }
  __device__ void ask() {
    if (progress != nullptr) asked = take();
  }
  // Publishes the rows of the current chunk, written by ordinary stores, to later TMA loads, and counts the chunk as
  // done.
  __device__ void finish() {
    if (progress != nullptr) {
      fence_async_global();
      __syncwarp();
      if (lane == 0) {
        __threadfence();
        atomicAdd(progress + 1, 1);
      }
    }
    advance();
  }
  // Goes to the next chunk where no GEMM waits for this one.
  __device__ void advance() {
    current = next;
    next = progress == nullptr ? next + workers : __shfl_sync(0xffffffff, asked, 0);
  }
};

// Waits until all rows of a task are written and visible to this thread's TMA loads.
__device__ __forceinline__ void wait_for_task(const BackgroundTask& task, const Order& order) {
  const int chunks = num_chunks(task, order);
  while (load_acquire(task.progress + 1) < chunks) __nanosleep(100);
  fence_async_global();
}

__device__ __forceinline__ void zero_row(uint4* row, int pieces, int lane) {
  for (int piece = lane; piece < pieces; piece += 32) __stcs(row + piece, uint4{});
}

// Copies one token to the rows of the given lanes.
__device__ __forceinline__ void copy_token(const uint4* from, uint4* to, int pieces, int row, unsigned lanes,
                                           int lane) {
  constexpr int kTogether = 8;                                              // pieces
  for (int start = lane; start < pieces + lane; start += 32 * kTogether) {  // as often in every lane
    uint4 value[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) value[i] = __ldg(from + min(start + 32 * i, pieces - 1));
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      uint4* mine = to + static_cast<size_t>(__shfl_sync(0xffffffff, row, __ffs(left) - 1)) * pieces;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (start + 32 * i < pieces) __stcs(mine + start + 32 * i, value[i]);
      }
    }
  }
}

// Permute: output [P, width] = the token of each row, from input [T, width]; padding rows become zeros. A token is read
// once for all its rows.
__device__ __forceinline__ void permute(const BackgroundTask& task, const Order& order, int worker, int workers,
                                        int lane) {
  const int pieces = task.width / 8, topk = order.topk, slots = tokens_per_chunk(topk) * topk;
  const int begin = first_row_of(order, task.first_expert), end = first_row_of(order, task.end_expert);
  const int for_tokens = token_chunks(order), chunks = num_chunks(task, order);
  const uint4* from = static_cast<const uint4*>(task.from);
  uint4* to = static_cast<uint4*>(task.to);
  const auto row_of = [&](int chunk, int first) {  // the row of the lane's slot, -1 if this task does not write it
    const int slot = chunk * slots + first + lane;
    if (chunk >= for_tokens || first + lane >= slots || slot >= order.num_tokens * topk) return -1;
    const int row = task.row_of_slot[slot];
    return begin <= row && row < end ? row : -1;
  };
  WorkQueue queue(task, worker, workers, lane);
  int next = row_of(queue.current, 0);
  for (; queue.current < chunks; queue.finish()) {
    int row = next;
    queue.ask();
    next = row_of(queue.next, 0);
    for (int first = 0; queue.current < for_tokens && first < slots; first += 32) {
      if (first > 0) row = row_of(queue.current, first);
      const int token = queue.current * tokens_per_chunk(topk) + (first + lane) / topk;
      for (unsigned left = __ballot_sync(0xffffffff, row >= 0); left != 0;) {
        const int wanted = __shfl_sync(0xffffffff, token, __ffs(left) - 1);
        const unsigned lanes = left & __ballot_sync(0xffffffff, token == wanted);
        copy_token(from + static_cast<size_t>(wanted) * pieces, to, pieces, row, lanes, lane);
        left &= ~lanes;
      }
    }
    if (queue.current >= for_tokens) {
      const int expert = task.first_expert + queue.current - for_tokens, last = first_row_of(order, expert + 1);
      for (int r = order.first_row[expert] + order.count[expert]; r < last; ++r) {
        zero_row(to + static_cast<size_t>(r) * pieces, pieces, lane);
      }
    }
  }
}

// SwiGLU's backward for one row. Returns this lane's part of the dot product <gradient, activation>.
template <typename T>
__device__ __forceinline__ float swiglu_backward_row(uint4* to, const uint4* from, uint4* second_output, int pieces,
                                                     float weight, int lane) {
  constexpr int kTogether = 4;  // pieces
  float product = 0.0f;
  for (int start = lane; start < pieces; start += 32 * kTogether) {
    uint4 grads[kTogether], gates[kTogether], ups[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int piece = min(start + 32 * i, pieces - 1);
      grads[i] = to[piece], gates[i] = __ldcs(from + piece), ups[i] = __ldcs(from + pieces + piece);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int piece = start + 32 * i;
      if (piece >= pieces) break;
      uint32_t *grad = &grads[i].x, *gate = &gates[i].x, *up = &ups[i].x;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 d = unpack<T>(grad[j]), g = unpack<T>(gate[j]), u = unpack<T>(up[j]);
        const float s0 = sigmoid(g.x), s1 = sigmoid(g.y), silu0 = g.x * s0, silu1 = g.y * s1;
        const float a0 = silu0 * u.x, a1 = silu1 * u.y, d0 = d.x * weight, d1 = d.y * weight;
        product += d.x * a0 + d.y * a1;
        grad[j] = pack<T>(weight * a0, weight * a1);
        gate[j] = pack<T>(d0 * u.x * (s0 + silu0 * (1.0f - s0)), d1 * u.y * (s1 + silu1 * (1.0f - s1)));
        up[j] = pack<T>(d0 * silu0, d1 * silu1);
      }
      to[piece] = grads[i], second_output[piece] = gates[i], second_output[pieces + piece] = ups[i];
    }
  }
  return product;
}

// SwiGLU's backward.
// to [P, width]: on entry the gradient of the unweighted activation, on exit the weighted activation.
// from [T K, 2 width]: gate and up, rows without padding.
// second_output [P, 2 width]: gradients of gate and up.
// dweights [T, K]: <gradient, activation>. Padding rows become zeros.
template <typename T>
__device__ __forceinline__ void swiglu_backward(const BackgroundTask& task, const Order& order, int worker, int workers,
                                                int lane) {
  const int pieces = task.width / 8, begin = first_row_of(order, task.first_expert);
  const int chunks = num_chunks(task, order);
  uint4 *to = static_cast<uint4*>(task.to), *second_output = static_cast<uint4*>(task.second_output);
  const uint4* from = static_cast<const uint4*>(task.from);
  const auto slot_of = [&](int chunk) {
    return chunk < chunks && lane < kRowsPerChunk ? order.slot[begin + chunk * kRowsPerChunk + lane] : -1;
  };
  const auto shift_of = [&](int chunk) {
    return chunk < chunks ? order.tile_shift[(begin + chunk * kRowsPerChunk) / kRowTile] : 0;
  };
  const auto weight_of = [&](int slot) { return slot < 0 ? 0.0f : task.weights[slot]; };
  WorkQueue queue(task, worker, workers, lane);
  int next_slot = slot_of(queue.current), next_shift = shift_of(queue.current);
  float next_weight = weight_of(next_slot);
  for (; queue.current < chunks; queue.finish()) {
    const int slots = next_slot, shift = next_shift;
    const float weights = next_weight;
    queue.ask();
    next_slot = slot_of(queue.next), next_shift = shift_of(queue.next);
    const size_t first = static_cast<size_t>(begin) + queue.current * kRowsPerChunk;
    for (int i = 0; i < kRowsPerChunk; ++i) {
      const size_t row = first + i;
      const int slot = __shfl_sync(0xffffffff, slots, i);
      const float weight = __shfl_sync(0xffffffff, weights, i);
      if (slot < 0) {
        zero_row(to + row * pieces, pieces, lane);
        zero_row(second_output + row * 2 * pieces, 2 * pieces, lane);
      } else {
        float product = swiglu_backward_row<T>(to + row * pieces, from + (row - shift) * 2 * pieces,
                                               second_output + row * 2 * pieces, pieces, weight, lane);
        for (int d = 16; d > 0; d /= 2) product += __shfl_xor_sync(0xffffffff, product, d);
        if (lane == 0) task.dweights[slot] = product;
      }
      if (i > 0) continue;
      next_weight = weight_of(next_slot);  // overlaps the loads of the first row
      if (next_slot >= 0) {                // few warps are active, so memory latency dominates
        const size_t next = static_cast<size_t>(begin) + queue.next * kRowsPerChunk + lane;
        fetch_row(from + (next - next_shift) * 2 * pieces, 2 * pieces);
        fetch_row(to + next * pieces, pieces);
      }
    }
  }
}

// Combine: output [T, width] = for each token the sum over its local slots of (weight *) row, from input [P, width].
// Sums are fp32, in slot order. One token is one chunk.
template <typename T>
__device__ __forceinline__ void combine(const BackgroundTask& task, const Order& order, int worker, int workers,
                                        int lane) {
  constexpr int kTogether = 8;  // rows
  const int pieces = task.width / 8, topk = order.topk;
  const uint4* from = static_cast<const uint4*>(task.from);
  WorkQueue queue(task, worker, workers, lane);
  for (; queue.current < order.num_tokens; queue.advance()) {
    const int token = queue.current;
    queue.ask();
    const int* rows = task.row_of_slot + static_cast<size_t>(token) * topk;
    const float* weights = task.weights + static_cast<size_t>(token) * topk;
    for (int piece = lane; piece < pieces; piece += 32) {
      float total[8] = {};
      for (int start = 0; start < topk; start += kTogether) {
        uint4 value[kTogether];
        float weight[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int row = start + i < topk ? rows[start + i] : -1;
          weight[i] = row < 0 ? 0.0f : task.weights ? weights[start + i] : 1.0f;
          value[i] = row < 0 ? uint4{} : __ldcs(from + static_cast<size_t>(row) * pieces + piece);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const uint32_t* words = &value[i].x;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 both = unpack<T>(words[j]);
            total[2 * j] += weight[i] * both.x, total[2 * j + 1] += weight[i] * both.y;
          }
        }
      }
      static_cast<uint4*>(task.to)[static_cast<size_t>(token) * pieces + piece] = {
          pack<T>(total[0], total[1]), pack<T>(total[2], total[3]), pack<T>(total[4], total[5]),
          pack<T>(total[6], total[7])};
    }
  }
}

template <typename T>
__device__ __forceinline__ void run_background_task(const BackgroundTask& task, const Order& order, int worker,
                                                    int workers, int lane) {
  if (task.kind == TaskKind::kPermute) permute(task, order, worker, workers, lane);
  if (task.kind == TaskKind::kSwigluBackward) swiglu_backward<T>(task, order, worker, workers, lane);
  if (task.kind == TaskKind::kCombine) combine<T>(task, order, worker, workers, lane);
}

}  // namespace optimus::cuda
