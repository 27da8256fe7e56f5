// The grouped products of an expert layer on Hopper. Legend: P rows in expert order, E experts, T tokens, D model
// width, F inner width. All tensors are contiguous, of one 16-bit type, their widths multiples of 8; nothing waits for
// the host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace optimus::cuda {

enum class Type : int { bf16, fp16 };

// How a weight's gradient gets to its place: written in the operands' type, written in fp32, or added to what is there,
// in fp32.
enum class Put : int { kWrite, kWriteWide, kAdd };

constexpr int kRowTile = 128;  // an expert's rows start at a multiple of it

// Where each slot's row is; megatron/optimus/ops/triton/index.py says what the tensors hold.
struct Order {
  const int* slot;         // [P], -1 for padding
  const int* first_row;    // [E]
  const int* count;        // [E]
  const int* tile_expert;  // [P / kRowTile]
  const int* tile_shift;   // likewise: a row less this is its place among rows without padding
  const int* num_tiles;    // [1]
  const int* by_size;      // [E]
  int num_rows;
  int num_experts;
  int num_tokens;
  int topk;
};

// Experts [first, end) of a step that may be done in parts.
struct Part {
  int first, end;
};

enum class Task : int { kNone, kSpread, kSwigluBackward, kSum };

constexpr int kIdleWarps = 3;

// A piece of work on rows (errands.cuh) and what it reads and writes.
struct Errand {
  Task task = Task::kNone;
  int width = 0;
  int first_expert = 0, end_expert = 0;
  int warps = kIdleWarps;  // of a block beside a product: fewer take longer, and disturb it less
  const void* from = nullptr;
  void *to = nullptr, *to_too = nullptr;
  const int* row_of_slot = nullptr;
  const float* weights = nullptr;
  float* dweights = nullptr;
  int* progress = nullptr;  // two zeros, beside a product: chunks handed out, chunks done
  bool awaited = false;     // by the product in whose list it is; with no warps it is done elsewhere
};

// What a product takes along, in this order; errands that it awaits come first, by expert.
constexpr int kMaxErrands = 6;
struct Errands {
  Errand list[kMaxErrands];
};

// How a product follows the launch before it in the stream. With kLate and kEarly its blocks start where that one's
// leave, not when the last of them has left; nothing in between may have been freed for others to write to.
enum class Start : int {
  kAfter,  // when that is complete
  kLate,   // sooner, but it reads nothing before that is complete
  kEarly,  // the product begins once the errands that it awaits are done; only its own errands wait for that launch
};

cudaError_t run(Type, const Errand&, const Order&, cudaStream_t);

// next_item: a zero for each product, from which its blocks count the items of work that they claim.

// hidden [T K, 2F], rows without padding = x [T, D] of their tokens times gate_up [E, 2F, D]; activation [P, F] =
// silu(gate) * up. Takes no errands along: the warps for them copy tokens.
cudaError_t up_swiglu(Type, const void* x, const void* gate_up, void* hidden, void* activation, const Order&, int width,
                      int inner, int* next_item, cudaStream_t);

// out [P, N] = a [P, K] times weight[e]: [E, N, K] if transposed, else [E, K, N].
cudaError_t rows_times_weight(Type, const void* a, const void* weight, void* out, const Order&, int depth, int width,
                              bool transposed, Part, const Errands&, int* next_item, Start, cudaStream_t);

// out[e] (+)= a.T @ b over the rows of e: [E, M, N] from [P, M] and [P, N].
cudaError_t weight_gradient(Type, const void* a, const void* b, void* out, Put, const Order&, int height, int width,
                            const Errands&, int* next_item, Start, cudaStream_t);

}  // namespace optimus::cuda
