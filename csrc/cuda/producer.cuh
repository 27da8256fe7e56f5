// The producer: loads the operands of a GEMM into shared memory.
#pragma once

#include "background.cuh"
#include "hopper.cuh"
#include "tile_scheduler.cuh"
#include "tiles.cuh"

namespace optimus::cuda {

template <GemmKind kKind>
__device__ __forceinline__ void load_stage(const Params& args, SharedStorage& memory, int stage, const WorkTile& work,
                                           int step, int rank) {
  using Is = Traits<kKind>;
  const uint32_t full = shared_address(&memory.full[stage]), a = shared_address(memory.a[stage]);
  const bool whole = work.rows > kRows / 2;  // else the second consumer warpgroup has only padding
  barrier_expect(full, (Is::kGathers ? 0 : whole ? kBytesA : kBytesA / 2) + kBytesB);
  const int depth = step * kDepth;
  if (Is::kGradient) {
    tma_load(a, &args.a, full, work.row, work.first + depth, 0, 0);
    tma_load(a + kBox, &args.a, full, work.row + 64, work.first + depth, 0, 0);
  } else if (!Is::kGathers) {
    tma_load(a, &args.a, full, depth, work.row, 0, 0);
    if (whole) tma_load(a + kBox, &args.a, full, depth, work.row + 64, 0, 0);
  }
  constexpr int kBoxes = Is::kAcrossB ? 4 : 2;
  const auto load_b = [&](int box, auto load) {
    int c0 = depth, c1 = work.column + box * 128, c2 = 0, c3 = work.expert;
    if (kKind == GemmKind::kUpSwiglu) c1 = work.column / 2, c2 = box;
    if (Is::kAcrossB) c0 = work.column + box * 64, c1 = depth;
    if (Is::kGradient) c1 = work.first + depth, c3 = 0;
    load(shared_address(memory.b[stage]) + box * (kBytesB / kBoxes), &args.b, full, c0, c1, c2, c3);
  };
  if (work.shared) {
#pragma unroll
    for (int box = 0; box < kBoxes / 2; ++box) load_b(rank * (kBoxes / 2) + box, tma_load_shared);
  } else {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) load_b(box, tma_load);
  }
}

__device__ __forceinline__ TileInfo tile_info(const WorkTile& work, int shift) {
  return {work.row, work.column, work.expert, work.steps, work.row - shift, work.rows, work.last};
}

// Waits for the dependencies that write rows of experts up to `expert`; returns how many are done. Weight gradients
// visit experts in another order, so they wait for all dependencies at once.
__device__ __forceinline__ int wait_for_rows(const Params& args, int done, int expert) {
  const BackgroundTask* list = args.tasks.list;
  while (done < kMaxBackgroundTasks && list[done].is_dependency && list[done].first_expert <= expert) {
    wait_for_task(list[done++], args.order);
  }
  return done;
}

// Signals the consumers that no tile follows. Called by one thread.
__device__ __forceinline__ void signal_end(SharedStorage& memory, int stage) {
  memory.tile_info[stage].steps = -1;
  barrier_arrive(shared_address(&memory.full[stage]));
}

// The producer warp. It runs up to kStages stages ahead of the consumers, across tiles.
template <GemmKind kKind>
__device__ __forceinline__ void load_tiles(const Params& args, SharedStorage& memory) {
  using Is = Traits<kKind>;
  const int rank = uniform(cluster_rank());
  const ItemRange items = item_range<Is::kGradient>(args);
  TileScheduler scheduler(args, memory, true, rank);
  PipelineState at;
  int done = 0;
  for (int item; __any_sync(0xffffffff, (item = items.first + scheduler.next_item()) < items.end);) {
    const WorkTile work = uniform_tile(work_tile<Is::kGradient>(args, item, rank));
    done = wait_for_rows(args, done, Is::kGradient ? args.order.num_experts : work.expert);
    const int steps = max(work.steps, 1);
    for (int step = 0; step < steps; ++step, at.advance()) {
      scheduler.prefetch(step, steps);
      barrier_wait(shared_address(&memory.empty[at.stage]), at.phase ^ 1);
      if (!elect()) continue;
      if (step == 0) memory.tile_info[at.stage] = tile_info(work, 0);
      if (work.steps > 0) {
        load_stage<kKind>(args, memory, at.stage, work, step, rank);
      } else {
        barrier_arrive(shared_address(&memory.full[at.stage]));
      }
    }
  }
  barrier_wait(shared_address(&memory.empty[at.stage]), at.phase ^ 1);
  if (elect()) signal_end(memory, at.stage);
}

