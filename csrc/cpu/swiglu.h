// SwiGLU, sigmoid and softmax on rows of fp32, written so that compilers vectorise the loops.
#pragma once

#include <cstdint>
#include <cstring>

namespace optimus::cpu {

// e^x to about 2 ulp: 2^n times a polynomial on |r| <= ln2/2 (Cephes coefficients). Clamped to the range of normal
// numbers. No library call, so the loops around it vectorise.
inline float fast_exp(float x, float most = 88.0f) {
  x = x < -87.0f ? -87.0f : (x > most ? most : x);
  const float shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  const float n = shifted - 12582912.0f;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return p * scale;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

// As a factor of silu, which does not notice a sigmoid held above e^-60. Compilers compute the clamped case for every
// vector; at e^-88 its products would be denormal, and each would stop an Intel core for over a hundred cycles.
inline float silu_sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x, 60.0f)); }

// activation[i] = silu(gate[i]) * up[i]
void swiglu_row(const float* gate, const float* up, int64_t width, float* activation);

// grad: gradient of the unweighted activation. Returns <grad, activation>, the gradient of the slot's router weight, and
// writes weight * activation and the gradients of gate and up for the weighted output.
float swiglu_row_backward(const float* gate, const float* up, const float* grad, float weight, int64_t width,
                          float* weighted_activation, float* dgate, float* dup);

void sigmoid_row(const float* x, int64_t width, float* out);
void softmax_row(const float* x, int64_t width, float* out);

}  // namespace optimus::cpu
