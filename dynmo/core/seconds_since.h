// SPDX-License-Identifier: Apache-2.0
#pragma once

// How long something has taken, for those who measure it where it happens.

#include <chrono>

namespace dynmo {

// Seconds from `start` until now.
[[nodiscard]] inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace dynmo
