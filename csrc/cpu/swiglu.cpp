#include "swiglu.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define OPTIMUS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define OPTIMUS_CLONES
#endif

namespace optimus::cpu {

OPTIMUS_CLONES void swiglu_row(const float* __restrict gate, const float* __restrict up, int64_t width,
                               float* __restrict activation) {
  for (int64_t i = 0; i < width; ++i) activation[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

OPTIMUS_CLONES float swiglu_row_backward(const float* __restrict gate, const float* __restrict up,
                                         const float* __restrict grad, float weight, int64_t width,
                                         float* __restrict weighted_activation, float* __restrict dgate,
                                         float* __restrict dup) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) {
    const float g = gate[i], u = up[i], d = grad[i];
    const float s = sigmoid(g), silu = g * s, a = silu * u;
    sum += d * a;
    weighted_activation[i] = weight * a;
    dgate[i] = weight * d * u * (s + silu * (1.0f - s));
    dup[i] = weight * d * silu;
  }
  return sum;
}

}  // namespace optimus::cpu
