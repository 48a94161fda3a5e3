// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/processors.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace dynmo::process {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> lines_of(const fs::path& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::istringstream stream(text);
  std::vector<std::string> parts;
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::ranges::find(words, word) != words.end();
}

// A hierarchy of control groups: its mount point, the group at that point, and the group of this
// process.
struct Hierarchy {
  enum class Version { k1, k2 };
  Version version;
  std::string mount;
  std::string root;
  std::string group;
};

// Parses a line of /proc/self/mountinfo: "36 35 98:0 /root /mount options fields - type source
// options".
std::optional<Hierarchy> hierarchy_of(const std::string& line) {
  const std::vector<std::string> words = split(line, ' ');
  const auto dash = std::ranges::find(words, "-");
  if (words.size() < 5 || words.end() - dash < 4) return std::nullopt;
  if (dash[1] == "cgroup2") return Hierarchy{Hierarchy::Version::k2, words[4], words[3], ""};
  if (dash[1] == "cgroup" && contains(split(dash[3], ','), "cpu")) {
    return Hierarchy{Hierarchy::Version::k1, words[4], words[3], ""};
  }
  return std::nullopt;
}

// Returns this process's group, from /proc/self/cgroup. Its lines are "number:controllers:/group",
// in version 2 "0::/group".
std::optional<std::string> group_of(Hierarchy::Version version, const fs::path& root) {
  for (const std::string& line : lines_of(root / "proc/self/cgroup")) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool wanted = version == Hierarchy::Version::k2
                            ? line.starts_with("0::")
                            : contains(split(controllers, ','), "cpu");
    if (wanted) return line.substr(second + 1);
  }
  return std::nullopt;
}

std::optional<double> ratio(const std::string& quota, const std::string& period) {
  double up = 0;
  double down = 0;
  if (!(std::istringstream(quota) >> up) || !(std::istringstream(period) >> down)) return {};
  if (up <= 0 || down <= 0) return {};  // "max", and -1 in version 1: no limit
  return up / down;
}

std::optional<double> quota_in(const fs::path& folder, Hierarchy::Version version) {
  if (version == Hierarchy::Version::k1) {
    const auto quota = lines_of(folder / "cpu.cfs_quota_us");
    const auto period = lines_of(folder / "cpu.cfs_period_us");
    if (quota.empty() || period.empty()) return {};
    return ratio(quota[0], period[0]);
  }
  const auto lines = lines_of(folder / "cpu.max");
  if (lines.empty()) return {};
  const auto words = split(lines[0], ' ');
  return words.size() == 2 ? ratio(words[0], words[1]) : std::nullopt;
}

// Returns the group's folder below the mount point. A container may see only its own group there,
// while /proc has the name on the host. Then the mount point itself is the group.
fs::path below_mount(const Hierarchy& hierarchy) {
  fs::path group = hierarchy.group;
  if (hierarchy.root != "/") group = group.lexically_relative(hierarchy.root);
  if (group.is_absolute()) group = group.relative_path();
  if (group.empty() || *group.begin() == "..") return {};
  return group;
}

std::optional<double> least(std::optional<double> a, std::optional<double> b) {
  if (!a || !b) return a ? a : b;
  return std::min(*a, *b);
}

std::vector<int> affinity() {
  std::vector<int> cores;
  for (int size = CPU_SETSIZE; size <= (1 << 18); size *= 4) {  // larger machines need larger sets
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(size));
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(size));
    CPU_ZERO_S(bytes, set);
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    for (int core = 0; known && core < size; ++core) {
      if (CPU_ISSET_S(static_cast<std::size_t>(core), bytes, set)) cores.push_back(core);
    }
    CPU_FREE(set);
    if (known) break;
  }
  if (cores.empty()) cores.push_back(0);
  return cores;
}

}  // namespace

int Processors::usable() const {
  const int count = std::max(1, static_cast<int>(cores.size()));
  if (!quota || *quota >= count) return count;
  // Rounded down, because a rank that busy-waits for another one must not be throttled. A hundredth
  // is added for quotas such as 199 %.
  return std::max(1, static_cast<int>(std::floor(*quota + 0.01)));
}

std::vector<int> Processors::to_pin() const {
  return {cores.begin(), cores.begin() + std::min<std::ptrdiff_t>(usable(), std::ssize(cores))};
}

std::optional<double> cpu_quota(const fs::path& root) {
  std::optional<double> result;
  for (const std::string& line : lines_of(root / "proc/self/mountinfo")) {
    auto hierarchy = hierarchy_of(line);
    if (!hierarchy) continue;
    const auto group = group_of(hierarchy->version, root);
    if (!group) continue;
    hierarchy->group = *group;
    const fs::path mount = root / fs::path(hierarchy->mount).relative_path();
    for (fs::path below = below_mount(*hierarchy);; below = below.parent_path()) {
      result = least(result, quota_in(mount / below, hierarchy->version));
      if (below.empty()) break;
    }
  }
  return result;
}

std::vector<int> physical_cores_first(std::vector<int> cores, const fs::path& root) {
  std::set<std::string> seen;  // lists of hyper-threads of one physical core, such as "3,67"
  std::set<int> second;
  for (const int core : cores) {
    const auto siblings = lines_of(root / fmt::format("sys/devices/system/cpu/cpu{}", core) /
                                   "topology/thread_siblings_list");
    if (!siblings.empty() && !seen.insert(siblings[0]).second) second.insert(core);
  }
  std::ranges::stable_partition(cores, [&](int core) { return !second.contains(core); });
  return cores;
}

Processors usable_processors() {
  return {.cores = physical_cores_first(affinity()), .quota = cpu_quota()};
}

}  // namespace dynmo::process
