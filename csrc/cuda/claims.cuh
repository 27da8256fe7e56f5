// Which items of a product a cluster works on: it claims them one by one, so that none is left to blocks that cannot
// start yet, whatever else holds multiprocessors (NCCL does), and none waits for a slower cluster.
#pragma once

#include "hopper.cuh"
#include "tiles.cuh"

namespace optimus::cuda {

// Steps before a tile's last at which the next item is claimed, sent on, and looked at: each takes a while.
constexpr int kClaim = 14, kSend = 11, kLook = 8;

// For the loading warps of both blocks of a cluster. The first thread of the first block claims, and sends what it got
// to both; so both see the same items in the same order, and the first one past the end as the last.
struct Claims {
  int* next;              // the product's: the first item that nobody has claimed
  uint32_t items, there;  // Layout::item and item_there
  bool deals, arms;       // whether this warp claims and sends; whether it readies its block's slots for the next round
  int claimed = 0, received = 0;

  __device__ Claims(const Arguments& args, Layout& memory, bool leads, int rank)
      : next(args.next_item),
        items(shared_address(memory.item)),
        there(shared_address(memory.item_there)),
        deals(leads && rank == 0),
        arms(leads) {
    claim();
    send();
  }

  // To be called at each step of a tile, so that the next item is there in time.
  __device__ __forceinline__ void ahead(int step, int steps) {
    if (step == max(steps - kClaim, 0)) claim();
    if (step == max(steps - kSend, 0)) send();
  }

  // The cluster's next item, by all threads of a warp. Waits until it is there.
  __device__ __forceinline__ int receive() {
    const uint32_t slot = received % kQueue;
    barrier_wait(there + slot * 8, received / kQueue % 2);
    const int item = uniform(load_shared(items + slot * 4));
    if (arms && elect()) barrier_expect(there + slot * 8, 4);
    ++received;
    return item;
  }

 private:
  __device__ __forceinline__ void claim() {
    if (deals && threadIdx.x == 0) claimed = atomicAdd(next, 1);
  }

  // Between two receives one is sent, the first ahead of all: so its slot is the one that is received next.
  __device__ __forceinline__ void send() const {
    const uint32_t slot = received % kQueue;
    if (deals && threadIdx.x == 0) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        store_async(address_in_block(items + slot * 4, block), claimed, address_in_block(there + slot * 8, block));
      }
    }
  }
};

}  // namespace optimus::cuda
