// fp32 products in vector registers: AVX-512, AVX2, and 128-bit vectors elsewhere, from one template.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#if defined(__x86_64__) && !defined(__clang__)
#define OPTIMUS_X86 1
#include <immintrin.h>
#endif

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

// Packing rows as lanes, kRows rows at a time: run() writes dst[k * stride + i] = rows[i][k] for k below the returned
// depth; of 16 rows those from 8 on go to `second` likewise.
struct NoTranspose {
  static constexpr int kRows = 0;
};

#if defined(OPTIMUS_X86)
OPTIMUS_TILE(tile_avx512, __attribute__((target("avx512f,fma"))), 16, 8, 3)
OPTIMUS_TILE(tile_avx2, __attribute__((target("avx2,fma"))), 8, 6, 2)

struct TransposeAvx512 {
  static constexpr int kRows = 16;
  __attribute__((target("avx512f"))) static int64_t run(const float* const* rows, int64_t depth, int64_t stride,
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
};

// 6 or 8 rows.
template <int rows_>
struct TransposeAvx2 {
  static constexpr int kRows = rows_;
  __attribute__((target("avx2"))) static int64_t run(const float* const* rows, int64_t depth, int64_t stride,
                                                     float* dst, float*) {
    typedef float Vector __attribute__((vector_size(32), aligned(4), may_alias));
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8) {
      Vector block[8] = {};
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) block[i] = *reinterpret_cast<const Vector*>(rows[i] + k);
      transpose_8x8(block);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        float* out = dst + (k + i) * stride;
        if (kRows == 8) {
          *reinterpret_cast<Vector*>(out) = block[i];
        } else {  // std::memcpy of six goes through memory
          _mm_storeu_ps(out, _mm256_castps256_ps128(block[i]));
          _mm_storel_pi(reinterpret_cast<__m64*>(out + 4), _mm256_extractf128_ps(block[i], 1));
        }
      }
    }
    return k;
  }
};
#endif

// 128-bit vectors: 32 registers on Arm, 16 elsewhere.
#if defined(__aarch64__)
constexpr int kPlainRows = 8, kPlainVectors = 3;
#else
constexpr int kPlainRows = 6, kPlainVectors = 2;
#endif

OPTIMUS_TILE(tile_plain, , 4, kPlainRows, kPlainVectors)

// Rows become lanes: dst[panel][k][lane] = row(panel * width + lane)[k].
template <typename T, int width, typename Transpose>
void pack_along(const Source& source, int64_t lanes, int64_t depth, float* dst) {
  constexpr int kGroup = Transpose::kRows == 0 ? width : Transpose::kRows;
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
    if constexpr (Transpose::kRows > 0) {
      float* second = kGroup > 8 ? lane(first + 8) : nullptr;
      if (first + kGroup <= padded) done = Transpose::run(rows, depth, width, lane(first), second);
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
    for (; first + width <= lanes; first += width, out += depth * width) {
      if constexpr (std::is_same_v<T, float>)  // a loop would take them one by one, lest they be those that it writes
        std::memcpy(out, src + first, width * sizeof(float));
      else
        for (int i = 0; i < width; ++i) out[i] = static_cast<float>(src[first + i]);
    }
    if (first == lanes) continue;
    for (int i = 0; i < width; ++i) out[i] = first + i < lanes ? static_cast<float>(src[first + i]) : 0.0f;
  }
}

template <int rows, int cols, typename OfRows, typename OfCols>
void pack(const Source& source, Depth along, Side side, int64_t lanes, int64_t depth, float* dst) {
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    if (along == Depth::kStrided)
      (side == Side::kLeft ? pack_across<T, rows> : pack_across<T, cols>)(source, lanes, depth, dst);
    else
      (side == Side::kLeft ? pack_along<T, rows, OfRows> : pack_along<T, cols, OfCols>)(source, lanes, depth, dst);
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
    found.push_back({"avx512", 8, 48, 1, 2, pack<8, 48, TransposeAvx512, TransposeAvx512>, column<tile_avx512, 8>,
                     nullptr, nullptr});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    found.push_back({"avx2", 6, 16, 1, 2, pack<6, 16, TransposeAvx2<6>, TransposeAvx2<8>>, column<tile_avx2, 6>,
                     nullptr, nullptr});
#endif
  constexpr int kCols = 4 * kPlainVectors;
  found.push_back({"plain", kPlainRows, kCols, 1, 2, pack<kPlainRows, kCols, NoTranspose, NoTranspose>,
                   column<tile_plain, kPlainRows>, nullptr, nullptr});
  return found;
}

}  // namespace optimus::cpu
