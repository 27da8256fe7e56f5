// Router: scores, top-K and renormalisation of each token in one pass over the logits, its gradient, and expert counts.
#include <torch/library.h>

#include "row_order.h"
#include "swiglu.h"

namespace optimus::cpu {
namespace {

using at::Tensor;

constexpr int64_t kTokens = 256;     // of an item
constexpr float kLeastSum = 1e-20f;  // reference.LEAST_SUM

// Of the experts' choice: larger numbers first, not a number before all of them.
bool ranks_higher(float a, float b) { return b == b && !(a <= b); }

template <typename Body>
void for_each_token(int64_t num_tokens, int64_t num_experts, Body body) {
  const int64_t items = (num_tokens + kTokens - 1) / kTokens;
  for_each(items, [&](const auto& next) {
    std::vector<float> buffer(num_experts);
    for (int64_t item; (item = next()) < items;)
      for (int64_t t = item * kTokens; t < std::min((item + 1) * kTokens, num_tokens); ++t) body(t, buffer.data());
  });
}

std::tuple<Tensor, Tensor, Tensor> router_topk(const Tensor& logits, int64_t topk, bool use_sigmoid, bool normalize,
                                               const std::optional<Tensor>& bias) {
  const int64_t num_tokens = logits.size(0), num_experts = logits.size(1);
  Tensor weights = at::empty({num_tokens, topk}, logits.options()), scores = at::empty_like(logits),
         indices = at::empty({num_tokens, topk}, logits.options().dtype(at::kLong));
  const float *from = logits.const_data_ptr<float>(), *shift = bias ? bias->const_data_ptr<float>() : nullptr;
  float *to_scores = scores.mutable_data_ptr<float>(), *to_weights = weights.mutable_data_ptr<float>();
  int64_t* to_indices = indices.mutable_data_ptr<int64_t>();
  for_each_token(num_tokens, num_experts, [&](int64_t t, float* choice) {
    const float* x = from + t * num_experts;
    float* score = to_scores + t * num_experts;
    if (use_sigmoid)
      sigmoid_row(x, num_experts, score);
    else
      softmax_row(x, num_experts, score);
    for (int64_t e = 0; e < num_experts; ++e) choice[e] = score[e] + (shift ? shift[e] : 0.0f);
    float total = 0.0f;
    float* weight = to_weights + t * topk;
    int64_t* index = to_indices + t * topk;
    for (int64_t k = 0; k < topk; ++k) {
      // Of equal values the first. Whatever the values, every index is a different expert.
      int64_t best = -1;
      for (int64_t e = 0; e < num_experts; ++e) {
        bool taken = false;
        for (int64_t i = 0; i < k; ++i) taken = taken || index[i] == e;
        if (!taken && (best < 0 || ranks_higher(choice[e], choice[best]))) best = e;
      }
      index[k] = best;
      weight[k] = score[best];
      total += score[best];
    }
    if (total < kLeastSum) total = kLeastSum;  // not a number stays
    if (normalize)
      for (int64_t k = 0; k < topk; ++k) weight[k] /= total;
  });
  return {weights, indices, scores};
}

Tensor router_topk_backward(const Tensor& scores, const Tensor& indices, const Tensor& dweights, const Tensor& dscores,
                            bool use_sigmoid, bool normalize) {
  const int64_t num_tokens = scores.size(0), num_experts = scores.size(1), topk = indices.size(1);
  Tensor dlogits = at::empty_like(scores);
  const float *all_scores = scores.const_data_ptr<float>(), *all_dweights = dweights.const_data_ptr<float>(),
              *all_dscores = dscores.const_data_ptr<float>();
  const int64_t* all_indices = indices.const_data_ptr<int64_t>();
  float* out = dlogits.mutable_data_ptr<float>();
  for_each_token(num_tokens, num_experts, [&](int64_t t, float* grad) {
    const float *score = all_scores + t * num_experts, *dweight = all_dweights + t * topk;
    const int64_t* index = all_indices + t * topk;
    std::copy_n(all_dscores + t * num_experts, num_experts, grad);
    float total = 1.0f, mean = 0.0f;  // weight = score / total, which is a constant where it would be less
    if (normalize) {
      total = 0.0f;
      for (int64_t k = 0; k < topk; ++k) {
        total += score[index[k]];
        mean += dweight[k] * score[index[k]];
      }
      mean = total < kLeastSum ? 0.0f : mean / total;
      total = total < kLeastSum ? kLeastSum : total;
    }
    for (int64_t k = 0; k < topk; ++k) grad[index[k]] += (dweight[k] - mean) / total;
    float dot = 0.0f;
    for (int64_t e = 0; e < num_experts; ++e) dot += score[e] * grad[e];
    float* dlogit = out + t * num_experts;
    for (int64_t e = 0; e < num_experts; ++e)
      dlogit[e] = use_sigmoid ? grad[e] * score[e] * (1.0f - score[e]) : score[e] * (grad[e] - dot);
  });
  return dlogits;
}

// Slots of each expert, int64 [E]; -1 counts for none. Raises ValueError for an index outside [-1, E).
Tensor expert_counts(const Tensor& indices, int64_t num_experts) {
  const Tensor flat = indices.to(at::kLong).contiguous();
  const int64_t* expert = flat.const_data_ptr<int64_t>();
  Tensor counts = at::zeros({num_experts}, flat.options());
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  for (int64_t n = 0; n < flat.numel(); ++n) {
    TORCH_CHECK_VALUE(expert[n] >= -1 && expert[n] < num_experts, "indices hold ", expert[n],
                      "; expected values in [-1, ", num_experts, ")");
    if (expert[n] >= 0) ++count[expert[n]];
  }
  return counts;
}

}  // namespace

TORCH_LIBRARY_IMPL(optimus, CPU, m) {
  m.impl("cpu_expert_counts", &expert_counts);
  m.impl("cpu_router_topk", &router_topk);
  m.impl("cpu_router_topk_backward", &router_topk_backward);
}

}  // namespace optimus::cpu
