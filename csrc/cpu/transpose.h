// Transposes in vector registers, for packing. always_inline: each is compiled for its caller's instruction set.
#pragma once

#if defined(__x86_64__) && !defined(__clang__)

namespace optimus::cpu {

// 16 x 16 elements of 32 bits: four rounds of interleaving row i with row i + 8.
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

// 8 x 8 elements of 32 bits, a register's halves apart until the last round: AVX2's shuffles within halves are the cheap
// ones.
template <typename Vector>
inline __attribute__((always_inline)) void transpose_8x8(Vector* block) {
  typedef int Index __attribute__((vector_size(32)));
  const Index low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
  const Index low_pairs = {0, 1, 8, 9, 4, 5, 12, 13}, high_pairs = {2, 3, 10, 11, 6, 7, 14, 15};
  const Index first_halves = {0, 1, 2, 3, 8, 9, 10, 11}, second_halves = {4, 5, 6, 7, 12, 13, 14, 15};
  Vector pairs[8], fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shuffle(block[i], block[i + 1], low);
    pairs[i + 1] = __builtin_shuffle(block[i], block[i + 1], high);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    fours[i] = __builtin_shuffle(pairs[i], pairs[i + 2], low_pairs);
    fours[i + 1] = __builtin_shuffle(pairs[i], pairs[i + 2], high_pairs);
    fours[i + 2] = __builtin_shuffle(pairs[i + 1], pairs[i + 3], low_pairs);
    fours[i + 3] = __builtin_shuffle(pairs[i + 1], pairs[i + 3], high_pairs);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    block[i] = __builtin_shuffle(fours[i], fours[i + 4], first_halves);
    block[i + 4] = __builtin_shuffle(fours[i], fours[i + 4], second_halves);
  }
}

}  // namespace optimus::cpu

#endif
