// SPDX-License-Identifier: Apache-2.0
// Asks the driver, because libtorch's interface for the capability needs the headers of CUDA.
#include <dlfcn.h>
#include <fmt/format.h>

#include "dynmo/kernels/device/launcher.h"

namespace dynmo::kernels::device {
namespace {

// cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
constexpr int kMajorOfCapability = 75;
constexpr int kMinorOfCapability = 76;

using GetDevice = int(int* device, int ordinal);
using GetAttribute = int(int* value, int attribute, int device);

// Returns an attribute of a CUDA device. Returns 0 for another kind of device, or without a driver.
int attribute_of(at::Device device, int attribute) {
  if (!device.is_cuda()) return 0;
  static void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return 0;
  static auto* const get_device = reinterpret_cast<GetDevice*>(::dlsym(driver, "cuDeviceGet"));
  static auto* const get_attribute =
      reinterpret_cast<GetAttribute*>(::dlsym(driver, "cuDeviceGetAttribute"));
  int id = 0;
  int value = 0;
  const bool told = get_device != nullptr && get_attribute != nullptr &&
                    get_device(&id, device.index()) == 0 &&
                    get_attribute(&value, attribute, id) == 0;
  return told ? value : 0;
}

}  // namespace

int cuda_capability(at::Device device) { return attribute_of(device, kMajorOfCapability); }

std::string cuda_architecture(at::Device device) {
  const int major = cuda_capability(device);
  return major == 0 ? std::string()
                    : fmt::format("sm_{}{}", major, attribute_of(device, kMinorOfCapability));
}

}  // namespace dynmo::kernels::device
