// Work bound by memory, on rows: done by a kernel of its own, or beside a product that does not depend on it by warps
// that the product leaves idle. A worker is one warp; workers share the rows or tokens out among them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "products.h"

namespace optimus::cuda {

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

// to [P, width] = each row's token of from [T, width]; zeros in rows of no slot. A token is read once, for all its
// rows.
__device__ __forceinline__ void spread(const Errand& errand, const Order& order, int worker, int workers, int lane) {
  constexpr int kTogether = 8;  // pieces
  const int pieces = errand.width / 8, topk = order.topk;
  const int begin = first_row_of(order, errand.first_expert), end = first_row_of(order, errand.end_expert);
  uint4* to = static_cast<uint4*>(errand.to);
  for (int expert = errand.first_expert + worker; expert < errand.end_expert; expert += workers) {
    const int next = first_row_of(order, expert + 1);
    for (int row = order.first_row[expert] + order.count[expert]; row < next; ++row) {
      for (int piece = lane; piece < pieces; piece += 32) to[static_cast<size_t>(row) * pieces + piece] = uint4{};
    }
  }
  for (int token = worker; token < order.num_tokens; token += workers) {
    const uint4* from = static_cast<const uint4*>(errand.from) + static_cast<size_t>(token) * pieces;
    for (int first = 0; first < topk; first += 32) {
      int mine = first + lane < topk ? errand.row_of_slot[static_cast<size_t>(token) * topk + first + lane] : -1;
      if (mine < begin || mine >= end) mine = -1;
      if (!__any_sync(0xffffffff, mine >= 0)) continue;
      for (int start = lane; start < pieces + lane; start += 32 * kTogether) {  // as often in every lane
        uint4 value[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) value[i] = __ldg(from + min(start + 32 * i, pieces - 1));
        for (int k = 0; k < min(topk - first, 32); ++k) {
          const int row = __shfl_sync(0xffffffff, mine, k);
          if (row < 0) continue;
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            if (start + 32 * i < pieces) __stcs(to + static_cast<size_t>(row) * pieces + start + 32 * i, value[i]);
          }
        }
      }
    }
  }
}

// SwiGLU's backward. to [P, width]: in, the gradient of the unweighted activation; out, the weighted activation.
// from [P, 2 width]: gate and up; to_too [P, 2 width]: their gradients; dweights [T, K]: <gradient, activation>.
template <typename T>
__device__ __forceinline__ void swiglu_backward(const Errand& errand, const Order& order, int worker, int workers,
                                                int lane) {
  constexpr int kTogether = 4;  // pieces
  const int pieces = errand.width / 8, end = first_row_of(order, errand.end_expert);
  const auto slot_of = [&](int row) { return row < end ? order.slot[row] : -1; };
  const auto weight_of = [&](int slot) { return slot < 0 ? 0.0f : errand.weights[slot]; };
  int row = first_row_of(order, errand.first_expert) + worker, next_slot = slot_of(row);
  float next_weight = weight_of(next_slot);
  for (; row < end; row += workers) {
    const int slot = next_slot;
    const float weight = next_weight;
    next_slot = slot_of(row + workers);
    if (lane == 0 && row + workers < end) {  // with few warps at work, the latency of memory decides
      const size_t next = static_cast<size_t>(row + workers) * pieces;
      fetch_row(static_cast<const uint4*>(errand.from) + 2 * next, 2 * pieces);
      fetch_row(static_cast<const uint4*>(errand.to) + next, pieces);
    }
    uint4* to = static_cast<uint4*>(errand.to) + static_cast<size_t>(row) * pieces;
    const uint4* from = static_cast<const uint4*>(errand.from) + static_cast<size_t>(row) * 2 * pieces;
    uint4* to_too = static_cast<uint4*>(errand.to_too) + static_cast<size_t>(row) * 2 * pieces;
    float product = 0.0f;
    for (int start = lane; start < pieces; start += 32 * kTogether) {
      uint4 grads[kTogether], gates[kTogether], ups[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int piece = min(start + 32 * i, pieces - 1);
        grads[i] = to[piece], gates[i] = __ldcs(from + piece), ups[i] = __ldcs(from + pieces + piece);
      }
      if (start == lane) next_weight = weight_of(next_slot);  // behind the loads, which take as long
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
    for (int d = 16; d > 0; d /= 2) product += __shfl_xor_sync(0xffffffff, product, d);
    if (lane == 0 && slot >= 0) errand.dweights[slot] = product;
  }
}

// to [T, width] = each token's sum over its local slots of (weight *) row of from [P, width]: fp32, in slot order.
template <typename T>
__device__ __forceinline__ void sum(const Errand& errand, const Order& order, int worker, int workers, int lane) {
  constexpr int kTogether = 8;  // rows
  const int pieces = errand.width / 8, topk = order.topk;
  const uint4* from = static_cast<const uint4*>(errand.from);
  for (int token = worker; token < order.num_tokens; token += workers) {
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
