#include "gemm.h"

#include <vector>

namespace optimus::cpu {
namespace {

// One tile of C in registers. Vector types are the compiler's own, so the same source serves every instruction set;
// always_inline lets each caller below compile it for its target.
template <int W, int MR, int NV, bool kRows>
inline __attribute__((always_inline)) void tile(int64_t depth, const float* a, int64_t stride, const float* b, float* c,
                                                int64_t ldc, bool accumulate) {
  typedef float Vector __attribute__((vector_size(W * sizeof(float)), aligned(4), may_alias));
  Vector acc[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n)
      acc[m][n] = accumulate ? *reinterpret_cast<const Vector*>(c + m * ldc + n * W) : Vector{} ;
  for (int64_t k = 0; k < depth; ++k, a += kRows ? 1 : stride, b += NV * W) {
    Vector column[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) column[n] = *reinterpret_cast<const Vector*>(b + n * W);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) acc[m][n] += a[kRows ? m * stride : m] * column[n];
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) *reinterpret_cast<Vector*>(c + m * ldc + n * W) = acc[m][n];
}

#define OPTIMUS_TILE(name, target, W, MR, NV)                                                                       \
  template <bool kRows>                                                                                             \
  target void name(int64_t depth, const float* a, int64_t stride, const float* b, float* c, int64_t ldc,            \
                   bool accumulate) {                                                                               \
    tile<W, MR, NV, kRows>(depth, a, stride, b, c, ldc, accumulate);                                                \
  }

#if defined(__x86_64__) && !defined(__clang__)
#define OPTIMUS_X86 1
OPTIMUS_TILE(tile_avx512, __attribute__((target("avx512f,fma"))), 16, 12, 2)

// Four rounds of interleaving row i with row i + 8 transpose a 16 x 16 block.
__attribute__((target("avx512f"))) int64_t transpose_avx512(const float* const* rows, int64_t depth, int64_t stride,
                                                            float* dst) {
  typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
  typedef int Index __attribute__((vector_size(64)));
  const Index low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Index high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  int64_t k = 0;
  for (; k + 16 <= depth; k += 16) {
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

OPTIMUS_TILE(tile_avx2, __attribute__((target("avx2,fma"))), 8, 6, 2)
#endif

// 128-bit vectors: 32 registers on Arm, 16 elsewhere.
#if defined(__aarch64__)
constexpr int kPlainRows = 8, kPlainVectors = 3;
#else
constexpr int kPlainRows = 6, kPlainVectors = 2;
#endif

OPTIMUS_TILE(tile_plain, , 4, kPlainRows, kPlainVectors)

TileKernel choose() {
#if defined(OPTIMUS_X86)
  if (__builtin_cpu_supports("avx512f")) return {12, 32, tile_avx512<true>, tile_avx512<false>, transpose_avx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {6, 16, tile_avx2<true>, tile_avx2<false>, nullptr};
#endif
  return {kPlainRows, 4 * kPlainVectors, tile_plain<true>, tile_plain<false>, nullptr};
}

}  // namespace

const TileKernel& tile_kernel() {
  static const TileKernel kernel = choose();
  return kernel;
}

void multiply(const Left& a, const float* b, int64_t num_rows, int64_t num_cols, int64_t depth, float* c, int64_t ldc,
              bool accumulate) {
  const TileKernel& kernel = tile_kernel();
  const auto run = a.row_major ? kernel.run_rows : kernel.run_cols;
  const int64_t last = num_rows / kernel.rows * kernel.rows;  // the rows from here on do not fill a tile
  thread_local std::vector<float> last_rows;  // [depth][kernel.rows]: nothing is read beyond the operand
  if (last < num_rows) {
    last_rows.assign(depth * kernel.rows, 0.0f);
    for (int64_t m = last; m < num_rows; ++m)
      for (int64_t k = 0; k < depth; ++k)
        last_rows[k * kernel.rows + m - last] = a.data[a.row_major ? m * a.stride + k : k * a.stride + m];
  }
  float edge[16 * 32];
  for (int64_t col = 0; col < num_cols; col += kernel.cols) {
    const int64_t cols = std::min<int64_t>(kernel.cols, num_cols - col);
    for (int64_t row = 0; row < num_rows; row += kernel.rows) {
      const int64_t rows = std::min<int64_t>(kernel.rows, num_rows - row);
      const bool whole = rows == kernel.rows && cols == kernel.cols;
      float* out = c + row * ldc + col;
      float* to = whole ? out : edge;
      const int64_t to_stride = whole ? ldc : kernel.cols;
      if (row < last)
        run(depth, a.data + (a.row_major ? row * a.stride : row), a.stride, b + col * depth, to, to_stride,
            whole && accumulate);
      else
        kernel.run_cols(depth, last_rows.data(), kernel.rows, b + col * depth, to, to_stride, whole && accumulate);
      if (whole) continue;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t n = 0; n < cols; ++n)
          out[r * ldc + n] = (accumulate ? out[r * ldc + n] : 0.0f) + edge[r * kernel.cols + n];
    }
  }
}

}  // namespace optimus::cpu
