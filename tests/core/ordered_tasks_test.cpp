// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/ordered_tasks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>

namespace dynmo {
namespace {

TEST(OrderedTasks, ComeBackInOrderFromAnyNumberOfThreads) {
  for (const int jobs : {1, 2, 5}) {
    OrderedTasks<int> tasks(jobs);
    std::vector<int> results;
    for (int i = 0; i < 500; ++i) {
      if (tasks.full()) results.push_back(tasks.take());
      tasks.add([i] { return i; });
    }
    while (!tasks.empty()) results.push_back(tasks.take());
    ASSERT_EQ(results.size(), 500U);
    for (int i = 0; i < 500; ++i) EXPECT_EQ(results[static_cast<std::size_t>(i)], i);
  }
}

TEST(OrderedTasks, ThrowWhereTheirResultIsTaken) {
  for (const int jobs : {1, 3}) {
    OrderedTasks<int> tasks(jobs);
    tasks.add([]() -> int { throw std::runtime_error("the first"); });
    tasks.add([] { return 2; });
    EXPECT_THROW((void)tasks.take(), std::runtime_error);
    EXPECT_EQ(tasks.take(), 2);
  }
}

TEST(OrderedTasks, ThatNobodyTakesAreDroppedWithTheRest) {
  std::atomic<int> done = 0;
  {
    OrderedTasks<std::unique_ptr<int>> tasks(2);
    for (int i = 0; i < 100; ++i) {
      tasks.add([&done, i] {
        ++done;
        return std::make_unique<int>(i);
      });
    }
    EXPECT_EQ(*tasks.take(), 0);
  }
  EXPECT_GE(done.load(), 1);
}

}  // namespace
}  // namespace dynmo
