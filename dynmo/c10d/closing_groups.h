// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts the groups that are being closed. Gloo removes the connections of a group from its loop
// one at a time. Each removal waits for the loop's next iteration, which comes after 10 ms if no
// message does. While the count is above 0, dynmo::gloo_loop iterates more often.

#include <atomic>

namespace dynmo::c10d {

inline std::atomic<int> closing_groups = 0;

// Counts one group as being closed, from its constructor to its destructor.
class ClosingGroup {
 public:
  ClosingGroup() { ++closing_groups; }
  ClosingGroup(const ClosingGroup&) = delete;
  ClosingGroup& operator=(const ClosingGroup&) = delete;
  ~ClosingGroup() { --closing_groups; }
};

}  // namespace dynmo::c10d
