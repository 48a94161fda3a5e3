// SPDX-License-Identifier: Apache-2.0
#pragma once

// How much of this machine this process may use: its affinity mask, limited by the CPU quota of its
// control groups. A container on a large host sees all cores but may have time on two.

#include <filesystem>
#include <optional>
#include <vector>

namespace dynmo::process {

struct Processors {
  // That this process may run on; one of each physical core first, then their hyper-threads.
  std::vector<int> cores;
  std::optional<double> quota = {};  // seconds of CPU time a second

  // As many as can be busy all the time: >= 1.
  [[nodiscard]] int usable() const;
  // The first usable(): rank i is pinned to the i-th.
  [[nodiscard]] std::vector<int> to_pin() const;
};

[[nodiscard]] Processors usable_processors();

// The least quota of the control group of this process and of those around it (version 2 cpu.max,
// version 1 cpu.cfs_quota_us); absent if there is none. `root` holds proc/ and sys/.
[[nodiscard]] std::optional<double> cpu_quota(const std::filesystem::path& root = "/");

// `cores` in the order of Processors, from root/sys/devices/system/cpu; unchanged where that says
// nothing.
[[nodiscard]] std::vector<int> physical_cores_first(std::vector<int> cores,
                                                    const std::filesystem::path& root = "/");

}  // namespace dynmo::process
