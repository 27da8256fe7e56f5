// The tiles of a product: what a launch is told, which tiles there are, and what a block keeps in shared memory.
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
// Items on their way to a cluster's blocks (claims.cuh). Loading is at most kStages steps ahead of multiplying, in both
// blocks together, so of the items before the last kStages + 1 every reader is done; one more is under way.
constexpr int kQueue = 8;
static_assert(kQueue >= kStages + 2);

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
  int* next_item;
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
  int row, column, expert;
  int steps;         // as in Work; less than 0: no tile follows
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
  uint64_t full[kStages], empty[kStages], item_there[kQueue];
  Note note[kStages];
  int item[kQueue];
};

// A place in the ring of stages; the phase changes with each round.
struct Place {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Items of work for a cluster: two tiles each. Those of a gradient come longest first.
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

}  // namespace optimus::cuda
