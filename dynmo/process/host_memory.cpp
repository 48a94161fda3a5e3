// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/host_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <string>
#include <string_view>

namespace dynmo::process {

Bytes resident_memory() {
  // statm holds pages: size, resident, ... (proc(5)).
  std::ifstream file("/proc/self/statm");
  std::int64_t size = 0;
  std::int64_t resident = 0;
  if (!(file >> size >> resident)) return Bytes{0};
  return Bytes{resident * ::sysconf(_SC_PAGESIZE)};
}

namespace {

// Returns the sum of lines such as "MemTotal:  16384 kB" (proc(5)).
Bytes sum_of(std::initializer_list<std::string_view> names) {
  std::ifstream file("/proc/meminfo");
  std::string word;
  std::int64_t kibibytes = 0;
  Bytes total;
  while (file >> word) {
    if (std::ranges::find(names, word) != names.end() && file >> kibibytes) {
      total += Bytes{1024 * kibibytes};
    }
  }
  return total;
}

}  // namespace

Bytes host_memory() { return sum_of({"MemTotal:", "SwapTotal:"}); }

Bytes available_memory() { return sum_of({"MemAvailable:"}); }

Expected<void> allow_descriptors(int wanted, std::string_view whom) {
  rlimit limit{};
  const auto needed = static_cast<rlim_t>(wanted);
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return {};
  rlimit raised = limit;
  raised.rlim_cur = needed;
  if (needed <= limit.rlim_max && setrlimit(RLIMIT_NOFILE, &raised) == 0) return {};
  return make_error(ErrorCode::kBadInput,
                    "{} may have at most {} open files here, wanted {}: raise the limit, such as "
                    "'ulimit -n {}' as root, or use fewer ranks",
                    whom, limit.rlim_max, wanted, wanted);
}

}  // namespace dynmo::process
