// Work bound by memory, on rows: done by a kernel of its own, or beside a product that does not depend on it by warps
// that the product leaves idle, or beside the product that needs its rows, ahead of it. A worker is one warp; workers
// share the rows or tokens out among them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "hopper.cuh"
#include "products.h"

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

// Asks for a row of so many 16-byte pieces to be brought to the level-2 cache.
__device__ __forceinline__ void fetch_row(const void* row, int pieces) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "r"(pieces * 16) : "memory");
}

__device__ __forceinline__ float sigmoid(float gate) { return __fdividef(1.0f, 1.0f + __expf(-gate)); }

// The first row of an expert; for the number of experts, the end of the last used tile.
__device__ __forceinline__ int first_row_of(const Order& order, int expert) {
  return expert == order.num_experts ? order.num_tiles[0] * kRowTile : order.first_row[expert];
}

// An errand is done in chunks. Their number follows from the order alone.
constexpr int kRowsOfChunk = 8;  // in SwiGLU's backward

// Tokens whose slots a warp looks at together.
__device__ __forceinline__ int tokens_of_chunk(int topk) { return topk < 32 ? 32 / topk : 1; }

__device__ __forceinline__ int token_chunks(const Order& order) {
  const int tokens = tokens_of_chunk(order.topk);
  return (order.num_tokens + tokens - 1) / tokens;
}

__device__ __forceinline__ int chunks_of(const Errand& errand, const Order& order) {
  const int experts = errand.end_expert - errand.first_expert;
  if (experts == 0) return 0;
  if (errand.task == Task::kSpread) return token_chunks(order) + experts;
  return (first_row_of(order, errand.end_expert) - first_row_of(order, errand.first_expert)) / kRowsOfChunk;
}

// A worker's chunks. They are dealt out in turn; beside a product, to whoever asks, so that nothing is left to a block
// that cannot start before another has ended. The answer to a question takes a while: a worker asks two chunks ahead.
struct Turns {
  int* progress;
  int workers, lane, current, next, asked;

  __device__ Turns(const Errand& errand, int worker, int workers, int lane)
      : progress(errand.progress), workers(workers), lane(lane), current(worker), next(worker + workers), asked(0) {
    if (progress == nullptr) return;
    const int first = take(), second = take();
    current = __shfl_sync(0xffffffff, first, 0), next = __shfl_sync(0xffffffff, second, 0);
  }

  __device__ int take() const { return lane == 0 ? atomicAdd(progress, 1) : 0; }
  __device__ void ask() {
    if (progress != nullptr) asked = take();
  }
  // The current chunk's rows are written, by ordinary stores, which the tensor memory engine is to see.
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
  // Likewise, where no product waits for the chunk.
  __device__ void advance() {
    current = next;
    next = progress == nullptr ? next + workers : __shfl_sync(0xffffffff, asked, 0);
  }
};

// Returns when all of an errand's rows are there, for this thread's loads by the tensor memory engine.
__device__ __forceinline__ void await(const Errand& errand, const Order& order) {
  const int chunks = chunks_of(errand, order);
  while (load_acquire(errand.progress + 1) < chunks) __nanosleep(100);
  fence_async_global();
}

__device__ __forceinline__ void zero_row(uint4* row, int pieces, int lane) {
  for (int piece = lane; piece < pieces; piece += 32) __stcs(row + piece, uint4{});
}

// Rows of one token among the lanes' (from lane `first` on), each a copy of it.
__device__ __forceinline__ void copy_token(const uint4* from, uint4* to, int pieces, int row, unsigned lanes,
                                           int lane) {
  constexpr int kTogether = 8;  // pieces
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

// to [P, width] = each row's token of from [T, width]; zeros in rows of no slot. A token is read once, for all its
// rows.
__device__ __forceinline__ void spread(const Errand& errand, const Order& order, int worker, int workers, int lane) {
  const int pieces = errand.width / 8, topk = order.topk, slots = tokens_of_chunk(topk) * topk;
  const int begin = first_row_of(order, errand.first_expert), end = first_row_of(order, errand.end_expert);
  const int for_tokens = token_chunks(order), chunks = chunks_of(errand, order);
  const uint4* from = static_cast<const uint4*>(errand.from);
  uint4* to = static_cast<uint4*>(errand.to);
  const auto row_of = [&](int chunk, int first) {  // of the lane's slot, -1 if the errand has none to write
    const int slot = chunk * slots + first + lane;
    if (chunk >= for_tokens || first + lane >= slots || slot >= order.num_tokens * topk) return -1;
    const int row = errand.row_of_slot[slot];
    return begin <= row && row < end ? row : -1;
  };
  Turns turns(errand, worker, workers, lane);
  int next = row_of(turns.current, 0);
  for (; turns.current < chunks; turns.finish()) {
    int row = next;
    turns.ask();
    next = row_of(turns.next, 0);
    for (int first = 0; turns.current < for_tokens && first < slots; first += 32) {
      if (first > 0) row = row_of(turns.current, first);
      const int token = turns.current * tokens_of_chunk(topk) + (first + lane) / topk;
      for (unsigned left = __ballot_sync(0xffffffff, row >= 0); left != 0;) {
        const int wanted = __shfl_sync(0xffffffff, token, __ffs(left) - 1);
        const unsigned lanes = left & __ballot_sync(0xffffffff, token == wanted);
        copy_token(from + static_cast<size_t>(wanted) * pieces, to, pieces, row, lanes, lane);
        left &= ~lanes;
      }
    }
    if (turns.current >= for_tokens) {
      const int expert = errand.first_expert + turns.current - for_tokens, last = first_row_of(order, expert + 1);
      for (int r = order.first_row[expert] + order.count[expert]; r < last; ++r) {
        zero_row(to + static_cast<size_t>(r) * pieces, pieces, lane);
      }
    }
  }
}

// One row of SwiGLU's backward; the lane's part of <gradient, activation>.
template <typename T>
__device__ __forceinline__ float swiglu_backward_row(uint4* to, const uint4* from, uint4* to_too, int pieces,
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
      to[piece] = grads[i], to_too[piece] = gates[i], to_too[pieces + piece] = ups[i];
    }
  }
  return product;
}