// The producer of the up projection, by the whole warpgroup: rows of a are gathered from tokens. A thread copies 16
// bytes of 8 rows a stage and reads the token indices of the next tile while this one is loaded.
template <GemmKind kKind>
__device__ __forceinline__ void load_gathered_tiles(const Params& args, SharedStorage& memory) {
  constexpr int kCopies = 8, kApart = kRows / kCopies;
  const int thread = threadIdx.x, piece = thread % 8, first = thread / 8, rank = uniform(cluster_rank());
  const int place = first * 128 + ((piece ^ first % 8) << 4);
  const bool leads = uniform(thread / 32) == 0;
  const ItemRange items = item_range<false>(args);
  const Order& order = args.order;
  int slots[kCopies], next_shift = 0;
  const auto read_slots = [&](const WorkTile& work) {
    next_shift = order.tile_shift[work.row / kRowTile];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      slots[i] = first + i * kApart < work.rows ? order.slot[work.row + first + i * kApart] : -1;
    }
  };
  TileScheduler scheduler(args, memory, leads, rank);
  WorkTile next{};
  int item;
  const auto look = [&] {
    item = items.first + scheduler.next_item();
    if (item < items.end) read_slots(next = work_tile<false>(args, item, rank));
  };
  look();
  PipelineState at;
  while (__any_sync(0xffffffff, item < items.end)) {
    const WorkTile work = uniform_tile(next);
    const int shift = next_shift;
    const bool whole = work.rows >= kRows && args.depth % kDepth == 0;
    const uint4* x = static_cast<const uint4*>(args.x);
    unsigned from[kCopies];  // offset into x in units of 16 bytes: one instruction makes it an address
#pragma unroll
    for (int i = 0; i < kCopies; ++i) from[i] = max(slots[i], 0) / order.topk * (args.depth / 8) + piece;
    for (int step = 0; step < work.steps; ++step, at.advance(), x += kDepth / 8) {
      scheduler.prefetch(step, work.steps);
      if (step == max(work.steps - kReadAhead, 0)) look();
      barrier_wait(shared_address(&memory.empty[at.stage]), at.phase ^ 1);
      if (leads && elect()) {
        if (step == 0) memory.tile_info[at.stage] = tile_info(work, shift);
        load_stage<kKind>(args, memory, at.stage, work, step, rank);
      }
      const uint32_t to = shared_address(memory.a[at.stage]) + place;
      if (whole) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) copy_16(to + i * kApart * 128, x + from[i]);
      } else {
        const bool inside = step * kDepth + piece * 8 < args.depth;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if (i >= kCopies / 2 && work.rows <= kRows / 2) break;
          copy_16(to + i * kApart * 128, inside ? x + from[i] : static_cast<const uint4*>(args.x),
                  inside && first + i * kApart < work.rows);
        }
      }
      arrive_with_copies(shared_address(&memory.full[at.stage]));
    }
  }
  barrier_wait(shared_address(&memory.empty[at.stage]), at.phase ^ 1);
  if (leads && elect()) signal_end(memory, at.stage);
  arrive_with_copies(shared_address(&memory.full[at.stage]));
}

}  // namespace optimus::cuda
