// Tiles of a grouped GEMM: kernel parameters, the list of work items, and the layout of shared memory.
#pragma once

#include "background.cuh"
#include "epilogue.cuh"
#include "grouped_gemm.h"
#include "hopper.cuh"

namespace optimus::cuda {

enum class GemmKind {
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
// Slots of the queue from the scheduler to a cluster's blocks (tile_scheduler.cuh). The producer is at most kStages
// steps ahead of the consumers in both blocks, so all but the last kStages + 1 items have been read; one more is in
// flight.
constexpr int kQueue = 8;
static_assert(kQueue >= kStages + 2);

struct Params {
  CUtensorMap a, b, out, activation;
  Order order;
  int first_expert, end_expert;  // of a product by rows
  int depth;                     // likewise
  int row_tiles;                 // of a gradient: 128 columns of a each
  int column_tiles;
  const void* x;  // of the up projection: tokens [T, depth]
  void* hidden;   // likewise, and its width
  int inner;
  BackgroundTasks tasks;
  int* tile_counter;
  bool early;  // Start::kEarly
};

struct WorkTile {
  int row, column;  // of the tile's first element, in the result
  int expert;
  int steps;  // of depth
  int last;   // of a gradient: the last step's depth that holds slots, in units of kStep
  int first;  // row of the expert's first slot
  int rows;   // of a product by rows: how many rows from the tile's first on are slots, at least 1
  bool shared;  // both blocks of the cluster use the same tile of b: each loads half and multicasts it
};

struct alignas(16) TileInfo {  // what the producer tells the consumers of a tile
  int row, column, expert;
  int steps;         // as in WorkTile; negative: no tile follows
  int unpadded_row;  // up projection: the tile's first row counted without padding
  int rows, last;    // as in WorkTile
};

template <GemmKind kKind>
struct Traits {
  static constexpr bool kWide = kKind == GemmKind::kGradientWide || kKind == GemmKind::kGradientAdd;  // results in fp32
  static constexpr bool kGradient = kKind == GemmKind::kGradient || kWide;
  static constexpr bool kGathers = kKind == GemmKind::kUpSwiglu;  // rows of a are gathered by the whole warpgroup
  static constexpr bool kAcrossA = kGradient;
  static constexpr bool kAcrossB = kGradient || kKind == GemmKind::kRows;
};

struct SharedStorage {
  alignas(1024) uint8_t a[kStages][kBytesA];
  uint8_t b[kStages][kBytesB];
  uint8_t results[kConsumerWarps][kBuffers][kResultBox];
  uint64_t full[kStages], empty[kStages], item_there[kQueue];
  TileInfo tile_info[kStages];
  int item[kQueue];
};

// Position in the ring of stages; the phase flips with each round.
struct PipelineState {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Work items of a cluster: two tiles each. Items of a weight gradient are sorted longest first.
struct ItemRange {
  int first, end;
};

template <bool kGradient>
__device__ __forceinline__ ItemRange item_range(const Params& args) {
  if (kGradient) return {0, args.order.num_experts * ((args.row_tiles + 1) / 2) * args.column_tiles};
  const int half = (args.column_tiles + 1) / 2;
  return {uniform(first_row_of(args.order, args.first_expert)) / kRowTile * half,
          uniform(first_row_of(args.order, args.end_expert)) / kRowTile * half};
}

// The tile of block `rank` for an item. An item is two row tiles of one expert and one column tile. The odd last row
// tile of an expert takes two column tiles instead, and so do the last two if the last holds at most 64 slots: a short
// tile would finish before its partner.
template <bool kGradient>
__device__ __forceinline__ WorkTile work_tile(const Params& args, int item, int rank) {
  WorkTile work;
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

// Makes a work tile warp-uniform for the compiler.
__device__ __forceinline__ WorkTile uniform_tile(const WorkTile& work) {
  return {uniform(work.row),  uniform(work.column), uniform(work.expert), uniform(work.steps),
          uniform(work.last), uniform(work.first),  uniform(work.rows),   uniform(work.shared) != 0};
}

}  // namespace optimus::cuda
