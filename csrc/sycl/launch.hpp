// Host side shared by both compilations (ahead of time and JIT): what an argument looks like, how it is checked, and how
// each kernel is launched on a queue. Nothing here waits for the device.
//
// Letters: T tokens, K experts per token, N = T*K slots, E experts, D model width, F inner width, R local rows.
// Row buffers have N rows, of which the first R hold data and the rest are not touched.
#pragma once

#include <sycl/sycl.hpp>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace optimus {

enum class DType : int32_t { f32, bf16, f16, i32, i64 };

inline const char* name_of(DType dtype) {
  static const char* const names[] = {"f32", "bf16", "f16", "i32", "i64"};
  return names[static_cast<int32_t>(dtype)];
}
inline int64_t size_of(DType dtype) {
  static const int64_t sizes[] = {4, 2, 2, 4, 8};
  return sizes[static_cast<int32_t>(dtype)];
}

// A tensor argument; the same struct is declared in megatron/optimus/ops/sycl.py. An argument left out has one
// dimension of size zero.
struct Array {
  void* data;
  int32_t dtype;  // DType, or -1 for a dtype that no kernel takes
  int32_t dims;
  int64_t sizes[4];
  int64_t strides[4];

  DType type() const { return static_cast<DType>(dtype); }
  bool absent() const { return dims == 1 && sizes[0] == 0; }
  int64_t size(int d) const { return sizes[d]; }
};

template <typename... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline std::string shape_of(const int64_t* sizes, size_t dims) {
  std::ostringstream out;
  out << "[";
  for (size_t d = 0; d < dims; ++d) out << (d ? ", " : "") << sizes[d];
  out << "]";
  return out.str();
}

// Refuses an argument whose dtype, shape or layout is not what a kernel would take it for.
inline void check(const Array& array, const char* name, DType dtype, const std::vector<int64_t>& sizes) {
  if (array.dtype != static_cast<int32_t>(dtype))
    fail(name, " has dtype ", array.dtype < 0 ? "unsupported" : name_of(array.type()), "; expected ", name_of(dtype));
  bool fits = array.dims == static_cast<int32_t>(sizes.size());
  for (size_t d = 0; fits && d < sizes.size(); ++d) fits = array.sizes[d] == sizes[d];
  if (!fits)
    fail(name, " has shape ", shape_of(array.sizes, array.dims), "; expected ", shape_of(sizes.data(), sizes.size()));
  int64_t stride = 1, elements = 1;
  for (int d = array.dims - 1; d >= 0; --d) {
    elements *= array.sizes[d];
    if (array.sizes[d] > 1 && array.strides[d] != stride && elements > 0)
      fail(name, " is not contiguous (strides ", shape_of(array.strides, array.dims), "); call .contiguous() first");
    stride *= array.sizes[d];
  }
  if (elements > 0 && array.data == nullptr) fail(name, " has no memory");
}

inline void check_float(const Array& array, const char* name) {
  if (array.dtype < 0 || array.type() > DType::f16)
    fail(name, " has dtype ", array.dtype < 0 ? "unsupported" : name_of(array.type()), "; expected f32, bf16 or f16");
}

inline void check_dims(const Array& array, const char* name, int32_t dims) {
  if (array.dims != dims) fail(name, " has ", array.dims, " dimensions; expected ", dims);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Launcher {
  sycl::queue queue;
  std::function<sycl::kernel(const std::string& name)> kernel;  // throws for an unknown name
  std::function<void*(int64_t bytes)> allocate;                 // device memory until the operation is over
  bool host_memory;  // arrays can be read here: indices are checked before the first launch

  // Work sizes. Results depend on them only through the order of the sum of a router-weight gradient.
  int64_t group_items = 256;  // of a kernel along the feature dimension, and of the scans
  int64_t block_slots = 512;  // slots that a work-group counts; at most 1024 (row_order.sycl)
  int64_t tile = 64;          // of a matrix product: 64 or 16 (grouped_gemm.sycl)

  template <int Dimensions, typename... Args>
  void launch(const std::string& name, sycl::range<Dimensions> groups, sycl::range<Dimensions> items, Args... args) {
    if (groups.size() == 0) return;
    const sycl::kernel function = kernel(name);
    queue.submit([&](sycl::handler& handler) {
      handler.set_args(args...);
      handler.parallel_for(sycl::nd_range<Dimensions>(groups * items, items), function);
    });
  }
  template <typename T>
  T* scratch(int64_t elements) {
    return static_cast<T*>(allocate(std::max<int64_t>(elements, 1) * static_cast<int64_t>(sizeof(T))));
  }
};

// What sort_slots makes; see row_order.sycl.
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
