// SPDX-License-Identifier: Apache-2.0
#pragma once

// The table of devices that run.device may name. One row holds everything that a run knows about a
// kind. All other code works with libtorch's device, stream and event interfaces. A program, such
// as a test, may add a kind.

#include <c10/core/Device.h>

#include <string_view>

#include "dynmo/c10d/determinism.h"
#include "dynmo/c10d/nccl_transport.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"

namespace dynmo::c10d {

struct DeviceKind {
  std::string_view name;  // of run.device
  at::DeviceType type = at::kCPU;
  // Loads the libraries of the kind and checks that there is a device. Returns their number, at
  // least 1, or kBadInput with what to do. Any thread may call it, any number of times.
  Expected<int> (*load)() = nullptr;
  // Like load(). Also makes the rank's device the current one of the calling thread, and returns
  // it. `local_rank` is the rank's number on this host. Calls set_determinism().
  Expected<at::Device> (*open)(int local_rank, Determinism determinism) = nullptr;
  // Returns the total memory of an open device. Null if it is not known.
  Bytes (*memory)(at::Device device) = nullptr;
  // Connects channels for bytes in the memory of devices. Null if all bytes pass through host
  // memory.
  Expected<NcclTransport> (*connect)(Group& group, const GroupOptions& options,
                                     at::Device device) = nullptr;
};

// Frees the memory that the device's allocator caches, if it caches any. A new generation has
// layers of other sizes, and other ranks may share the device.
void free_cached_memory(at::Device device);

// Returns the kind with this name, one of device_names().
[[nodiscard]] DeviceKind device_kind(std::string_view name);

// Adds a kind, whose name must live as long as the program. Call it before a config names it.
void add_device_kind(const DeviceKind& kind);

}  // namespace dynmo::c10d
