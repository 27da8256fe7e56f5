// How the results of a product's tile leave: through boxes of shared memory, by the tensor memory engine.
#pragma once

#include "errands.cuh"
#include "hopper.cuh"

namespace optimus::cuda {

constexpr int kBox = 64 * 64 * 2;  // a box of the tensor memory engine: 64 rows of 128 bytes, swizzled
constexpr int kBuffers = 2;        // boxes for the results of each multiplying warpgroup

// Boxes of 64 x 64 results on their way out, of one multiplying warpgroup.
template <typename T>
struct Results {
  uint32_t memory;
  int group, thread, next = 0;

  __device__ void sync() const { named_sync(1 + group, 128); }

  // A box that an earlier store has been read from.
  __device__ uint32_t free_box() {
    const uint32_t box = memory + next * kBox;
    next = next + 1 == kBuffers ? 0 : next + 1;
    if (thread == 0) tma_store_wait_read<kBuffers - 1>();
    sync();
    return box;
  }

  // value(i): the thread's i-th value of the box.
  template <typename Value>
  __device__ void put(const CUtensorMap* map, int c0, int c1, int c2, int c3, Value value) {
    const uint32_t box = free_box();
    const int lane = thread % 32, row = lane % 8, line = thread / 32 * 16 + lane / 8 % 2 * 8 + row;
#pragma unroll
    for (int block = 0; block < 4; ++block) {  // of 16 columns
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack<T>(value(block * 8 + 2 * i), value(block * 8 + 2 * i + 1));
      store_matrices(box + line * 128 + (((2 * block + lane / 16) ^ row) << 4), r[0], r[1], r[2], r[3]);
    }
    fence_async();
    sync();
    if (thread == 0) {
      tma_store(map, box, c0, c1, c2, c3);
      tma_store_commit();
    }
  }

  // Of 64 x 64 results the first `rows`, past the tensor memory engine, whose boxes are whole.
  template <typename Value>
  __device__ void put_rows(T* out, int stride, int rows, int columns, Value value) {
    const int lane = thread % 32;
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // pairs of values, placed as in put_wide
      const int row = thread / 32 * 16 + i % 2 * 8 + lane / 4, column = i / 2 * 8 + lane % 4 * 2;
      if (row < rows && column < columns) {
        *reinterpret_cast<uint32_t*>(out + static_cast<size_t>(row) * stride + column) =
            pack<T>(value(2 * i), value(2 * i + 1));
      }
    }
  }

  // Writes 64 x 32 fp32 values or adds them: the copy engine does, and each element is added to once, in whatever order
  // tiles end.
  template <bool kAdds>
  __device__ void put_wide(const CUtensorMap* map, int c0, int c1, int c2, int c3, const float* values) {
    const uint32_t box = free_box();
    const int lane = thread % 32, quarter = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // pairs of values: 8 columns further every second one, between them 8 rows further
      const int line = thread / 32 * 16 + i % 2 * 8 + lane / 4, piece = i / 2 * 2 + quarter / 2;
      store_pair(box + line * 128 + ((piece ^ line % 8) << 4) + quarter % 2 * 8, values[2 * i], values[2 * i + 1]);
    }
    fence_async();
    sync();
    if (thread == 0) {
      kAdds ? tma_add(map, box, c0, c1, c2, c3) : tma_store(map, box, c0, c1, c2, c3);
      tma_store_commit();
    }
  }
};

}  // namespace optimus::cuda
