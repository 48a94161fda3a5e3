// SPDX-License-Identifier: Apache-2.0
#pragma once

// The device on which tests of pipelines compute. It is the CPU, or what the library of the
// environment's DYNMO_TEST_DEVICE opens, so that the same program runs on another device.

#include <c10/core/Device.h>
#include <dlfcn.h>

#include <cstdlib>

#include "dynmo/core/check.h"

namespace dynmo::testing {

inline at::Device tested_device() {
  static const at::Device kDevice = []() -> at::Device {
    const char* const path = std::getenv("DYNMO_TEST_DEVICE");
    if (path == nullptr) return at::kCPU;
    void* const library = ::dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    DYNMO_CHECK(library != nullptr, "the library of a device, {}", ::dlerror());
    const auto open = reinterpret_cast<int (*)()>(::dlsym(library, "dynmo_open_tested_device"));
    DYNMO_CHECK(open != nullptr, "dynmo_open_tested_device in '{}'", path);
    return {at::kPrivateUse1, static_cast<at::DeviceIndex>(open())};
  }();
  return kDevice;
}

}  // namespace dynmo::testing
