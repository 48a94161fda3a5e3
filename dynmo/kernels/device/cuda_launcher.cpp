// SPDX-License-Identifier: Apache-2.0
// Declares the driver's functions itself, so that a build needs no header of CUDA.

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <limits>
#include <map>
#include <mutex>
#include <string_view>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/kernels/device/launcher.h"
#include "dynmo/kernels/device/nvrtc.h"

namespace dynmo::kernels::device {
namespace {

// The functions of cuda.h. Each returns 0 or the number of an error.
struct Driver {
  int (*device)(int* device, int ordinal) = nullptr;
  int (*current)(void** context) = nullptr;
  int (*retain)(void** context, int device) = nullptr;
  int (*make_current)(void* context) = nullptr;
  int (*load)(void** module, const void* image) = nullptr;
  int (*function)(void** function, void* module, const char* name) = nullptr;
  int (*launch)(void* function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared_bytes,
                void* stream, void** arguments, void** extra) = nullptr;
  bool whole = false;
};

const Driver& driver() {
  static const Driver loaded = [] {
    Driver found;
    void* const library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return found;
    const auto find = [library](const char* name, auto*& function) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      return function != nullptr;
    };
    found.whole =
        find("cuDeviceGet", found.device) && find("cuCtxGetCurrent", found.current) &&
        find("cuDevicePrimaryCtxRetain", found.retain) &&
        find("cuCtxSetCurrent", found.make_current) && find("cuModuleLoadData", found.load) &&
        find("cuModuleGetFunction", found.function) && find("cuLaunchKernel", found.launch);
    return found;
  }();
  return loaded;
}

// Ensures that the calling thread has a current context. If it has none, takes the device's, which
// libtorch's operators use, too.
bool enter(at::Device device) {
  void* context = nullptr;
  if (driver().current(&context) == 0 && context != nullptr) return true;
  int id = 0;
  return driver().device(&id, device.index()) == 0 && driver().retain(&context, id) == 0 &&
         driver().make_current(context) == 0;
}

// The kernels of one device. They are never unloaded.
struct Loaded {
  std::string why_not;
  void* module = nullptr;
  std::map<std::string_view, void*> functions;
};

struct Table {
  std::mutex mutex;
  std::map<at::DeviceIndex, Loaded> devices;
};

Table& loaded_kernels() {
  static Table table;
  return table;
}

std::filesystem::path folder_of_libtorch() {
  Dl_info info{};
  const bool found = ::dladdr(reinterpret_cast<const void*>(&at::get_num_threads), &info) != 0;
  return found && info.dli_fname != nullptr ? std::filesystem::path(info.dli_fname).parent_path()
                                            : std::filesystem::path();
}

Loaded load(at::Device device) {
  Loaded loaded;
  const std::string architecture = cuda_architecture(device);
  if (!driver().whole || architecture.empty() || !enter(device)) {
    loaded.why_not = "no CUDA driver";
    return loaded;
  }
  const auto cubin =
      kept_kernels(nvrtc_libraries(folder_of_libtorch()), architecture, cache_folder() / "kernels");
  if (!cubin) {
    loaded.why_not = cubin.error().message;
    return loaded;
  }
  if (const int result = driver().load(&loaded.module, cubin->data())) {
    loaded.why_not = fmt::format("the driver refuses them, error {}", result);
  }
  return loaded;
}

// Returns the kernels of a device. Requires the lock.
Loaded& kernels_of(at::Device device) {
  Table& table = loaded_kernels();
  const auto found = table.devices.find(device.index());
  if (found != table.devices.end()) return found->second;
  return table.devices.emplace(device.index(), load(device)).first->second;
}

std::string why_not(at::Device device) {
  const std::lock_guard lock(loaded_kernels().mutex);
  return kernels_of(device).why_not;
}

void* function_of(const Call& call) {
  const std::lock_guard lock(loaded_kernels().mutex);
  Loaded& kernels = kernels_of(call.device);
  DYNMO_CHECK(kernels.why_not.empty(), "kernels of {}: {}", call.device.str(), kernels.why_not);
  const auto [found, fresh] = kernels.functions.try_emplace(call.kernel);
  if (fresh) {
    const int result = driver().function(&found->second, kernels.module, call.kernel);
    DYNMO_CHECK(result == 0, "a kernel of kernels.cu, got {}: error {}", call.kernel, result);
  }
  return found->second;
}

void launch_on_cuda(const Call& call) {
  DYNMO_CHECK(call.blocks <= std::numeric_limits<std::int32_t>::max(), "{} with {} blocks",
              call.kernel, call.blocks);
  void* const function = function_of(call);
  DYNMO_CHECK(enter(call.device), "a context of {}", call.device.str());
  Packed arguments = packed(call, [](const Operand& operand) -> void* {
    return operand.written ? operand.tensor.mutable_data_ptr()
                           : const_cast<void*>(operand.tensor.const_data_ptr());
  });
  const c10::Stream stream = c10::impl::VirtualGuardImpl(call.device.type()).getStream(call.device);
  const int result =
      driver().launch(function, static_cast<unsigned>(call.blocks), 1, 1, kThreads, 1, 1, 0,
                      stream.native_handle(), arguments.pointers.data(), nullptr);
  DYNMO_CHECK(result == 0, "{} of {} with {} blocks: error {} of the driver", call.kernel,
              call.device.str(), call.blocks, result);
}

}  // namespace

Launcher cuda_launcher() { return {.why_not = &why_not, .launch = &launch_on_cuda}; }

}  // namespace dynmo::kernels::device
