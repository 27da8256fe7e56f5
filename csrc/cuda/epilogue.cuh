// Epilogue: results of a tile go through shared memory to global memory by TMA stores.
#pragma once

#include "background.cuh"
#include "hopper.cuh"

namespace optimus::cuda {

constexpr int kWarpRows = 16;                // rows of a tile that one consumer warp holds
constexpr int kResultBox = kWarpRows * 128;  // a box of results: 16 rows of 128 bytes, swizzled
constexpr int kBuffers = 2;                  // boxes of each consumer warp

// The stores of one consumer warp. Warps do not wait for one another.
template <typename T>
struct Results {
  uint32_t memory;
  int lane, next = 0;

  // Returns a box whose earlier store has been read.
  __device__ uint32_t free_box() {
    const uint32_t box = memory + next * kResultBox;
    next = next + 1 == kBuffers ? 0 : next + 1;
    if (elect()) tma_store_wait_read<kBuffers - 1>();
    __syncwarp();
    return box;
  }

  // 16 x 64 results; value(i): the lane's i-th.
  template <typename Value>
  __device__ void put(const CUtensorMap* map, int c0, int c1, int c2, int c3, Value value) {
    const uint32_t box = free_box();
#pragma unroll
    for (int block = 0; block < 4; ++block) {  // of 16 columns
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack<T>(value(block * 8 + 2 * i), value(block * 8 + 2 * i + 1));
      store_matrices(box + lane % 16 * 128 + (((2 * block + lane / 16) ^ lane % 8) << 4), r[0], r[1], r[2], r[3]);
    }
    fence_async();
    __syncwarp();
    if (elect()) {
      tma_store(map, box, c0, c1, c2, c3);
      tma_store_commit();
    }
  }

  // Stores the first `rows` of 16 x 64 results with ordinary stores: TMA boxes are always whole.
  template <typename Value>
  __device__ void put_rows(T* out, int stride, int rows, int columns, Value value) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // pairs of values, placed as in put_wide
      const int row = i % 2 * 8 + lane / 4, column = i / 2 * 8 + lane % 4 * 2;
      if (row < rows && column < columns) {
        *reinterpret_cast<uint32_t*>(out + static_cast<size_t>(row) * stride + column) =
            pack<T>(value(2 * i), value(2 * i + 1));
      }
    }
  }

  // Writes or adds 16 x 32 fp32 values by TMA. Each element is added to exactly once, so the result does not depend on
  // the order of tiles.
  template <bool kAdds>
  __device__ void put_wide(const CUtensorMap* map, int c0, int c1, int c2, int c3, const float* values) {
    const uint32_t box = free_box();
    const int quarter = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // pairs of values: 8 columns further every second one, between them 8 rows further
      const int line = i % 2 * 8 + lane / 4, piece = i / 2 * 2 + quarter / 2;
      store_pair(box + line * 128 + ((piece ^ line % 8) << 4) + quarter % 2 * 8, values[2 * i], values[2 * i + 1]);
    }
    fence_async();
    __syncwarp();
    if (elect()) {
      kAdds ? tma_add(map, box, c0, c1, c2, c3) : tma_store(map, box, c0, c1, c2, c3);
      tma_store_commit();
    }
  }
};

}  // namespace optimus::cuda
