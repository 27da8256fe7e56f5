// Element types of the SYCL kernels and what every kernel file needs. Device code; see README.md for how it is compiled.
//
// bf16 and fp16 are bits in memory and fp32 in registers, converted by integer arithmetic: the kernels then ask no
// optional aspect of a device (Intel's CPU device has no fp16 on most processors), and every device rounds alike.
#pragma once

#include <sycl/sycl.hpp>

#include <cstdint>

// Functions of global scope are what the ahead-of-time build names as &kernel; the JIT compiler finds kernels by
// their unmangled name.
#ifdef OPTIMUS_COMPILED_AT_RUN_TIME
#define OPTIMUS_LINKAGE extern "C"
#else
#define OPTIMUS_LINKAGE
#endif
#define OPTIMUS_KERNEL(dimensions) \
  OPTIMUS_LINKAGE SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<dimensions>)) void

#define OPTIMUS_FOR_EACH_TYPE(X) X(f32, float) X(bf16, optimus::Bf16) X(f16, optimus::Fp16)

namespace optimus {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return sycl::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u,
                 fraction = x.bits & 1023u;
  if (exponent == 0) {  // zero and subnormals: not through an fp32 subnormal, which a device may flush
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sycl::bit_cast<float>(sycl::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t wide = exponent == 31u ? 255u : exponent + 112u;
  return sycl::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

// Round to nearest, ties to even. NaN is told by its bits: the compiler may assume that no comparison meets one.
template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline Bf16 from_float<Bf16>(float x) {
  const uint32_t bits = sycl::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
inline Fp16 from_float<Fp16>(float x) {
  const uint32_t bits = sycl::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  uint32_t half;
  if (magnitude > 0x7f800000u)
    half = 0x7e00u;
  else if (magnitude >= 0x477ff000u)  // 65520 and above round to infinity
    half = 0x7c00u;
  else if (magnitude < 0x38800000u)  // below 2^-14: adding 1/2 leaves the fraction in units of 2^-24, rounded
    half = sycl::bit_cast<uint32_t>(sycl::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  else
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  return {static_cast<uint16_t>(sign | half)};
}

// Sixteen bytes: what one work-item loads or stores at once, neighbours beside each other.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T element[N];
};
template <typename T>
constexpr int kPack = 16 / sizeof(T);

template <int N, typename T>
inline void load(const T* from, float* values) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = to_float(pack.element[i]);
}
template <int N, typename T>
inline void store(const float* values, T* to) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.element[i] = from_float<T>(values[i]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + sycl::exp(-x)); }

template <int Dimensions>
inline sycl::nd_item<Dimensions> this_item() {
  return sycl::ext::oneapi::this_work_item::get_nd_item<Dimensions>();
}

// Local memory of a work-group. Of the ways to get it, the one that the run-time compiler takes in a function that a
// kernel calls (group_local_memory_for_overwrite brings version 2026.2 down).
template <typename T>
using WorkGroupLocal = sycl::ext::oneapi::experimental::work_group_static<T>;

}  // namespace optimus
