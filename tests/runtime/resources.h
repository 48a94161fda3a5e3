// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <thread>

namespace dynmo::runtime::testing {

// Open descriptors and threads of this process; the least of a while, as some are about to end.
inline std::ptrdiff_t resources() {
  using Entries = std::filesystem::directory_iterator;
  std::ptrdiff_t least = 1 << 20;
  for (int i = 0; i < 50; ++i) {
    least = std::min(least, std::distance(Entries("/proc/self/fd"), {}) +
                                std::distance(Entries("/proc/self/task"), {}));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return least;
}

// Whether no more than `few` are left once what is about to end has ended, which a busy machine may
// take long for.
inline bool resources_fall_to(std::ptrdiff_t few) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (resources() > few) {
    if (std::chrono::steady_clock::now() > deadline) return false;
  }
  return true;
}

}  // namespace dynmo::runtime::testing
