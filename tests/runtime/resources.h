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

}  // namespace dynmo::runtime::testing
