// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs tasks on several threads and returns the results in the order of the tasks. So the result is
// the same for any number of threads.

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace dynmo {

// Runs tasks on several threads. One thread adds tasks, and takes the results in the same order.
// The caller limits the number of waiting tasks: it calls take() while full().
template <typename Result>
class OrderedTasks {
 public:
  // Starts `jobs` threads, or none if `jobs` is 1. Without threads, take() runs the task. Requires
  // jobs >= 1.
  explicit OrderedTasks(int jobs) : max_(jobs == 1 ? 1 : 2 * static_cast<std::size_t>(jobs)) {
    for (int i = 0; jobs > 1 && i < jobs; ++i) {
      threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
    }
  }
  // Drops the tasks that have not begun, and waits for the others.
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
  // Returns whether enough tasks wait to keep all threads busy.
  [[nodiscard]] bool full() const { return results_.size() >= max_; }

  // Waits for the oldest task and returns its result, or throws what the task threw. Requires
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
  // The last member, so that threads are joined before the other members are destroyed.
  std::vector<std::jthread> threads_;
};

}  // namespace dynmo
