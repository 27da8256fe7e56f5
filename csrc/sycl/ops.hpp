// The operations: arguments checked, then kernels launched. Both routes call these; nothing here waits for the device.
//
// Letters: T tokens, K experts per token, N = T*K slots, E experts, D model width, F inner width, R local rows.
// Row buffers have N rows, of which the first R hold data and the rest are not touched.
#pragma once

#include "launcher.hpp"

#include <algorithm>
#include <limits>

namespace optimus {

// What sort_slots makes; see order.sycl.
struct Order {
  const int32_t* slots;    // [N] slots in expert order, foreign slots after them
  const int32_t* rows;     // [N] row of each slot, -1 for a foreign one
  const int32_t* offsets;  // [E+3]
  int64_t num_slots;
  int32_t num_experts;
};

inline int32_t count32(int64_t value, const char* what, int64_t least) {
  if (value < least || value > std::numeric_limits<int32_t>::max())
    fail(what, " = ", value, "; expected ", least, " to ", std::numeric_limits<int32_t>::max());
  return static_cast<int32_t>(value);
}

// True if every address and the width allow sixteen bytes at a time.
inline int32_t packed(DType type, int64_t width, std::initializer_list<const void*> addresses) {
  bool fits = width * size_of(type) % 16 == 0;
  for (const void* address : addresses) fits = fits && reinterpret_cast<uintptr_t>(address) % 16 == 0;
  return fits ? 1 : 0;
}

// Work-items along a row of `width` elements: no more than it has use for, rounded up to a SIMD width.
inline int64_t row_items(const Launcher& launcher, int64_t width, DType type, int32_t is_packed) {
  const int64_t vectors = ceil_div(width, is_packed ? 16 / size_of(type) : 1);
  return std::min(launcher.group_items, ceil_div(vectors, 16) * 16);
}

// A grid of rows by features for kernels that give each work-item one vector.
struct RowGrid {
  sycl::range<2> groups, items;
  RowGrid(const Launcher& launcher, int64_t rows, int64_t width, DType type, int32_t is_packed)
      : groups(0, 0), items(1, row_items(launcher, width, type, is_packed)) {
    const int64_t vectors = ceil_div(width, is_packed ? 16 / size_of(type) : 1);
    groups = sycl::range<2>(rows, ceil_div(vectors, static_cast<int64_t>(items[1])));
  }
};

inline void check_indices(const Array& indices) {
  check_dims(indices, "indices", 2);
  if (indices.dtype != static_cast<int32_t>(DType::i32) && indices.dtype != static_cast<int32_t>(DType::i64))
    fail("indices must be i32 or i64");
  check(indices, "indices", indices.type(), {indices.size(0), indices.size(1)});
  count32(indices.size(0), "T", 0);
  count32(indices.size(1), "K", 1);
  count32(indices.size(0) * indices.size(1), "T*K", 0);
}

template <typename Index>
void check_range(const Index* indices, int64_t count, int32_t num_experts) {
  for (int64_t n = 0; n < count; ++n)
    if (indices[n] < -1 || indices[n] >= num_experts)
      fail("indices hold ", indices[n], "; expected values in [-1, ", num_experts, ")");
}

inline void launch_sort(Launcher& launcher, const Array& indices, int32_t num_experts, int32_t* slots, int32_t* rows,
                        int32_t* offsets, int32_t* counts) {
  const int64_t num_slots = indices.size(0) * indices.size(1);
  const bool wide = indices.type() == DType::i64;
  if (launcher.host_memory) {
    if (wide)
      check_range(static_cast<const int64_t*>(indices.data), num_slots, num_experts);
    else
      check_range(static_cast<const int32_t*>(indices.data), num_slots, num_experts);
  }
  const std::string suffix = wide ? "_i64" : "_i32";
  const auto block_slots = static_cast<int32_t>(launcher.block_slots);
  const int64_t bins = static_cast<int64_t>(num_experts) + 2;
  const int64_t num_blocks = std::max<int64_t>(ceil_div(num_slots, block_slots), 1);
  const sycl::range<1> blocks(num_blocks);
  const sycl::range<1> bin_items(std::min(launcher.group_items, ceil_div(bins, 16) * 16));
  const sycl::range<1> scan_items(launcher.group_items);
  int32_t* partial = launcher.scratch<int32_t>(bins * num_blocks);
  const auto* in = static_cast<const void*>(indices.data);
  launcher.launch("count_slots" + suffix, blocks, bin_items, in, num_slots, num_experts, block_slots, partial);
  launcher.launch("scan_blocks", sycl::range<1>(bins), scan_items, partial, num_blocks, offsets);
  launcher.launch("scan_bins", sycl::range<1>(1), scan_items, offsets, num_experts, counts);
  launcher.launch("place_slots" + suffix, blocks, bin_items, in, num_slots, num_experts, block_slots,
                  static_cast<const int32_t*>(partial), static_cast<const int32_t*>(offsets), slots, rows);
}

inline Order sort_in_scratch(Launcher& launcher, const Array& indices, int32_t num_experts) {
  const int64_t num_slots = indices.size(0) * indices.size(1);
  int32_t* slots = launcher.scratch<int32_t>(num_slots);
  int32_t* rows = launcher.scratch<int32_t>(num_slots);
  int32_t* offsets = launcher.scratch<int32_t>(static_cast<int64_t>(num_experts) + 3);
  launch_sort(launcher, indices, num_experts, slots, rows, offsets, launcher.scratch<int32_t>(num_experts));
  return {slots, rows, offsets, num_slots, num_experts};
}

inline void launch_combine(Launcher& launcher, DType type, const void* expert_rows, const Order& order,
                           const float* weights, int64_t num_tokens, int64_t width, void* y) {
  if (num_tokens == 0) return;
  const int32_t is_packed = packed(type, width, {expert_rows, y});
  const RowGrid grid(launcher, num_tokens, width, type, is_packed);
  launcher.launch(std::string("combine_") + name_of(type), grid.groups, grid.items, expert_rows, order.rows,
                  order.offsets, order.num_experts, order.num_slots, weights,
                  static_cast<int32_t>(order.num_slots / num_tokens), width, y, is_packed);
}

inline void launch_swiglu(Launcher& launcher, DType type, const void* hidden, const Order& order, int64_t inner,
                          void* activation) {
  const int32_t is_packed = packed(type, inner, {hidden, activation});
  const RowGrid grid(launcher, order.num_slots, inner, type, is_packed);
  launcher.launch(std::string("swiglu_") + name_of(type), grid.groups, grid.items, hidden, order.offsets,
                  order.num_experts, inner, activation, is_packed);
}

inline void launch_swiglu_backward(Launcher& launcher, DType type, const void* hidden, const void* grad,
                                   const Order& order, const float* weights, int64_t inner, void* dhidden,
                                   void* weighted, float* dweights) {
  const int32_t is_packed = packed(type, inner, {hidden, grad, dhidden, weighted});
  launcher.launch(std::string("swiglu_backward_") + name_of(type), sycl::range<1>(order.num_slots),
                  sycl::range<1>(row_items(launcher, inner, type, is_packed)), hidden, grad, order.slots,
                  order.offsets, order.num_experts, weights, inner, dhidden, weighted, dweights, is_packed);
}

inline sycl::range<2> tile_items(const Launcher& launcher) { return {1, launcher.tile == 64 ? 256u : 64u}; }

// slots: null if `a` is in expert order, else a has a row per token, read through the slots with topk.
inline void launch_gemm_rows(Launcher& launcher, DType type, const void* a, const void* weight, const int32_t* slots,
                             int32_t topk, const Order& order, int64_t depth, int64_t cols, bool transposed,
                             void* out) {
  if (order.num_slots == 0) return;
  const int32_t is_packed = packed(type, depth, {a, weight}) & packed(type, transposed ? depth : cols, {});
  const int64_t row_tiles = ceil_div(order.num_slots, launcher.tile) + order.num_experts;
  launcher.launch(std::string("gemm_rows_") + name_of(type) + "_" + std::to_string(launcher.tile),
                  sycl::range<2>(row_tiles, ceil_div(cols, launcher.tile)), tile_items(launcher), a, weight, slots,
                  topk, order.offsets, order.num_experts, depth, cols, static_cast<int32_t>(transposed), out,
                  is_packed);
}

// The up projection: hidden [N, 2F] and, in the same kernel, activation [N, F].
inline void launch_gemm_swiglu(Launcher& launcher, DType type, const void* a, const void* weight, const int32_t* slots,
                               int32_t topk, const Order& order, int64_t depth, int64_t inner, void* hidden,
                               void* activation) {
  if (order.num_slots == 0) return;
  const int64_t row_tiles = ceil_div(order.num_slots, launcher.tile) + order.num_experts;
  launcher.launch(std::string("gemm_swiglu_") + name_of(type) + "_" + std::to_string(launcher.tile),
                  sycl::range<2>(row_tiles, ceil_div(inner, launcher.tile / 2)), tile_items(launcher), a, weight, slots,
                  topk, order.offsets, order.num_experts, depth, 2 * inner, hidden, activation,
                  packed(type, depth, {a, weight}));
}

inline void launch_gemm_weights(Launcher& launcher, DType type, DType out_type, const void* left, const void* right,
                                const int32_t* left_slots, const int32_t* right_slots, int32_t topk,
                                const Order& order, int64_t left_width, int64_t right_width, bool accumulate,
                                void* out) {
  launcher.launch(std::string("gemm_weights_") + name_of(type) + "_" + std::to_string(launcher.tile),
                  sycl::range<2>(order.num_experts * ceil_div(left_width, launcher.tile),
                                 ceil_div(right_width, launcher.tile)),
                  tile_items(launcher), left, right, left_slots, right_slots, topk, order.offsets, left_width,
                  right_width, static_cast<int32_t>(accumulate), out, static_cast<int32_t>(out_type == DType::f32),
                  packed(type, left_width, {left, right}) & packed(type, right_width, {}));
}

}  // namespace optimus
