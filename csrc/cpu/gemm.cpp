#include "gemm.h"

#include <cstring>

namespace optimus::cpu {
namespace {

// One tile of C in registers. Vector types are the compiler's own, so the same source serves every instruction set;
// always_inline lets each caller below compile it for its target.
template <int W, int MR, int NV>
inline __attribute__((always_inline)) void tile(int64_t depth, const float* a, const float* b, float* c, int64_t ldc,
                                                bool accumulate) {
  typedef float Vector __attribute__((vector_size(W * sizeof(float)), aligned(4), may_alias));
  Vector acc[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n)
      acc[m][n] = accumulate ? *reinterpret_cast<const Vector*>(c + m * ldc + n * W) : Vector{} ;
  for (int64_t k = 0; k < depth; ++k, a += MR, b += NV * W) {
    Vector column[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) column[n] = *reinterpret_cast<const Vector*>(b + n * W);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) acc[m][n] += a[m] * column[n];
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) *reinterpret_cast<Vector*>(c + m * ldc + n * W) = acc[m][n];
}

#if defined(__x86_64__) && !defined(__clang__)
#define OPTIMUS_X86 1
__attribute__((target("avx512f,fma"))) void tile_avx512(int64_t depth, const float* a, const float* b, float* c,
                                                        int64_t ldc, bool accumulate) {
  tile<16, 14, 2>(depth, a, b, c, ldc, accumulate);
}

// Four rounds of interleaving row i with row i + 8 transpose a 16 x 16 block. Stops one row early, so that what a short
// stride writes too much is always overwritten by the caller.
__attribute__((target("avx512f"))) int64_t transpose_avx512(const float* const* rows, int64_t depth, int64_t stride,
                                                            float* dst) {
  typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
  typedef int Index __attribute__((vector_size(64)));
  const Index low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Index high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  int64_t k = 0;
  for (; k + 16 < depth; k += 16) {
    Vector block[16], next[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) block[i] = *reinterpret_cast<const Vector*>(rows[i] + k);
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
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) *reinterpret_cast<Vector*>(dst + (k + i) * stride) = block[i];
  }
  return k;
}

__attribute__((target("avx2,fma"))) void tile_avx2(int64_t depth, const float* a, const float* b, float* c,
                                                   int64_t ldc, bool accumulate) {
  tile<8, 6, 2>(depth, a, b, c, ldc, accumulate);
}
#endif

// 128-bit vectors: 32 registers on Arm, 16 elsewhere.
#if defined(__aarch64__)
constexpr int kPlainRows = 8, kPlainVectors = 3;
#else
constexpr int kPlainRows = 6, kPlainVectors = 2;
#endif

void tile_plain(int64_t depth, const float* a, const float* b, float* c, int64_t ldc, bool accumulate) {
  tile<4, kPlainRows, kPlainVectors>(depth, a, b, c, ldc, accumulate);
}

TileKernel choose() {
#if defined(OPTIMUS_X86)
  if (__builtin_cpu_supports("avx512f")) return {14, 32, tile_avx512, transpose_avx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {6, 16, tile_avx2, nullptr};
#endif
  return {kPlainRows, 4 * kPlainVectors, tile_plain, nullptr};
}

}  // namespace

const TileKernel& tile_kernel() {
  static const TileKernel kernel = choose();
  return kernel;
}

void multiply_packed(const float* a, const float* b, int64_t num_rows, int64_t num_cols, int64_t depth, float* c,
                     int64_t ldc, bool accumulate) {
  const TileKernel& kernel = tile_kernel();
  float edge[16 * 32];
  for (int64_t col = 0; col < num_cols; col += kernel.cols) {
    const int64_t cols = std::min<int64_t>(kernel.cols, num_cols - col);
    for (int64_t row = 0; row < num_rows; row += kernel.rows) {
      const int64_t rows = std::min<int64_t>(kernel.rows, num_rows - row);
      float* out = c + row * ldc + col;
      if (rows == kernel.rows && cols == kernel.cols) {
        kernel.run(depth, a + row * depth, b + col * depth, out, ldc, accumulate);
        continue;
      }
      kernel.run(depth, a + row * depth, b + col * depth, edge, kernel.cols, false);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t n = 0; n < cols; ++n)
          out[r * ldc + n] = (accumulate ? out[r * ldc + n] : 0.0f) + edge[r * kernel.cols + n];
    }
  }
}

}  // namespace optimus::cpu
