// SPDX-License-Identifier: Apache-2.0
#include "dynmo/c10d/device_kinds.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "dynmo/c10d/cuda.h"
#include "dynmo/core/check.h"
#include "dynmo/core/device_names.h"

namespace dynmo::c10d {
namespace {

struct KindTable {
  std::mutex mutex;
  std::vector<DeviceKind> kinds = {{.name = "cuda",
                                    .type = at::kCUDA,
                                    .load = &load_cuda,
                                    .open = &open_cuda,
                                    .memory = &cuda_memory,
                                    .connect = &connect_nccl}};
};

KindTable& kind_table() {
  static KindTable table;
  return table;
}

}  // namespace

void free_cached_memory(at::Device device) {
  if (device.is_cpu()) return;
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator != nullptr && allocator->initialized()) allocator->emptyCache();
}

DeviceKind device_kind(std::string_view name) {
  KindTable& table = kind_table();
  const std::lock_guard lock(table.mutex);
  const auto found = std::ranges::find(table.kinds, name, &DeviceKind::name);
  DYNMO_CHECK(found != table.kinds.end(), "a kind of device, got '{}'", name);
  return *found;
}

void add_device_kind(const DeviceKind& kind) {
  DYNMO_CHECK(!is_device_name(kind.name) && kind.load != nullptr && kind.open != nullptr,
              "a new kind of device that can be opened, got '{}'", kind.name);
  KindTable& table = kind_table();
  {
    const std::lock_guard lock(table.mutex);
    table.kinds.push_back(kind);
  }
  add_device_name(kind.name);
}

}  // namespace dynmo::c10d
