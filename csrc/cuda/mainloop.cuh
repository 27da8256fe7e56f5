// Grouped GEMM: one persistent, warp-specialized kernel for all products of an expert layer. Tile 128 x 256 x 64.
//
// A block has three warpgroups. In the first, one warp is the producer (TMA loads into a ring of stages, producer.cuh)
// and three warps run background tasks (background.cuh): memory-bound work beside the tensor cores. The other two are
// consumers: wgmma on 64 rows each. Two blocks form a cluster; where both work on the same columns of an expert's
// weight, each loads half of it and multicasts. Clusters take tiles from a dynamic scheduler (tile_scheduler.cuh). The
// epilogue stores through shared memory while the next tile's loads are in flight (epilogue.cuh).
//
// Loop variables are warp-uniform and the compiler can see it (uniform, elect): descriptors then take one or two
// instructions and TMA calls need no loop over threads. This is worth about 1% of the layer.
#pragma once

#include "background.cuh"
#include "epilogue.cuh"
#include "hopper.cuh"
#include "producer.cuh"
#include "tiles.cuh"

namespace optimus::cuda {

// Stores this warp's 16 rows of a tile; `first` is the first of them.
template <typename T, GemmKind kKind>
__device__ __forceinline__ void store_tile(const Params& args, Results<T>& results, const TileInfo& tile, int first,
                                           const float (&d)[128]) {
  const int row = tile.row + first;
#pragma unroll
  for (int box = 0; box < (kKind == GemmKind::kUpSwiglu ? 2 : 4); ++box) {
    const float* mine = d + 32 * box;
    const int column = tile.column + 64 * box;
    if constexpr (kKind == GemmKind::kUpSwiglu) {
      const int inner = tile.column / 2 + 64 * box, unpadded_row = tile.unpadded_row + first;
      const int rows = tile.rows - first;
      const float* up = mine + 64;
      const auto gate_of = [&](int i) { return mine[i]; };
      const auto up_of = [&](int i) { return up[i]; };
      if (rows >= kWarpRows) {
        results.put(&args.out, inner, 0, unpadded_row, 0, gate_of);
        results.put(&args.out, inner, 1, unpadded_row, 0, up_of);
      } else if (rows > 0) {
        T* out = static_cast<T*>(args.hidden) + static_cast<size_t>(unpadded_row) * 2 * args.inner + inner;
        results.put_rows(out, 2 * args.inner, rows, args.inner - inner, gate_of);
        results.put_rows(out + args.inner, 2 * args.inner, rows, args.inner - inner, up_of);
      }
      results.put(&args.activation, inner, 0, row, 0, [&](int i) { return mine[i] * sigmoid(mine[i]) * up[i]; });
    } else if constexpr (Traits<kKind>::kWide) {
      constexpr bool kAdds = kKind == GemmKind::kGradientAdd;
      results.template put_wide<kAdds>(&args.out, column, 0, row, tile.expert, mine);
      results.template put_wide<kAdds>(&args.out, column + 32, 0, row, tile.expert, mine + 16);
    } else {
      results.put(&args.out, column, 0, row, kKind == GemmKind::kGradient ? tile.expert : 0,
                  [&](int i) { return mine[i]; });
    }
  }
}

// d (+)= a x b of one stage. In the last stage of a gradient only the depth that holds slots is multiplied. a and b are
// the start addresses of the operands (matrix_start).
template <typename T, GemmKind kKind>
__device__ __forceinline__ void mma_stage(float (&d)[128], const TileInfo& tile, int step, uint32_t a, uint32_t b) {
  using Is = Traits<kKind>;
  constexpr int kNextA = Is::kAcrossA ? 2048 / 16 : 32 / 16, kNextB = Is::kAcrossB ? 2048 / 16 : 32 / 16;
  const auto multiply = [&](int k) {
    wgmma<T, Is::kAcrossA, Is::kAcrossB>(d, matrix_descriptor(a + k * kNextA), matrix_descriptor(b + k * kNextB),
                                         step > 0 || k > 0);
  };
  if (Is::kGradient && step == tile.steps - 1 && tile.last < kDepth / kStep) {
#pragma unroll 1
    for (int k = 0; k < tile.last; ++k) {
      wgmma_fence();
      multiply(k);
      wgmma_commit();
    }
    return;
  }
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / kStep; ++k) multiply(k);
  wgmma_commit();
}

