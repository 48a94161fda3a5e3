// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/device_names.h"

#include <algorithm>
#include <mutex>

namespace dynmo {
namespace {

struct KnownDevices {
  std::mutex mutex;
  std::vector<std::string_view> names = {"cuda"};
};

KnownDevices& known_devices() {
  static KnownDevices known;
  return known;
}

}  // namespace

std::vector<std::string_view> device_names() {
  KnownDevices& known = known_devices();
  const std::lock_guard lock(known.mutex);
  return known.names;
}

bool is_device_name(std::string_view name) {
  const std::vector<std::string_view> names = device_names();
  return std::ranges::find(names, name) != names.end();
}

void add_device_name(std::string_view name) {
  KnownDevices& known = known_devices();
  const std::lock_guard lock(known.mutex);
  known.names.push_back(name);
}

}  // namespace dynmo
