// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/host_memory.h"

#include <unistd.h>

#include <fstream>
#include <string>

namespace dynmo::process {

Bytes resident_memory() {
  // statm holds pages: size, resident, ... (proc(5)).
  std::ifstream file("/proc/self/statm");
  std::int64_t size = 0;
  std::int64_t resident = 0;
  if (!(file >> size >> resident)) return Bytes{0};
  return Bytes{resident * ::sysconf(_SC_PAGESIZE)};
}

Bytes host_memory() {
  // Lines such as "MemTotal:  16384 kB" (proc(5)).
  std::ifstream file("/proc/meminfo");
  std::string word;
  std::int64_t kibibytes = 0;
  Bytes total;
  while (file >> word) {
    if ((word == "MemTotal:" || word == "SwapTotal:") && file >> kibibytes) {
      total += Bytes{1024 * kibibytes};
    }
  }
  return total;
}

}  // namespace dynmo::process
