// SPDX-License-Identifier: Apache-2.0
#include "dynmo/c10d/cuda.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "dynmo/core/check.h"

namespace dynmo::c10d {
namespace {

// Returns the folder of the libtorch that this program uses.
std::filesystem::path libtorch_folder() {
  Dl_info info{};
  const bool found = ::dladdr(reinterpret_cast<const void*>(&at::get_num_threads), &info) != 0;
  DYNMO_CHECK(found && info.dli_fname != nullptr, "a place where libtorch_cpu.so is");
  return std::filesystem::path(info.dli_fname).parent_path();
}

}  // namespace

Expected<int> load_cuda() { return load_cuda(libtorch_folder()); }

Expected<int> load_cuda(const std::filesystem::path& folder) {
  if (!c10::impl::hasDeviceGuardImpl(at::kCUDA)) {
    const std::filesystem::path library = folder / "libtorch_cuda.so";
    std::error_code fault;
    if (!std::filesystem::exists(library, fault)) {
      return make_error(ErrorCode::kBadInput,
                        "run.device = cuda: '{}' does not exist, this PyTorch is one for the CPU: "
                        "build with -DDYNMO_TORCH_DIR of one for CUDA, or set run.device = cpu",
                        library.string());
    }
    // cuBLAS gives the same bits each time only with a workspace of fixed size. It reads this
    // variable when it starts.
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    // Global, because libtorch_cpu calls functions that it registers.
    if (::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      return make_error(ErrorCode::kBadInput,
                        "run.device = cuda: PyTorch's library for CUDA cannot be loaded ({}): the "
                        "small PyTorch of `make setup` computes on the CPU only; install all of "
                        "torch=={}, build with -DDYNMO_TORCH_DIR=.../site-packages/torch, or set "
                        "run.device = cpu",
                        ::dlerror(), TORCH_VERSION);
    }
  }
  const int devices = c10::impl::hasDeviceGuardImpl(at::kCUDA)
                          ? c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount()
                          : 0;
  if (devices > 0) return devices;
  return make_error(ErrorCode::kBadInput,
                    "run.device = cuda: no CUDA device here, or no driver for it: wanted one that "
                    "nvidia-smi lists and CUDA_VISIBLE_DEVICES does not hide; or set "
                    "run.device = cpu");
}

Expected<at::Device> open_cuda(int local_rank, Determinism determinism) {
  DYNMO_ASSIGN(const int devices, load_cuda());
  DYNMO_CHECK(at::hasCUDA(), "CUDA loaded before libtorch looked for it");
  set_determinism(determinism);
  const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(local_rank % devices));
  c10::impl::getDeviceGuardImpl(at::kCUDA)->setDevice(device);
  return device;
}

Bytes cuda_memory(at::Device device) {
  const auto [free, total] = at::getDeviceAllocator(at::kCUDA)->getMemoryInfo(device.index());
  return Bytes{static_cast<std::int64_t>(total)};
}

}  // namespace dynmo::c10d
