// How a product's operands come to shared memory: what the first of a block's warpgroups does.
#pragma once

#include "claims.cuh"
#include "errands.cuh"
#include "hopper.cuh"
#include "tiles.cuh"

namespace optimus::cuda {

template <Kind kKind>
__device__ __forceinline__ void load_stage(const Arguments& args, Layout& memory, int stage, const Work& work, int step,
                                           int rank) {
  using Is = Traits<kKind>;
  const uint32_t full = shared_address(&memory.full[stage]), a = shared_address(memory.a[stage]);
  const bool whole = work.rows > kRows / 2;  // else the second multiplying warpgroup has nothing to do
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
    if (kKind == Kind::kUpSwiglu) c1 = work.column / 2, c2 = box;
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

__device__ __forceinline__ Note note_of(const Work& work, int shift) {
  return {work.row, work.column, work.expert, work.steps, work.row - shift, work.rows, work.last};
}

// Waits for the errands that write rows of experts up to this one; the first `done` are known to be past. Gradients
// take the experts in another order, and wait for all at once.
__device__ __forceinline__ int await_rows(const Arguments& args, int done, int expert) {
  const Errand* list = args.errands.list;
  while (done < kMaxErrands && list[done].awaited && list[done].first_expert <= expert) {
    await(list[done++], args.order);
  }
  return done;
}

// Tells the multiplying warps that there is no further tile. By the one thread that tells of tiles.
__device__ __forceinline__ void end_tiles(Layout& memory, int stage) {
  memory.note[stage].steps = -1;
  barrier_arrive(shared_address(&memory.full[stage]));
}

// One warp's part: it goes ahead of the multiplying warpgroups by up to kStages stages, into the next tile too.
template <Kind kKind>
__device__ __forceinline__ void fill(const Arguments& args, Layout& memory) {
  using Is = Traits<kKind>;
  const int rank = uniform(cluster_rank());
  const Items items = items_of<Is::kGradient>(args);
  Claims claims(args, memory, true, rank);
  Place at;
  int done = 0;
  for (int item; __any_sync(0xffffffff, (item = items.first + claims.receive()) < items.end);) {
    const Work work = uniform_work(work_of<Is::kGradient>(args, item, rank));
    done = await_rows(args, done, Is::kGradient ? args.order.num_experts : work.expert);
    const int steps = max(work.steps, 1);
    for (int step = 0; step < steps; ++step, at.advance()) {
      claims.ahead(step, steps);
      barrier_wait(shared_address(&memory.empty[at.stage]), at.phase ^ 1);
      if (!elect()) continue;
      if (step == 0) memory.note[at.stage] = note_of(work, 0);
      if (work.steps > 0) {
        load_stage<kKind>(args, memory, at.stage, work, step, rank);
      } else {
        barrier_arrive(shared_address(&memory.full[at.stage]));
      }
    }
  }
  barrier_wait(shared_address(&memory.empty[at.stage]), at.phase ^ 1);
  if (elect()) end_tiles(memory, at.stage);
}

// The same by the whole warpgroup, where a's rows are tokens: a thread copies 16 bytes of 8 rows a stage, and has the
// places of the next tile's tokens read while this one is loaded.
template <Kind kKind>
__device__ __forceinline__ void fill_gathered(const Arguments& args, Layout& memory) {
  constexpr int kCopies = 8, kApart = kRows / kCopies;
  const int thread = threadIdx.x, piece = thread % 8, first = thread / 8, rank = uniform(cluster_rank());
  const int place = first * 128 + ((piece ^ first % 8) << 4);
  const bool leads = uniform(thread / 32) == 0;
  const Items items = items_of<false>(args);
  const Order& order = args.order;
  int slots[kCopies], next_shift = 0;
  const auto read_slots = [&](const Work& work) {
    next_shift = order.tile_shift[work.row / kRowTile];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      slots[i] = first + i * kApart < work.rows ? order.slot[work.row + first + i * kApart] : -1;
    }
  };
  Claims claims(args, memory, leads, rank);
  Work next{};
  int item;
  const auto look = [&] {
    item = items.first + claims.receive();
    if (item < items.end) read_slots(next = work_of<false>(args, item, rank));
  };
  look();
  Place at;
  while (__any_sync(0xffffffff, item < items.end)) {
    const Work work = uniform_work(next);
    const int shift = next_shift;
    const bool whole = work.rows >= kRows && args.depth % kDepth == 0;
    const uint4* x = static_cast<const uint4*>(args.x);
    unsigned from[kCopies];  // pieces of 16 bytes into x: one instruction makes an address of it
#pragma unroll
    for (int i = 0; i < kCopies; ++i) from[i] = max(slots[i], 0) / order.topk * (args.depth / 8) + piece;
    for (int step = 0; step < work.steps; ++step, at.advance(), x += kDepth / 8) {
      claims.ahead(step, work.steps);
      if (step == max(work.steps - kLook, 0)) look();
      barrier_wait(shared_address(&memory.empty[at.stage]), at.phase ^ 1);
      if (leads && elect()) {
        if (step == 0) memory.note[at.stage] = note_of(work, shift);
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
  if (leads && elect()) end_tiles(memory, at.stage);
  arrive_with_copies(shared_address(&memory.full[at.stage]));
}

}  // namespace optimus::cuda
