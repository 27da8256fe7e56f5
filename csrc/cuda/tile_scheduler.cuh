// Dynamic tile scheduler: each cluster takes its next work item from a global counter. A static assignment would leave
// items to blocks that cannot start while something else (NCCL) holds multiprocessors, or to a slower cluster.
#pragma once

#include "hopper.cuh"
#include "tiles.cuh"

namespace optimus::cuda {

// Steps before a tile's last one at which the next item is fetched, broadcast and read: each has latency to hide.
constexpr int kFetchAhead = 14, kBroadcastAhead = 11, kReadAhead = 8;

// Used by the producer warps of both blocks of a cluster. The first thread of the first block fetches an item and
// broadcasts it to both blocks, so both see the same items in the same order; an item past the end stops them.
struct TileScheduler {
  int* next;              // global counter of this GEMM: the first item that no cluster has
  uint32_t items, there;  // SharedStorage::item and item_there
  bool fetches, rearms;  // whether this warp fetches and broadcasts; whether it rearms its block's barriers
  int fetched = 0, received = 0;

  __device__ TileScheduler(const Params& args, SharedStorage& memory, bool leads, int rank)
      : next(args.tile_counter),
        items(shared_address(memory.item)),
        there(shared_address(memory.item_there)),
        fetches(leads && rank == 0),
        rearms(leads) {
    fetch();
    broadcast();
  }

  // Call at each step of a tile: fetches and broadcasts the next item in time.
  __device__ __forceinline__ void prefetch(int step, int steps) {
    if (step == max(steps - kFetchAhead, 0)) fetch();
    if (step == max(steps - kBroadcastAhead, 0)) broadcast();
  }

  // Returns the cluster's next item to all threads of a warp; waits until it has arrived.
  __device__ __forceinline__ int next_item() {
    const uint32_t slot = received % kQueue;
    barrier_wait(there + slot * 8, received / kQueue % 2);
    const int item = uniform(load_shared(items + slot * 4));
    if (rearms && elect()) barrier_expect(there + slot * 8, 4);
    ++received;
    return item;
  }

 private:
  __device__ __forceinline__ void fetch() {
    if (fetches && threadIdx.x == 0) fetched = atomicAdd(next, 1);
  }

  // One item is broadcast between two calls of next_item, the first one before all: its slot is the one read next.
  __device__ __forceinline__ void broadcast() const {
    const uint32_t slot = received % kQueue;
    if (fetches && threadIdx.x == 0) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        store_async(address_in_block(items + slot * 4, block), fetched, address_in_block(there + slot * 8, block));
      }
    }
  }
};

}  // namespace optimus::cuda
