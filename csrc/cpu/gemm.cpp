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

#if defined(__x86_64__)
__attribute__((target("avx512f,fma"))) void tile_avx512(int64_t depth, const float* a, const float* b, float* c,
                                                        int64_t ldc, bool accumulate) {
  tile<16, 14, 2>(depth, a, b, c, ldc, accumulate);
}

__attribute__((target("avx2,fma"))) void tile_avx2(int64_t depth, const float* a, const float* b, float* c,
                                                   int64_t ldc, bool accumulate) {
  tile<8, 6, 2>(depth, a, b, c, ldc, accumulate);
}
#endif

void tile_plain(int64_t depth, const float* a, const float* b, float* c, int64_t ldc, bool accumulate) {
  tile<4, 6, 2>(depth, a, b, c, ldc, accumulate);
}

TileKernel choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {14, 32, tile_avx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {6, 16, tile_avx2};
#endif
  return {6, 8, tile_plain};
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
