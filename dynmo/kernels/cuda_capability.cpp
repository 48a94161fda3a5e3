// SPDX-License-Identifier: Apache-2.0
// libtorch's own interface for the capability needs the headers of CUDA.
#include <dlfcn.h>

#include "dynmo/kernels/operator_kernels.h"

namespace dynmo::kernels {
namespace {

// cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR.
constexpr int kMajorOfCapability = 75;

using GetDevice = int(int* device, int ordinal);
using GetAttribute = int(int* value, int attribute, int device);

}  // namespace

int cuda_capability(at::Device device) {
  if (!device.is_cuda()) return 0;
  static void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return 0;
  static auto* const get_device = reinterpret_cast<GetDevice*>(::dlsym(driver, "cuDeviceGet"));
  static auto* const get_attribute =
      reinterpret_cast<GetAttribute*>(::dlsym(driver, "cuDeviceGetAttribute"));
  int id = 0;
  int major = 0;
  const bool told = get_device != nullptr && get_attribute != nullptr &&
                    get_device(&id, device.index()) == 0 &&
                    get_attribute(&major, kMajorOfCapability, id) == 0;
  return told ? major : 0;
}

}  // namespace dynmo::kernels
