// Launches of the grouped products: tensor maps, shared memory, choice of kernel.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "launch.h"
#include "mainloop.cuh"

namespace optimus::cuda {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(pointer);
  }();
  return function;
}

// A contiguous tensor of four dimensions, the innermost first, read or written in boxes of 128 bytes a row.
struct Map {
  uint64_t sizes[4];
  uint32_t box[4];
};

bool encode(CUtensorMap* map, CUtensorMapDataType dtype, const void* data, const Map& shape) {
  const uint64_t row = shape.sizes[0] * (dtype == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2);
  const uint64_t strides[3] = {row, row * shape.sizes[1], row * shape.sizes[1] * shape.sizes[2]};
  const uint32_t steps[4] = {1, 1, 1, 1};
  return encoder() != nullptr &&
         encoder()(map, dtype, 4, const_cast<void*>(data), shape.sizes, strides, shape.box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode(CUtensorMap* map, Type type, const void* data, const Map& shape) {
  return encode(map, type == Type::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, data,
                shape);
}

uint64_t wide(int size) { return static_cast<uint64_t>(std::max(size, 1)); }

Params arguments(const Order& order, const BackgroundTasks& tasks, int* tile_counter, Start start) {
  Params args{};
  args.order = order;
  args.tasks = tasks, args.tile_counter = tile_counter;
  args.early = start == Start::kEarly;
  return args;
}

int tiles(int size, int tile) { return (size + tile - 1) / tile; }

template <typename T, GemmKind kKind>
cudaError_t launch(const Params& args, Start start, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedStorage);
  static_assert(kBytes <= 232448);
  static SharedMemoryLimit limit;
  if (auto error = limit(grouped_gemm_kernel<T, kKind>, kBytes); error != cudaSuccess) return error;
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  if (auto error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess) {
    return error;
  }
  return launch({processors / 2 * 2, kThreads, kBytes, start != Start::kAfter, stream}, grouped_gemm_kernel<T, kKind>,
                args);
}

template <GemmKind kKind>
cudaError_t launch(Type type, const Params& args, bool encoded, Start start, cudaStream_t stream) {
  if (!encoded) return cudaErrorInvalidValue;
  return type == Type::bf16 ? launch<__nv_bfloat16, kKind>(args, start, stream)
                            : launch<__half, kKind>(args, start, stream);
}

// [P, width].
bool encode_rows(CUtensorMap* map, Type type, const void* rows, const Order& order, int width) {
  return encode(map, type, rows, {{wide(width), wide(order.num_rows), 1, 1}, {64, 64, 1, 1}});
}

// [E, N, K], depth contiguous.
bool encode_weight(CUtensorMap* map, Type type, const void* weight, const Order& order, int halves, int width,
                   int depth) {
  return encode(map, type, weight,
                {{wide(depth), wide(width), wide(halves), wide(order.num_experts)}, {64, 128, 1, 1}});
}

// [E, K, N], columns contiguous.
bool encode_across(CUtensorMap* map, Type type, const void* weight, int experts, int depth, int width) {
  return encode(map, type, weight, {{wide(width), wide(depth), 1, wide(experts)}, {64, 64, 1, 1}});
}

constexpr int kTaskThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kTaskThreads) background_task_kernel(const BackgroundTask task, const Order order) {
  const int warp = threadIdx.x / 32, warps = kTaskThreads / 32;
  run_background_task<T>(task, order, blockIdx.x * warps + warp, gridDim.x * warps, threadIdx.x % 32);
}

}  // namespace

cudaError_t run(Type type, const BackgroundTask& task, const Order& order, cudaStream_t stream) {
  const int items = task.kind == TaskKind::kSwigluBackward ? order.num_rows : order.num_tokens;
  const int blocks = std::max(1, tiles(items, 2 * kTaskThreads / 32));  // two items or fewer for a warp
  const auto kernel = type == Type::bf16 ? background_task_kernel<__nv_bfloat16> : background_task_kernel<__half>;
  kernel<<<blocks, kTaskThreads, 0, stream>>>(task, order);
  return cudaGetLastError();
}

cudaError_t up_swiglu(Type type, const void* x, const void* gate_up, void* hidden, void* activation, const Order& order,
                      int width, int inner, int* tile_counter, cudaStream_t stream) {
  Params args = arguments(order, {}, tile_counter, Start::kLate);
  args.x = x, args.hidden = hidden, args.inner = inner;
  args.depth = width, args.column_tiles = tiles(inner, 128), args.end_expert = order.num_experts;
  const bool encoded =
      encode_weight(&args.b, type, gate_up, order, 2, inner, width) &&
      encode(&args.out, type, hidden,
             {{wide(inner), 2, wide(order.num_tokens * order.topk), 1}, {64, 1, kWarpRows, 1}}) &&
      encode(&args.activation, type, activation, {{wide(inner), 1, wide(order.num_rows), 1}, {64, 1, kWarpRows, 1}});
  return launch<GemmKind::kUpSwiglu>(type, args, encoded, Start::kLate, stream);
}

cudaError_t grouped_gemm(Type type, const void* a, const void* weight, void* out, const Order& order, int depth,
                         int width, bool transposed, ExpertRange part, const BackgroundTasks& tasks, int* tile_counter,
                         Start start, cudaStream_t stream) {
  Params args = arguments(order, tasks, tile_counter, start);
  args.depth = depth, args.column_tiles = tiles(width, kColumns);
  args.first_expert = part.first, args.end_expert = part.end;
  const bool encoded = encode_rows(&args.a, type, a, order, depth) &&
                       encode(&args.out, type, out, {{wide(width), 1, wide(order.num_rows), 1}, {64, 1, kWarpRows, 1}});
  if (transposed) {
    return launch<GemmKind::kRowsTransposed>(
        type, args, encoded && encode_weight(&args.b, type, weight, order, 1, width, depth), start, stream);
  }
  return launch<GemmKind::kRows>(
      type, args, encoded && encode_across(&args.b, type, weight, order.num_experts, depth, width), start, stream);
}

cudaError_t weight_gradient(Type type, const void* a, const void* b, void* out, StoreMode store_mode,
                            const Order& order, int height, int width, const BackgroundTasks& tasks, int* tile_counter,
                            Start start, cudaStream_t stream) {
  Params args = arguments(order, tasks, tile_counter, start);
  args.row_tiles = tiles(height, kRows), args.column_tiles = tiles(width, kColumns);
  const bool encoded = encode_rows(&args.a, type, a, order, height) && encode_rows(&args.b, type, b, order, width);
  const uint64_t columns = wide(width), rows = wide(height), experts = wide(order.num_experts);
  if (store_mode != StoreMode::kWrite) {
    const Map map{{columns, 1, rows, experts}, {32, 1, kWarpRows, 1}};
    const bool known = encoded && encode(&args.out, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, out, map);
    return store_mode == StoreMode::kAdd ? launch<GemmKind::kGradientAdd>(type, args, known, start, stream)
                                         : launch<GemmKind::kGradientWide>(type, args, known, start, stream);
  }
  const Map map{{columns, 1, rows, experts}, {64, 1, kWarpRows, 1}};
  return launch<GemmKind::kGradient>(type, args, encoded && encode(&args.out, type, out, map), start, stream);
}

}  // namespace optimus::cuda
