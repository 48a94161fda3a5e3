// SPDX-License-Identifier: Apache-2.0
#pragma once

// Groups that are being closed. Gloo takes each of a group's connections out of its loop one after
// the other, each time waiting for the loop's next turn, which comes after 10 ms where no message
// does: meanwhile dynmo::gloo_loop has it turn more often.

#include <atomic>

namespace dynmo::c10d {

inline std::atomic<int> closing_groups = 0;

// Lives while one is closed.
class ClosingGroup {
 public:
  ClosingGroup() { ++closing_groups; }
  ClosingGroup(const ClosingGroup&) = delete;
  ClosingGroup& operator=(const ClosingGroup&) = delete;
  ~ClosingGroup() { --closing_groups; }
};

}  // namespace dynmo::c10d
