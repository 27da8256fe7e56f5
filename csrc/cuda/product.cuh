// One persistent kernel for the grouped products of an expert layer: tiles of 128 x 256, depth 64 a stage.
//
// A block is three warpgroups. In the first, a warp loads stages of a ring by the tensor memory engine, and three
// warps run errands (errands.cuh): row copies and sums bound by memory that another step needs, or this one further on,
// beside the tensor cores. The other two multiply, 64 rows each. Two blocks are a cluster: where both work on the same
// columns of an expert's weight, each loads half of it for both. Clusters claim their tiles one by one (claims.cuh).
// Results leave through shared memory while the next tile's loads are under way.
//
// What steers the loops of loading and multiplying is one value for a warp, and the compiler knows (uniform, elect):
// then a descriptor takes an instruction or two where it took a dozen, beside each of the tensor cores', and a copy by
// the tensor memory engine no loop over threads: about 1% of the layer.
#pragma once

#include "errands.cuh"
#include "hopper.cuh"
#include "loading.cuh"
#include "results.cuh"
#include "tiles.cuh"

namespace optimus::cuda {

// The warp's rows of a tile; the first of them is `first`.
template <typename T, Kind kKind>
__device__ __forceinline__ void store_tile(const Arguments& args, Results<T>& results, const Note& tile, int first,
                                           const float (&d)[128]) {
  const int row = tile.row + first;
#pragma unroll
  for (int box = 0; box < (kKind == Kind::kUpSwiglu ? 2 : 4); ++box) {
    const float* mine = d + 32 * box;
    const int column = tile.column + 64 * box;
    if constexpr (kKind == Kind::kUpSwiglu) {
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
      constexpr bool kAdds = kKind == Kind::kGradientAdd;
      results.template put_wide<kAdds>(&args.out, column, 0, row, tile.expert, mine);
      results.template put_wide<kAdds>(&args.out, column + 32, 0, row, tile.expert, mine + 16);
    } else {
      results.put(&args.out, column, 0, row, kKind == Kind::kGradient ? tile.expert : 0,
                  [&](int i) { return mine[i]; });
    }
  }
}

// d (+)= a stage's product, of a gradient's last stage only the depth that holds slots; a and b: where the stage's
// operands start (matrix_start).
template <typename T, Kind kKind>
__device__ __forceinline__ void multiply_stage(float (&d)[128], const Note& tile, int step, uint32_t a, uint32_t b) {
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

// By a warp's first thread, for all of them.
__device__ __forceinline__ Note read_note(const Note& note, int lane) {
  Note mine{};
  if (lane == 0) mine = note;
  return {uniform(mine.row),          uniform(mine.column), uniform(mine.expert), uniform(mine.steps),
          uniform(mine.unpadded_row), uniform(mine.rows),   uniform(mine.last)};
}

template <typename T, Kind kKind>
__device__ __forceinline__ void multiply(const Arguments& args, Layout& memory) {
  using Is = Traits<kKind>;
  const int warp = uniform(threadIdx.x / 32) - 4, group = warp / 4, lane = threadIdx.x % 32;
  Results<T> results{shared_address(memory.results[warp]), lane};
  const uint32_t a = matrix_start(shared_address(memory.a[0]) + group * kBox);
  const uint32_t b = matrix_start(shared_address(memory.b[0]));
  const uint32_t full = shared_address(memory.full);
  const uint32_t empty = address_in_block(shared_address(memory.empty), cluster_rank() ^ lane % 2);
  const auto release = [&](int stage) {  // in both blocks, in this one by the thread that reads notes
    if (lane < 2) barrier_arrive_at(empty + stage * 8);
  };
  float d[128];
  Place at;
  while (true) {
    barrier_wait(full + at.stage * 8, at.phase);
    const Note tile = read_note(memory.note[at.stage], lane);
    if (__any_sync(0xffffffff, tile.steps < 0)) break;  // so the compiler knows that no thread goes on alone
    const bool idle = !Is::kGradient && tile.rows <= 64 * group;  // this warpgroup's rows hold no slot
    const bool works = tile.steps > 0 && !idle;
    int previous = 0;
    for (int step = 0; step < max(tile.steps, 1); ++step, at.advance()) {
      barrier_wait(full + at.stage * 8, at.phase);
      if (works) {
        if (Is::kGathers) fence_async();
        multiply_stage<T, kKind>(d, tile, step, a + at.stage * (kBytesA / 16), b + at.stage * (kBytesB / 16));
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

template <typename T, Kind kKind>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& memory = *reinterpret_cast<Layout*>(bytes);
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
    if (warp > 0 || !args.early) await_launch_before();
    if (threadIdx.x == 32) let_next_launch();  // so that no more than two launches overlap
    if constexpr (Traits<kKind>::kGathers) {
      fill_gathered<kKind>(args, memory);
    } else if (uniform(warp) == 0) {
      fill<kKind>(args, memory);
    }
    for (int i = 0; warp > 0 && i < kMaxErrands; ++i) {
      const Errand& errand = args.errands.list[i];
      if (warp > errand.warps) continue;
      run_errand<T>(errand, args.order, blockIdx.x * errand.warps + warp - 1, gridDim.x * errand.warps,
                    threadIdx.x % 32);
    }
  } else {
    more_registers<200>();
    if (Traits<kKind>::kGathers) await_launch_before();  // which has made the order
    multiply<T, kKind>(args, memory);
  }
  __syncwarp();
  cluster_sync();  // a block must not end while the other may write to its memory
}

}  // namespace optimus::cuda
