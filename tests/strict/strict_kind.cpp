// SPDX-License-Identifier: Apache-2.0
// Adds the strict device to the kinds of a program before its main begins: `run.device = strict`.
#include <cstdlib>

#include "dynmo/c10d/device_kinds.h"
#include "dynmo/cost/cluster.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::strict {
namespace {

Expected<int> load_this() {
  open();
  return kDevices;
}

Expected<at::Device> open_this(int local_rank) { return open(local_rank); }

// DYNMO_STRICT_MEMORY: that of each device, in bytes.
Bytes memory_of_this(at::Device) {
  const char* const bytes = std::getenv("DYNMO_STRICT_MEMORY");
  return bytes == nullptr ? cost::kUnlimitedMemory : Bytes{std::atoll(bytes)};
}

const bool kAdded = [] {
  c10d::add_device_kind({.name = "strict",
                         .type = at::kPrivateUse1,
                         .load = &load_this,
                         .open = &open_this,
                         .memory = &memory_of_this});
  return true;
}();

}  // namespace
}  // namespace dynmo::strict
