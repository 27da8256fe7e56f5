// A transpose in vector registers that the packing of several instruction sets shares.
#pragma once

#if defined(__x86_64__) && !defined(__clang__)

namespace optimus::cpu {

// 16 x 16 elements of 32 bits: four rounds of interleaving row i with row i + 8. always_inline: compiled for its caller.
template <typename Vector>
inline __attribute__((always_inline)) void transpose_16x16(Vector* block) {
  typedef int Index __attribute__((vector_size(64)));
  const Index low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Index high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  Vector next[16];
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      next[2 * i] = __builtin_shuffle(block[i], block[i + 8], low);
      next[2 * i + 1] = __builtin_shuffle(block[i], block[i + 8], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) block[i] = next[i];
  }
}

}  // namespace optimus::cpu

#endif
