// Host side shared by the two routes: what an argument looks like, and how a kernel is launched on a queue.
#pragma once

#include <sycl/sycl.hpp>

#include <cstdint>
#include <functional>
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

// A tensor as both routes hand it over; the same struct is declared in megatron/optimus/ops/sycl.py. An argument left
// out has one dimension of size zero.
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
  int64_t block_slots = 512;  // slots that a work-group counts; at most 1024 (order.sycl)
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

}  // namespace optimus