// SwiGLU's backward. to [P, width]: in, the gradient of the unweighted activation; out, the weighted activation.
// from [T K, 2 width], rows without padding: gate and up; to_too [P, 2 width]: their gradients; dweights [T, K]:
// <gradient, activation>. Rows of no slot become zeros.
template <typename T>
__device__ __forceinline__ void swiglu_backward(const Errand& errand, const Order& order, int worker, int workers,
                                                int lane) {
  const int pieces = errand.width / 8, begin = first_row_of(order, errand.first_expert);
  const int chunks = chunks_of(errand, order);
  uint4 *to = static_cast<uint4*>(errand.to), *to_too = static_cast<uint4*>(errand.to_too);
  const uint4* from = static_cast<const uint4*>(errand.from);
  const auto slot_of = [&](int chunk) {
    return chunk < chunks && lane < kRowsOfChunk ? order.slot[begin + chunk * kRowsOfChunk + lane] : -1;
  };
  const auto shift_of = [&](int chunk) {
    return chunk < chunks ? order.tile_shift[(begin + chunk * kRowsOfChunk) / kRowTile] : 0;
  };
  const auto weight_of = [&](int slot) { return slot < 0 ? 0.0f : errand.weights[slot]; };
  Turns turns(errand, worker, workers, lane);
  int next_slot = slot_of(turns.current), next_shift = shift_of(turns.current);
  float next_weight = weight_of(next_slot);
  for (; turns.current < chunks; turns.finish()) {
    const int slots = next_slot, shift = next_shift;
    const float weights = next_weight;
    turns.ask();
    next_slot = slot_of(turns.next), next_shift = shift_of(turns.next);
    const size_t first = static_cast<size_t>(begin) + turns.current * kRowsOfChunk;
    for (int i = 0; i < kRowsOfChunk; ++i) {
      const size_t row = first + i;
      const int slot = __shfl_sync(0xffffffff, slots, i);
      const float weight = __shfl_sync(0xffffffff, weights, i);
      if (slot < 0) {
        zero_row(to + row * pieces, pieces, lane);
        zero_row(to_too + row * 2 * pieces, 2 * pieces, lane);
      } else {
        float product = swiglu_backward_row<T>(to + row * pieces, from + (row - shift) * 2 * pieces,
                                               to_too + row * 2 * pieces, pieces, weight, lane);
        for (int d = 16; d > 0; d /= 2) product += __shfl_xor_sync(0xffffffff, product, d);
        if (lane == 0) errand.dweights[slot] = product;
      }
      if (i > 0) continue;
      next_weight = weight_of(next_slot);  // behind the first row's loads, which take as long
      if (next_slot >= 0) {                // with few warps at work, the latency of memory decides
        const size_t next = static_cast<size_t>(begin) + turns.next * kRowsOfChunk + lane;
        fetch_row(from + (next - next_shift) * 2 * pieces, 2 * pieces);
        fetch_row(to + next * pieces, pieces);
      }
    }
  }
}

// to [T, width] = each token's sum over its local slots of (weight *) row of from [P, width]: fp32, in slot order. A
// token is a chunk.
template <typename T>
__device__ __forceinline__ void sum(const Errand& errand, const Order& order, int worker, int workers, int lane) {
  constexpr int kTogether = 8;  // rows
  const int pieces = errand.width / 8, topk = order.topk;
  const uint4* from = static_cast<const uint4*>(errand.from);
  Turns turns(errand, worker, workers, lane);
  for (; turns.current < order.num_tokens; turns.advance()) {
    const int token = turns.current;
    turns.ask();
    const int* rows = errand.row_of_slot + static_cast<size_t>(token) * topk;
    const float* weights = errand.weights + static_cast<size_t>(token) * topk;
    for (int piece = lane; piece < pieces; piece += 32) {
      float total[8] = {};
      for (int start = 0; start < topk; start += kTogether) {
        uint4 value[kTogether];
        float weight[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int row = start + i < topk ? rows[start + i] : -1;
          weight[i] = row < 0 ? 0.0f : errand.weights ? weights[start + i] : 1.0f;
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
      static_cast<uint4*>(errand.to)[static_cast<size_t>(token) * pieces + piece] = {
          pack<T>(total[0], total[1]), pack<T>(total[2], total[3]), pack<T>(total[4], total[5]),
          pack<T>(total[6], total[7])};
    }
  }
}

template <typename T>
__device__ __forceinline__ void run_errand(const Errand& errand, const Order& order, int worker, int workers,
                                           int lane) {
  if (errand.task == Task::kSpread) spread(errand, order, worker, workers, lane);
  if (errand.task == Task::kSwigluBackward) swiglu_backward<T>(errand, order, worker, workers, lane);
  if (errand.task == Task::kSum) sum<T>(errand, order, worker, workers, lane);
}

}  // namespace optimus::cuda
