// A small matrix product of packed operands: C[m, n] (+)= sum_k A[m, k] * B[k, n], C in fp32.
//
// Both operands are packed into panels of as many lanes (rows of A, columns of B) as a tile of C has, padded with zeros.
// Packing is where rows are gathered and where elements become what the processor multiplies: fp32 for vector
// instructions, bf16 parts for AMX (gemm_amx.cpp). An engine is one kind of instructions with its tile and its format.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace optimus::cpu {

// Rows of a matrix, gathered if slots are given: row r is at (slots ? slots[r] / topk : r) * stride.
struct Source {
  const void* data;
  c10::ScalarType type;
  int64_t stride;
  const int32_t* slots;
  int64_t topk;

  template <typename T>
  const T* row(int64_t r) const {
    return static_cast<const T*>(data) + (slots ? slots[r] / topk : r) * stride;
  }
};

// Calls run with a value of the source's type.
template <typename Run>
void with_type(const Source& source, Run run) {
  if (source.type == c10::kFloat)
    run(float());
  else if (source.type == c10::kHalf)
    run(c10::Half());
  else
    run(c10::BFloat16());
}

template <typename T>
Source rows_of(const T* data, int64_t stride, const int32_t* slots = nullptr, int64_t topk = 1) {
  return {data, c10::CppTypeToScalarType<T>::value, stride, slots, topk};
}

enum class Side { kLeft, kRight };
enum class Depth { kContiguous, kStrided };  // where k runs in the source: the lanes are its rows, or its columns

struct Engine {
  const char* name;
  int rows, cols;  // of a tile of C, at most kMostRows x kMostCols
  int depth;       // the packed depth is a multiple of this
  int halves;      // 16-bit words per packed element
  void (*pack)(const Source& source, Depth along, Side side, int64_t lanes, int64_t depth, float* dst);
  // `count` whole tiles below one another: panels of A, a_panel words apart, by one of B; c: count * rows x cols, row
  // stride ldc.
  void (*run)(int64_t depth, int64_t count, const float* a, int64_t a_panel, const float* b, float* c, int64_t ldc,
              bool accumulate);
  void (*begin)();  // around the tiles of one product on one thread; null where there is nothing to do
  void (*end)();

  int lanes(Side side) const { return side == Side::kLeft ? rows : cols; }
  int64_t panel(Side side, int64_t depth) const;                      // fp32 words of one panel
  int64_t size(Side side, int64_t num_lanes, int64_t depth) const;    // fp32 words of a packed operand
};

constexpr int kMostRows = 32, kMostCols = 64;

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The engine for operands of a dtype: of the fastest instructions this processor has, unless others were asked for.
const Engine& engine(c10::ScalarType type);

// Names of the instruction sets present, fastest first, and the choice of one of them for all later calls (empty: the
// fastest). Raises ValueError for a set that is not there.
std::vector<std::string> instruction_sets();
void use_instructions(const std::string& name);

// Whole product of packed operands into row-major c [num_rows, num_cols].
void multiply(const Engine& engine, const float* a, const float* b, int64_t num_rows, int64_t num_cols, int64_t depth,
              float* c, int64_t ldc, bool accumulate);

// The engines of one file each; empty where they were not compiled or this processor lacks the instructions.
std::vector<Engine> vector_engines();                  // fastest first
std::vector<Engine> amx_engines(c10::ScalarType type);  // none or one

}  // namespace optimus::cpu
