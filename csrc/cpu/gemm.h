// A small fp32 matrix product with a packed right operand: C[m, n] (+)= sum_k A[m, k] * B[k, n].
//
// B is packed into panels [panel][K][tile_cols], padded with zeros; packing is where rows are gathered and where bf16 and
// fp16 become fp32. A is read where it lies, along its rows or along its columns: a tile's broadcasts cost the same
// either way, so packing it would only add a pass. The tile sizes are those of the widest vector unit present.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace optimus::cpu {

struct TileKernel {
  int rows, cols;  // of C; cols are the lanes of a B panel
  // c: rows x cols, row stride ldc. run_rows: A[m, k] is a[m * stride + k]; run_cols: a[k * stride + m].
  using Run = void (*)(int64_t depth, const float* a, int64_t stride, const float* b, float* c, int64_t ldc,
                       bool accumulate);
  Run run_rows, run_cols;
  // Transposes 16 rows at a time: dst[k * stride + i] = rows[i][k] for k below the returned depth. Null where there is
  // no vector version.
  int64_t (*transpose)(const float* const* rows, int64_t depth, int64_t stride, float* dst);
};

// The kernel for this processor; chosen at the first call.
const TileKernel& tile_kernel();

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Rows become lanes: dst[panel][k][lane] = row(panel * lanes + lane)[k].
template <typename T, typename RowPtr>
void pack_transposed(RowPtr row, int64_t num_rows, int64_t depth, int lanes, float* dst) {
  const auto transpose = tile_kernel().transpose;
  for (int64_t first = 0; first < num_rows; first += lanes, dst += depth * lanes) {
    const int used = static_cast<int>(std::min<int64_t>(lanes, num_rows - first));
    int64_t done = 0;
    if constexpr (std::is_same_v<T, float>) {
      if (transpose != nullptr && used == lanes) {
        const float* rows[32];
        for (int lane = 0; lane < lanes; ++lane) rows[lane] = row(first + lane);
        for (int group = 0; group < lanes; group += 16) done = transpose(rows + group, depth, lanes, dst + group);
      }
    }
    for (int lane = 0; lane < used; ++lane) {
      const T* src = row(first + lane);
      for (int64_t k = done; k < depth; ++k) dst[k * lanes + lane] = static_cast<float>(src[k]);
    }
    for (int lane = used; lane < lanes; ++lane)
      for (int64_t k = 0; k < depth; ++k) dst[k * lanes + lane] = 0.0f;
  }
}

// Columns become lanes: dst[panel][k][lane] = row(k)[panel * lanes + lane].
template <typename T, typename RowPtr>
void pack_direct(RowPtr row, int64_t depth, int64_t num_cols, int lanes, float* dst) {
  for (int64_t k = 0; k < depth; ++k) {
    const T* src = row(k);
    float* out = dst + k * lanes;
    for (int64_t first = 0; first < num_cols; first += lanes, out += depth * lanes) {
      const int used = static_cast<int>(std::min<int64_t>(lanes, num_cols - first));
      if constexpr (std::is_same_v<T, float>)
        std::memcpy(out, src + first, used * sizeof(float));
      else
        for (int lane = 0; lane < used; ++lane) out[lane] = static_cast<float>(src[first + lane]);
      for (int lane = used; lane < lanes; ++lane) out[lane] = 0.0f;
    }
  }
}

// The left operand: A[m, k] is data[m * stride + k] if row_major, else data[k * stride + m].
struct Left {
  const float* data;
  int64_t stride;
  bool row_major;
};

// Whole product into row-major c [num_rows, num_cols].
void multiply(const Left& a, const float* b, int64_t num_rows, int64_t num_cols, int64_t depth, float* c, int64_t ldc,
              bool accumulate);

}  // namespace optimus::cpu
