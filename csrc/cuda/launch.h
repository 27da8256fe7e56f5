// Launches of kernels with more than the usual shared memory, or while the one before is still running.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace optimus::cuda {

// Raises a kernel's limit of dynamic shared memory, once on each device, at its first launch there.
class SharedMemoryLimit {
 public:
  template <typename Kernel>
  cudaError_t operator()(Kernel kernel, int bytes) {
    int device = 0;
    if (auto error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const uint64_t bit = uint64_t{1} << device % 64;
    if (device < 64 && done_.load(std::memory_order_relaxed) & bit) return cudaSuccess;
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) done_.fetch_or(bit, std::memory_order_relaxed);
    return error;
  }

 private:
  std::atomic<uint64_t> done_{0};
};

struct Launch {
  int blocks, threads, shared_bytes;
  bool overlaps;  // its blocks may start where those of the launch before leave (programmatic dependent launch)
  cudaStream_t stream;
};

template <typename... Parameters, typename... Values>
cudaError_t launch(const Launch& as, void (*kernel)(Parameters...), const Values&... values) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = as.blocks, config.blockDim = as.threads, config.dynamicSmemBytes = as.shared_bytes;
  config.stream = as.stream, config.attrs = &overlap, config.numAttrs = as.overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, values...);
}

}  // namespace optimus::cuda
