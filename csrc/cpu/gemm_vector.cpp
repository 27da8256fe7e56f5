// fp32 products in vector registers: AVX-512, AVX2, and 128-bit vectors elsewhere, from one template.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "gemm.h"
#include "transpose.h"

namespace optimus::cpu {
namespace {

// One tile of C in registers. Vector types are the compiler's own, so the same source serves every instruction set;
// always_inline lets each caller below compile it for its target.
template <int W, int MR, int NV>
inline __attribute__((always_inline)) void tile(int64_t depth, const float* a, const float* b, float* c, int64_t ldc,
                                                bool accumulate) {
  typedef float Vector __attribute__((vector_size(W * sizeof(float)), aligned(4), may_alias));
  Vector acc[MR][NV] = {};
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
    for (int n = 0; n < NV; ++n) {
      Vector* out = reinterpret_cast<Vector*>(c + m * ldc + n * W);
      *out = accumulate ? *out + acc[m][n] : acc[m][n];
    }
}

#define OPTIMUS_TILE(name, target, W, MR, NV)                                                              \
  target void name(int64_t depth, const float* a, const float* b, float* c, int64_t ldc, bool accumulate) { \
    tile<W, MR, NV>(depth, a, b, c, ldc, accumulate);                                                      \
  }

// 16 rows at a time: dst[k * stride + i] = rows[i][k], the rows from 8 on going to `second` likewise; for k below the
// returned depth.
using Transpose = int64_t (*)(const float* const* rows, int64_t depth, int64_t stride, float* dst, float* second);

#if defined(__x86_64__) && !defined(__clang__)
#define OPTIMUS_X86 1
OPTIMUS_TILE(tile_avx512, __attribute__((target("avx512f,fma"))), 16, 8, 3)
OPTIMUS_TILE(tile_avx2, __attribute__((target("avx2,fma"))), 8, 6, 2)

__attribute__((target("avx512f"))) int64_t transpose_avx512(const float* const* rows, int64_t depth, int64_t stride,
                                                            float* dst, float* second) {
  typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
  int64_t k = 0;
  for (; k + 16 <= depth; k += 16) {
    Vector block[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) block[i] = *reinterpret_cast<const Vector*>(rows[i] + k);
    transpose_16x16(block);
    for (int i = 0; i < 16; ++i) {
      std::memcpy(dst + (k + i) * stride, &block[i], 32);
      std::memcpy(second + (k + i) * stride, reinterpret_cast<const char*>(&block[i]) + 32, 32);
    }
  }
  return k;
}
#endif

// 128-bit vectors: 32 registers on Arm, 16 elsewhere.
#if defined(__aarch64__)
constexpr int kPlainRows = 8, kPlainVectors = 3;
#else
constexpr int kPlainRows = 6, kPlainVectors = 2;
#endif

OPTIMUS_TILE(tile_plain, , 4, kPlainRows, kPlainVectors)

// Rows become lanes: dst[panel][k][lane] = row(panel * width + lane)[k].
template <typename T, int width, Transpose transpose>
void pack_along(const Source& source, int64_t lanes, int64_t depth, float* dst) {
  constexpr int kGroup = transpose == nullptr ? width : 16;
  thread_local std::vector<float> buffer;  // rows in fp32, of zeros where there are none
  buffer.resize(kGroup * depth);
  const int64_t padded = round_up(lanes, width);
  for (int64_t first = 0; first < padded; first += kGroup) {
    const float* rows[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      rows[i] = buffer.data() + i * depth;
      if (first + i >= lanes)
        std::fill_n(buffer.data() + i * depth, depth, 0.0f);
      else if constexpr (std::is_same_v<T, float>)
        rows[i] = source.row<float>(first + i);
      else
        std::copy_n(source.row<T>(first + i), depth, buffer.data() + i * depth);
    }
    const auto lane = [&](int64_t i) { return dst + i / width * width * depth + i % width; };
    int64_t done = 0;
    if constexpr (transpose != nullptr) {
      if (first + 16 <= padded) done = transpose(rows, depth, width, lane(first), lane(first + 8));
    }
    for (int i = 0; i < kGroup && first + i < padded; ++i) {
      float* out = lane(first + i);
      for (int64_t k = done; k < depth; ++k) out[k * width] = rows[i][k];
    }
  }
}

// Columns become lanes: dst[panel][k][lane] = row(k)[panel * width + lane].
template <typename T, int width>
void pack_across(const Source& source, int64_t lanes, int64_t depth, float* dst) {
  for (int64_t k = 0; k < depth; ++k) {
    const T* src = source.row<T>(k);
    float* out = dst + k * width;
    int64_t first = 0;
    for (; first + width <= lanes; first += width, out += depth * width)
      for (int i = 0; i < width; ++i) out[i] = static_cast<float>(src[first + i]);
    if (first == lanes) continue;
    for (int i = 0; i < width; ++i) out[i] = first + i < lanes ? static_cast<float>(src[first + i]) : 0.0f;
  }
}

template <int rows, int cols, Transpose transpose>
void pack(const Source& source, Depth along, Side side, int64_t lanes, int64_t depth, float* dst) {
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    if (along == Depth::kAcrossRows)
      (side == Side::kLeft ? pack_across<T, rows> : pack_across<T, cols>)(source, lanes, depth, dst);
    else
      (side == Side::kLeft ? pack_along<T, rows, transpose> : pack_along<T, cols, transpose>)(source, lanes, depth, dst);
  };
  with_type(source, run);
}

template <auto tile, int rows>
void column(int64_t depth, int64_t count, const float* a, int64_t a_panel, const float* b, float* c, int64_t ldc,
            bool accumulate) {
  for (; count > 0; --count, a += a_panel, c += rows * ldc) tile(depth, a, b, c, ldc, accumulate);
}

}  // namespace

std::vector<Engine> vector_engines() {
  std::vector<Engine> found;
#if defined(OPTIMUS_X86)
  if (__builtin_cpu_supports("avx512f"))
    found.push_back({"avx512", 8, 48, 1, 2, pack<8, 48, transpose_avx512>, column<tile_avx512, 8>, nullptr, nullptr});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    found.push_back({"avx2", 6, 16, 1, 2, pack<6, 16, nullptr>, column<tile_avx2, 6>, nullptr, nullptr});
#endif
  constexpr int kCols = 4 * kPlainVectors;
  found.push_back({"plain", kPlainRows, kCols, 1, 2, pack<kPlainRows, kCols, nullptr>, column<tile_plain, kPlainRows>,
                   nullptr, nullptr});
  return found;
}

}  // namespace optimus::cpu
