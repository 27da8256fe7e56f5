#include "swiglu.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define OPTIMUS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define OPTIMUS_CLONES
#endif

namespace optimus::cpu {

OPTIMUS_CLONES void swiglu_row(const float* __restrict gate, const float* __restrict up, int64_t width,
                               float* __restrict activation) {
  for (int64_t i = 0; i < width; ++i) activation[i] = gate[i] * silu_sigmoid(gate[i]) * up[i];
}

OPTIMUS_CLONES float swiglu_row_backward(const float* __restrict gate, const float* __restrict up,
                                         const float* __restrict grad, float weight, int64_t width,
                                         float* __restrict weighted_activation, float* __restrict dgate,
                                         float* __restrict dup) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) {
    const float g = gate[i], u = up[i], d = grad[i];
    const float s = silu_sigmoid(g), silu = g * s, a = silu * u;
    sum += d * a;
    weighted_activation[i] = weight * a;
    dgate[i] = weight * d * u * (s + silu * (1.0f - s));
    dup[i] = weight * d * silu;
  }
  return sum;
}

OPTIMUS_CLONES void sigmoid_row(const float* __restrict x, int64_t width, float* __restrict out) {
  for (int64_t i = 0; i < width; ++i) out[i] = sigmoid(x[i]);
}

OPTIMUS_CLONES void softmax_row(const float* __restrict x, int64_t width, float* __restrict out) {
  float most = x[0], sum = 0.0f;
  for (int64_t i = 1; i < width; ++i) most = x[i] > most ? x[i] : most;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) {
    out[i] = fast_exp(x[i] - most);
    sum += out[i];
  }
  for (int64_t i = 0; i < width; ++i) out[i] /= sum;
}

}  // namespace optimus::cpu
