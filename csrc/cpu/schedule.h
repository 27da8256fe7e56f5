// Block scheduler: assigns blocks of rows, of one expert each, to threads so that an expert stays with a thread.
//
// A thread takes the blocks of an expert one after another, so the expert's packed weights and the sums of its gradients
// stay in that core's caches; where no untouched expert is left, it helps with the one that has most blocks to come.
// in_order keeps the order of an expert's blocks whichever threads run them: results do not depend on the threads.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "row_order.h"

namespace optimus::cpu {

class Schedule {
 public:
  // pieces: counters of in_order for one expert, beyond that of start.
  Schedule(std::vector<RowBlock> blocks, int64_t pieces);

  struct Task {
    RowBlock block;
    int64_t slot;   // of the expert, among those under way: where its packed weights and sums are
    int64_t index;  // of the block among its expert's
    bool last;      // of its expert
  };
  int64_t threads() const { return threads_; }
  int64_t slots() const { return threads_; }  // experts under way at once, at most
  int64_t most_rows() const { return most_rows_; }

  // Calls work once on each thread, with a function that finishes the thread's task and returns its next one, or false.
  using Next = std::function<bool(Task&)>;
  void run(const std::function<void(const Next& next)>& work);

  // Runs `prepare` on the thread that has the expert's first block; the others wait for its end.
  template <typename Prepare>
  void start(const Task& task, Prepare prepare) {
    if (task.index == 0) {
      prepare();
      counter(task, 0).store(1, std::memory_order_release);
    } else {
      wait(counter(task, 0), 1);
    }
  }

  // Runs `add` after that of the expert's blocks before this one with the same piece.
  template <typename Add>
  void in_order(const Task& task, int64_t piece, Add add) {
    std::atomic<int64_t>& passed = counter(task, piece + 1);
    wait(passed, task.index);
    add();
    passed.store(task.index + 1, std::memory_order_release);
  }

 private:
  struct Expert {
    int64_t first, count;  // blocks
    int64_t taken = 0, done = 0, slot = -1;
  };
  bool take(int64_t& mine, Task& task);
  int64_t choose(int64_t mine) const;
  std::atomic<int64_t>& counter(const Task& task, int64_t index) { return counters_[task.slot * pieces_ + index]; }
  static void wait(const std::atomic<int64_t>& counter, int64_t value);

  const std::vector<RowBlock> blocks_;
  const int64_t pieces_;
  int64_t threads_, most_rows_ = 0;
  std::vector<Expert> experts_;    // those with rows
  std::vector<int64_t> free_;      // slots, the one used last on top
  std::unique_ptr<std::atomic<int64_t>[]> counters_;
  std::mutex mutex_;
};

}  // namespace optimus::cpu