// Reads a tile's description once and gives it to all threads of the warp.
__device__ __forceinline__ TileInfo read_tile_info(const TileInfo& tile_info, int lane) {
  TileInfo mine{};
  if (lane == 0) mine = tile_info;
  return {uniform(mine.row),          uniform(mine.column), uniform(mine.expert), uniform(mine.steps),
          uniform(mine.unpadded_row), uniform(mine.rows),   uniform(mine.last)};
}

template <typename T, GemmKind kKind>
__device__ __forceinline__ void multiply(const Params& args, SharedStorage& memory) {
  using Is = Traits<kKind>;
  const int warp = uniform(threadIdx.x / 32) - 4, group = warp / 4, lane = threadIdx.x % 32;
  Results<T> results{shared_address(memory.results[warp]), lane};
  const uint32_t a = matrix_start(shared_address(memory.a[0]) + group * kBox);
  const uint32_t b = matrix_start(shared_address(memory.b[0]));
  const uint32_t full = shared_address(memory.full);
  const uint32_t empty = address_in_block(shared_address(memory.empty), cluster_rank() ^ lane % 2);
  const auto release = [&](int stage) {  // frees a stage in both blocks
    if (lane < 2) barrier_arrive_at(empty + stage * 8);
  };
  float d[128];
  PipelineState at;
  while (true) {
    barrier_wait(full + at.stage * 8, at.phase);
    const TileInfo tile = read_tile_info(memory.tile_info[at.stage], lane);
    if (__any_sync(0xffffffff, tile.steps < 0)) break;  // __any_sync: the compiler sees that the warp does not diverge
    const bool idle = !Is::kGradient && tile.rows <= 64 * group;  // the rows of this warpgroup are padding
    const bool works = tile.steps > 0 && !idle;
    int previous = 0;
    for (int step = 0; step < max(tile.steps, 1); ++step, at.advance()) {
      barrier_wait(full + at.stage * 8, at.phase);
      if (works) {
        if (Is::kGathers) fence_async();
        mma_stage<T, kKind>(d, tile, step, a + at.stage * (kBytesA / 16), b + at.stage * (kBytesB / 16));
        wgmma_wait<1>();
      }
      if (step > 0) release(previous);
      previous = at.stage;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
    release(previous);
    if (Is::kGradient && tile.steps == 0) {
#pragma unroll
      for (int i = 0; i < 128; ++i) d[i] = 0.0f;
    }
    if (!idle) store_tile<T, kKind>(args, results, tile, warp * kWarpRows, d);
  }
  if (elect()) tma_store_wait_read<0>();
}

template <typename T, GemmKind kKind>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ Params args) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<SharedStorage*>(bytes);
  if (shared_address(bytes) % 1024 != 0) __trap();  // swizzled boxes start at multiples of it
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared_address(&memory.full[stage]), Traits<kKind>::kGathers ? 1 + 128 : 1);
      barrier_init(shared_address(&memory.empty[stage]), 2 * kConsumerWarps);
    }
    for (uint64_t& there : memory.item_there) {
      barrier_init(shared_address(&there), 1);
      barrier_expect(shared_address(&there), 4);
    }
    fence_barrier_init();
    if (!Traits<kKind>::kGathers) tma_prefetch(&args.a);
    tma_prefetch(&args.b);
    tma_prefetch(&args.out);
  }
  cluster_sync();
  if (uniform(threadIdx.x / 32) < 4) {
    const int warp = threadIdx.x / 32;
    fewer_registers<104>();
    if (warp > 0 || !args.early) wait_for_previous_launch();
    if (threadIdx.x == 32) launch_dependents();  // at most two launches overlap
    if constexpr (Traits<kKind>::kGathers) {
      load_gathered_tiles<kKind>(args, memory);
    } else if (uniform(warp) == 0) {
      load_tiles<kKind>(args, memory);
    }
    for (int i = 0; warp > 0 && i < kMaxBackgroundTasks; ++i) {
      const BackgroundTask& task = args.tasks.list[i];
      if (warp > task.warps) continue;
      run_background_task<T>(task, args.order, blockIdx.x * task.warps + warp - 1, gridDim.x * task.warps,
                             threadIdx.x % 32);
    }
  } else {
    more_registers<200>();
    if (Traits<kKind>::kGathers) wait_for_previous_launch();  // the row order comes from the launch before
    multiply<T, kKind>(args, memory);
  }
  __syncwarp();
  cluster_sync();  // the other block may still write to this one's shared memory
}

}  // namespace optimus::cuda
