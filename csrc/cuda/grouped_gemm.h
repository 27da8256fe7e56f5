// Grouped GEMMs of an expert layer on Hopper. Legend: P rows in expert order, E experts, T tokens, D model width, F
// inner width. All tensors are contiguous, of one 16-bit type, their widths multiples of 8; nothing synchronizes with
// the host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace optimus::cuda {

enum class Type : int { bf16, fp16 };

// How a weight gradient is stored: in the operands' type, in fp32, or added in fp32 to what is there.
enum class StoreMode : int { kWrite, kWriteWide, kAdd };

constexpr int kRowTile = 128;  // an expert's rows start at a multiple of it

// Where each slot's row is; megatron/optimus/ops/triton/row_order.py says what the tensors hold.
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

// Experts [first, end).
struct ExpertRange {
  int first, end;
};

enum class TaskKind : int { kNone, kPermute, kSwigluBackward, kCombine };

constexpr int kIdleWarps = 3;

// One background task (background.cuh): its operands and its experts.
struct BackgroundTask {
  TaskKind kind = TaskKind::kNone;
  int width = 0;
  int first_expert = 0, end_expert = 0;
  int warps = kIdleWarps;  // warps a block gives to it inside a GEMM: fewer take longer and disturb the GEMM less
  const void* from = nullptr;
  void *to = nullptr, *second_output = nullptr;
  const int* row_of_slot = nullptr;
  const float* weights = nullptr;
  float* dweights = nullptr;
  int* progress = nullptr;     // inside a GEMM: two counters that start at zero, chunks handed out and chunks done
  bool is_dependency = false;  // the GEMM in whose list it is waits for it; with warps == 0 another launch does it
};

// The background tasks of a GEMM, in order of execution; dependencies come first, by expert.
constexpr int kMaxBackgroundTasks = 6;
struct BackgroundTasks {
  BackgroundTask list[kMaxBackgroundTasks];
};

// How a GEMM follows the previous launch in the stream. With kLate and kEarly (programmatic dependent launch) its
// blocks start as blocks of that launch leave; memory freed in between must not have been reused.
enum class Start : int {
  kAfter,  // after the previous launch is complete
  kLate,   // starts early, reads nothing before the previous launch is complete
  kEarly,  // the GEMM begins when its dependencies are done; only its own tasks wait for the previous launch
};

cudaError_t run(Type, const BackgroundTask&, const Order&, cudaStream_t);

// tile_counter: the tile scheduler's counter of this GEMM, zero at the start.

// hidden [T K, 2F], rows without padding = x [T, D] of their tokens times gate_up [E, 2F, D]; activation [P, F] =
// silu(gate) * up. Runs no background tasks: their warps gather tokens.
cudaError_t up_swiglu(Type, const void* x, const void* gate_up, void* hidden, void* activation, const Order&, int width,
                      int inner, int* tile_counter, cudaStream_t);

// out [P, N] = a [P, K] times weight[e]: [E, N, K] if transposed, else [E, K, N]; depth is K, width is N. Computes the
// rows of the given experts only, and runs the background tasks on warps that it leaves idle. Queues and returns:
// cudaErrorInvalidValue where an operand has no tensor map (alignment, size), else the launch's error. Shapes are not
// checked here.
cudaError_t grouped_gemm(Type, const void* a, const void* weight, void* out, const Order&, int depth, int width,
                         bool transposed, ExpertRange, const BackgroundTasks&, int* tile_counter, Start, cudaStream_t);

// out[e] (+)= a.T @ b over the rows of e: [E, M, N] from [P, M] and [P, N].
cudaError_t weight_gradient(Type, const void* a, const void* b, void* out, StoreMode, const Order&, int height,
                            int width, const BackgroundTasks&, int* tile_counter, Start, cudaStream_t);

}  // namespace optimus::cuda
