// SPDX-License-Identifier: Apache-2.0
#pragma once

// Work that is done by several threads and comes back in the order in which it was given, so that
// the result is the same for any number of threads.

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace dynmo {

// Used by one thread, which adds tasks and takes results. How many may wait is the caller's choice:
// take() whenever full().
template <typename Result>
class OrderedTasks {
 public:
  // With one job there are no threads: a task is done when its result is taken. Requires jobs >= 1.
  explicit OrderedTasks(int jobs) : max_(jobs == 1 ? 1 : 2 * static_cast<std::size_t>(jobs)) {
    for (int i = 0; jobs > 1 && i < jobs; ++i) {
      threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
    }
  }
  // Tasks not begun are dropped, those being done are waited for.
  ~OrderedTasks() = default;
  OrderedTasks(const OrderedTasks&) = delete;
  OrderedTasks& operator=(const OrderedTasks&) = delete;

  template <typename Function>
  void add(Function function) {
    std::packaged_task<Result()> task(std::move(function));
    results_.push_back(task.get_future());
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

  [[nodiscard]] bool empty() const { return results_.empty(); }
  // Whether there is as much to do as keeps all threads busy.
  [[nodiscard]] bool full() const { return results_.size() >= max_; }

  // The result of the oldest task, waited for; what the task threw is thrown here. Requires
  // !empty().
  Result take() {
    if (threads_.empty()) {
      tasks_.front()();
      tasks_.pop_front();
    }
    std::future<Result> oldest = std::move(results_.front());
    results_.pop_front();
    return oldest.get();
  }

 private:
  void work(const std::stop_token& stop) {
    while (true) {
      std::packaged_task<Result()> task;
      {
        std::unique_lock lock(mutex_);
        if (!wake_.wait(lock, stop, [this] { return !tasks_.empty(); })) return;
        if (stop.stop_requested()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  const std::size_t max_;
  std::deque<std::future<Result>> results_;
  std::mutex mutex_;  // of tasks_
  std::condition_variable_any wake_;
  std::deque<std::packaged_task<Result()>> tasks_;
  std::vector<std::jthread> threads_;  // last: joined before the rest goes
};

}  // namespace dynmo
