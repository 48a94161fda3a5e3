// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/resident_memory.h"

#include <unistd.h>

#include <fstream>

namespace dynmo::observe {

Bytes resident_memory() {
  // statm holds pages: size, resident, ... (proc(5)).
  std::ifstream file("/proc/self/statm");
  std::int64_t size = 0;
  std::int64_t resident = 0;
  if (!(file >> size >> resident)) return Bytes{0};
  return Bytes{resident * ::sysconf(_SC_PAGESIZE)};
}

}  // namespace dynmo::observe
