#include "row_order.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "gemm.h"

namespace optimus::cpu {

std::vector<RowBlock> Order::blocks(int64_t most, int64_t tile) const {
  std::vector<RowBlock> found;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t rows = offsets[e + 1] - offsets[e], parts = (rows + most - 1) / most;
    if (rows == 0) continue;
    const int64_t equal = round_up((rows + parts - 1) / parts, tile);
    for (int64_t first = offsets[e]; first < offsets[e + 1]; first += equal)
      found.push_back({e, first, std::min<int64_t>(equal, offsets[e + 1] - first)});
  }
  return found;
}

Order SortedSlots::view() const {
  const int64_t num_experts = counts.numel();
  const auto* first_row = offsets.const_data_ptr<int32_t>();
  return {slots.const_data_ptr<int32_t>(), rows.const_data_ptr<int32_t>(), first_row, slots.numel(), num_experts,
          first_row[num_experts]};
}

SortedSlots sort_slots(const at::Tensor& indices, int64_t num_experts) {
  const at::Tensor flat = indices.to(at::kLong).contiguous();
  const int64_t* expert = flat.const_data_ptr<int64_t>();
  const int64_t num_slots = flat.numel();
  const auto options = indices.options().dtype(at::kInt);
  SortedSlots sorted{at::empty({num_slots}, options), at::empty({num_slots}, options), at::zeros({num_experts}, options),
                     at::empty({num_experts + 3}, options)};
  auto* slots = sorted.slots.mutable_data_ptr<int32_t>();
  auto* rows = sorted.rows.mutable_data_ptr<int32_t>();
  auto* counts = sorted.counts.mutable_data_ptr<int32_t>();
  auto* offsets = sorted.offsets.mutable_data_ptr<int32_t>();
  for (int64_t n = 0; n < num_slots; ++n) {
    TORCH_CHECK_VALUE(expert[n] >= -1 && expert[n] < num_experts, "indices hold ", expert[n],
                      "; expected values in [-1, ", num_experts, ")");
    if (expert[n] >= 0) ++counts[expert[n]];
  }
  offsets[0] = 0;
  for (int64_t e = 0; e < num_experts; ++e) offsets[e + 1] = offsets[e] + counts[e];
  offsets[num_experts + 1] = offsets[num_experts + 2] = static_cast<int32_t>(num_slots);
  std::vector<int32_t> next(offsets, offsets + num_experts + 1);
  for (int64_t n = 0; n < num_slots; ++n) {
    const bool local = expert[n] >= 0;
    const int32_t row = next[local ? expert[n] : num_experts]++;
    slots[row] = static_cast<int32_t>(n);
    rows[n] = local ? row : -1;
  }
  return sorted;
}

void for_each(int64_t count, const std::function<void(const std::function<int64_t()>& next)>& work) {
  std::atomic<int64_t> first{0};
  const auto next = [&] { return std::min(first.fetch_add(1), count); };
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) work(next);
  });
}

// Passes over memory in pages of 2 MiB wait less for address translation, above all in virtual machines.
at::Tensor large_pages(int64_t numel) {
#if defined(__linux__)
  constexpr size_t kPage = 2 << 20;
  const size_t bytes = round_up(numel * sizeof(float), kPage);
  if (numel * sizeof(float) >= kPage / 8) {  // smaller ones would leave most of a page empty
    void* memory = std::aligned_alloc(kPage, bytes);
    TORCH_CHECK(memory != nullptr, "no memory for ", bytes, " bytes of scratch");
    madvise(memory, bytes, MADV_HUGEPAGE);  // advice: where the system does not follow it, nothing changes
    return at::from_blob(memory, {numel}, [](void* old) { std::free(old); }, at::kFloat);
  }
#endif
  return at::empty({numel}, at::kFloat);
}

at::Tensor scratch(int64_t numel) {
  constexpr size_t kKept = 16;
  thread_local std::vector<at::Tensor> kept;
  for (const at::Tensor& buffer : kept)
    if (buffer.use_count() == 1 && buffer.numel() >= numel && buffer.numel() <= 2 * numel) return buffer;
  if (kept.size() >= kKept)
    kept.erase(std::remove_if(kept.begin(), kept.end(), [](const at::Tensor& b) { return b.use_count() == 1; }),
               kept.end());
  kept.push_back(large_pages(numel));
  return kept.back();
}

}  // namespace optimus::cpu
