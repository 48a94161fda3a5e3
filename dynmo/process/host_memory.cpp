// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/host_memory.h"

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

// The sum of lines such as "MemTotal:  16384 kB" (proc(5)).
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

}  // namespace dynmo::process
