#include "schedule.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <thread>

namespace optimus::cpu {

Schedule::Schedule(std::vector<RowBlock> blocks, int64_t pieces)
    : blocks_(std::move(blocks)), pieces_(pieces + 1) {
  const auto count = static_cast<int64_t>(blocks_.size());
  for (int64_t b = 0; b < count; ++b) {
    if (b == 0 || blocks_[b].expert != blocks_[b - 1].expert) experts_.push_back({b, 0});
    ++experts_.back().count;
    most_rows_ = std::max(most_rows_, blocks_[b].rows);
  }
  threads_ = std::min<int64_t>(at::get_num_threads(), count);
  for (int64_t slot = threads_; slot-- > 0;) free_.push_back(slot);
  counters_ = std::make_unique<std::atomic<int64_t>[]>(threads_ * pieces_);
}

// The expert of the thread's next block: its own, else an untouched one, else one to help with; most blocks first.
int64_t Schedule::choose(int64_t mine) const {
  if (mine >= 0 && experts_[mine].taken < experts_[mine].count) return mine;
  int64_t found = -1, most = 0;
  bool untouched = false;
  for (int64_t e = 0; e < static_cast<int64_t>(experts_.size()); ++e) {
    const int64_t left = experts_[e].count - experts_[e].taken;
    const bool fresh = experts_[e].taken == 0;
    if (left == 0 || (untouched && !fresh) || (untouched == fresh && left <= most)) continue;
    found = e, most = left, untouched = fresh;
  }
  return found;
}

// There is a slot for an untouched expert: each of the others under way has a thread that holds a block of it, since a
// thread leaves an expert only when all its blocks are taken, and this thread holds none.
bool Schedule::take(int64_t& mine, Task& task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (mine >= 0) {
    Expert& before = experts_[mine];
    if (++before.done == before.count) free_.push_back(before.slot);
  }
  mine = choose(mine);
  if (mine < 0) return false;
  Expert& expert = experts_[mine];
  if (expert.taken == 0) {
    expert.slot = free_.back();
    free_.pop_back();
    for (int64_t i = 0; i < pieces_; ++i) counters_[expert.slot * pieces_ + i].store(0, std::memory_order_relaxed);
  }
  task = {blocks_[expert.first + expert.taken], expert.slot, expert.taken, expert.taken + 1 == expert.count};
  ++expert.taken;
  return true;
}

void Schedule::run(const std::function<void(const Next& next)>& work) {
  at::parallel_for(0, threads_, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      int64_t mine = -1;
      work([&](Task& task) { return take(mine, task); });
    }
  });
}

// Whoever is waited for has its block and waits for earlier ones only, so this ends.
void Schedule::wait(const std::atomic<int64_t>& counter, int64_t value) {
  for (int tries = 0; counter.load(std::memory_order_acquire) != value; ++tries)
    if (tries > 64) std::this_thread::yield();
}

}  // namespace optimus::cpu
