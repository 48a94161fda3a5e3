// SPDX-License-Identifier: Apache-2.0
#pragma once

// The part of this machine that this process may use: its affinity mask, limited by the CPU quota
// of its control groups. A container on a large host sees all cores but may have the time of two.

#include <filesystem>
#include <optional>
#include <vector>

namespace dynmo::process {

struct Processors {
  // Cores that this process may run on. One of each physical core comes first, then their
  // hyper-threads.
  std::vector<int> cores;
  std::optional<double> quota = {};  // seconds of CPU time a second

  // Returns the number of cores that can be busy all the time: >= 1.
  [[nodiscard]] int usable() const;
  // Returns the first usable() cores. Rank i is pinned to the i-th.
  [[nodiscard]] std::vector<int> to_pin() const;
};

[[nodiscard]] Processors usable_processors();

// Returns the smallest quota of this process's control group and of those around it (version 2
// cpu.max, version 1 cpu.cfs_quota_us), if there is one. `root` holds proc/ and sys/.
[[nodiscard]] std::optional<double> cpu_quota(const std::filesystem::path& root = "/");

// Returns `cores` in the order of Processors, from root/sys/devices/system/cpu. The order is
// unchanged if that folder does not tell.
[[nodiscard]] std::vector<int> physical_cores_first(std::vector<int> cores,
                                                    const std::filesystem::path& root = "/");

}  // namespace dynmo::process
