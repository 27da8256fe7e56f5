// One persistent kernel for the grouped products of an expert layer: tiles of 128 x 256, depth 64 a stage.
//
// A block is three warpgroups. In the first, a warp loads stages of a ring by the tensor memory engine, and three
// warps run errands (errands.cuh): row copies and sums bound by memory that another step needs, or this one further on,
// beside the tensor cores. The other two multiply, 64 rows each. Two blocks are a cluster: where both work on the same
// columns of an expert's weight, each loads half of it for both. Results leave through shared memory while the next
// tile's loads are under way.
//
// What steers the loops of loading and multiplying is one value for a warp, and the compiler knows (uniform, elect):
// then a descriptor takes an instruction or two where it took a dozen, beside each of the tensor cores', and a copy by
// the tensor memory engine no loop over threads. That is 1% of the layer, most of it energy.
#pragma once

#include "errands.cuh"
#include "hopper.cuh"
#include "products.h"
#include "results.cuh"

namespace optimus::cuda {

enum class Kind {
  kUpSwiglu,        // tokens of rows times [N, K], gate beside up
  kRowsTransposed,  // rows times [N, K]
  kRows,            // rows times [K, N]
  kGradient,        // rows, transposed, times rows; the depth runs over an expert's rows
  kGradientWide,    // likewise, written in fp32
  kGradientAdd,     // likewise, added to what is there in fp32
};

constexpr int kRows = kRowTile, kColumns = 256, kDepth = 64, kStages = 4;
constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;
constexpr int kBox = 64 * 64 * 2;  // a box of an operand: 64 rows of 128 bytes, swizzled
constexpr int kStep = 16;          // the depth of one instruction
constexpr int kThreads = 384, kConsumerWarps = 8;

struct Arguments {
  CUtensorMap a, b, out, activation;
  Order order;
  int first_expert, end_expert;  // of a product by rows
  int depth;                     // likewise
  int row_tiles;                 // of a gradient: 128 columns of a each
  int column_tiles;
  const void* x;  // of the up projection: tokens [T, depth]
  void* hidden;   // likewise, and its width
  int inner;
  Errands errands;
  bool early;  // Start::kEarly
};

struct Work {
  int row, column;  // of the tile's first element, in the result
  int expert;
  int steps;  // of depth
  int last;   // of a gradient: the last step's depth that holds slots, in units of kStep
  int first;  // row of the expert's first slot
  int rows;   // of a product by rows: how many rows from the tile's first on are slots, at least 1
  bool shared;
};

struct alignas(16) Note {  // what the consumers need to know of a tile
  int row, column, expert, steps;
  int unpadded_row;  // of the up projection: the tile's place among rows without padding
  int rows, last;    // as in Work
};

template <Kind kKind>
struct Traits {
  static constexpr bool kWide = kKind == Kind::kGradientWide || kKind == Kind::kGradientAdd;  // results in fp32
  static constexpr bool kGradient = kKind == Kind::kGradient || kWide;
  static constexpr bool kGathers = kKind == Kind::kUpSwiglu;  // a's rows are read by the whole warpgroup
  static constexpr bool kAcrossA = kGradient;
  static constexpr bool kAcrossB = kGradient || kKind == Kind::kRows;
};

struct Layout {
  alignas(1024) uint8_t a[kStages][kBytesA];
  uint8_t b[kStages][kBytesB];
  uint8_t results[kConsumerWarps][kBuffers][kResultBox];
  uint64_t full[kStages], empty[kStages];
  Note note[kStages];
};

// A place in the ring of stages; the phase changes with each round.
struct Place {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Items of work for a cluster: two tiles each.
struct Items {
  int first, end;
};

template <bool kGradient>
__device__ __forceinline__ Items items_of(const Arguments& args) {
  if (kGradient) return {0, args.order.num_experts * ((args.row_tiles + 1) / 2) * args.column_tiles};
  const int half = (args.column_tiles + 1) / 2;
  return {uniform(first_row_of(args.order, args.first_expert)) / kRowTile * half,
          uniform(first_row_of(args.order, args.end_expert)) / kRowTile * half};
}

// Two tiles of rows of one expert and one tile of columns. An expert's odd last tile of rows takes two of columns, and
// so do its last two where the last one holds at most 64 slots: it is done sooner than its partner would be.
template <bool kGradient>
__device__ __forceinline__ Work work_of(const Arguments& args, int item, int rank) {
  Work work;
  const Order& order = args.order;
  if (kGradient) {
    const int per_expert = (args.row_tiles + 1) / 2 * args.column_tiles, place = item % per_expert;
    work.expert = order.by_size[item / per_expert];
    const int count = order.count[work.expert];
    work.row = (place / args.column_tiles * 2 + rank) * kRows;
    work.column = place % args.column_tiles * kColumns;
    work.steps = (count + kDepth - 1) / kDepth;
    work.first = order.first_row[work.expert];
    work.last = (count - max(work.steps - 1, 0) * kDepth + kStep - 1) / kStep;
    work.rows = kRows;
    work.shared = true;
  } else {
    const int half = (args.column_tiles + 1) / 2;
    work.expert = order.tile_expert[item / half];
    work.first = order.first_row[work.expert];
    const int count = order.count[work.expert], tiles = (count + kRowTile - 1) / kRowTile;
    const bool short_last = (count - 1) % kRowTile < kRowTile / 2;
    const int alone = tiles % 2 ? 1 : short_last ? 2 : 0, paired = (tiles - alone) * half;
    const int place = item - work.first / kRowTile * half;
    work.shared = place < paired;
    const int tile = work.shared ? place / (2 * half) * 2 + rank : tiles - alone + (place - paired) / half;
    work.row = work.first + tile * kRowTile;
    work.rows = count - tile * kRowTile;
    work.column = (work.shared ? place % (2 * half) : 2 * ((place - paired) % half) + rank) * kColumns;
    work.steps = (args.depth + kDepth - 1) / kDepth;
  }
  return work;
}

// The same, known to be one for the warp; waits for what it was read from.
__device__ __forceinline__ Work uniform_work(const Work& work) {
  return {uniform(work.row),  uniform(work.column), uniform(work.expert), uniform(work.steps),
          uniform(work.last), uniform(work.first),  uniform(work.rows),   uniform(work.shared) != 0};
}

// Items are dealt out forth and back: those of a gradient come longest first.
template <bool kGradient>
__device__ __forceinline__ int item_of(const Items& items, int turn) {
  const int clusters = gridDim.x / 2, place = blockIdx.x / 2;
  return items.first + turn * clusters + (kGradient && turn % 2 ? clusters - 1 - place : place);
}

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

// One warp's part: it goes ahead of the multiplying warpgroups by up to kStages stages, into the next tile too.
template <Kind kKind>
__device__ __forceinline__ void fill(const Arguments& args, Layout& memory) {
  using Is = Traits<kKind>;
  const int rank = uniform(cluster_rank());
  const Items items = items_of<Is::kGradient>(args);
  Place at;
  int done = 0;
  for (int turn = 0, item; (item = item_of<Is::kGradient>(items, turn)) < items.end; ++turn) {
    const Work work = uniform_work(work_of<Is::kGradient>(args, item, rank));
    done = await_rows(args, done, Is::kGradient ? args.order.num_experts : work.expert);
    for (int step = 0; step < max(work.steps, 1); ++step, at.advance()) {
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
  Place at;
  int item = item_of<false>(items, 0);
  Work next{};
  if (item < items.end) read_slots(next = work_of<false>(args, item, rank));
  for (int turn = 0; item < items.end; ++turn) {
    const Work work = uniform_work(next);
    const int shift = next_shift;
    const bool whole = work.rows >= kRows && args.depth % kDepth == 0;
    const uint4* x = static_cast<const uint4*>(args.x);
    unsigned from[kCopies];  // pieces of 16 bytes into x: one instruction makes an address of it
#pragma unroll
    for (int i = 0; i < kCopies; ++i) from[i] = max(slots[i], 0) / order.topk * (args.depth / 8) + piece;
    item = item_of<false>(items, turn + 1);
    if (item < items.end) read_slots(next = work_of<false>(args, item, rank));
    for (int step = 0; step < work.steps; ++step, at.advance(), x += kDepth / 8) {
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
}

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

template <typename T, Kind kKind>
__device__ __forceinline__ void multiply(const Arguments& args, Layout& memory) {
  using Is = Traits<kKind>;
  const int warp = uniform(threadIdx.x / 32) - 4, group = warp / 4, lane = threadIdx.x % 32;
  const Items items = items_of<Is::kGradient>(args);
  Results<T> results{shared_address(memory.results[warp]), lane};
  const uint32_t a = matrix_start(shared_address(memory.a[0]) + group * kBox);
  const uint32_t b = matrix_start(shared_address(memory.b[0]));
  const uint32_t full = shared_address(memory.full);
  const uint32_t empty = address_in_block(shared_address(memory.empty), lane % 2);
  const auto release = [&](int stage) {  // in both blocks
    if (lane < 2) barrier_arrive_at(empty + stage * 8);
  };
  float d[128];
  Place at;
  for (int turn = 0; item_of<Is::kGradient>(items, turn) < items.end; ++turn) {
    barrier_wait(full + at.stage * 8, at.phase);
    Note tile = memory.note[at.stage];
    tile.steps = uniform(tile.steps), tile.rows = uniform(tile.rows), tile.last = uniform(tile.last);
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
