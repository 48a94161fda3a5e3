// SPDX-License-Identifier: Apache-2.0
// The only source of libdynmo_nccl.so. It needs the headers of CUDA and NCCL.
#include <cuda_runtime_api.h>

#include <array>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "dynmo/c10d/nccl_impl.h"

extern "C" {

// Results are references, because a C interface cannot return a class.
dynmo::c10d::ConnectNccl dynmo_connect_nccl;
dynmo::c10d::NameCudaDevice dynmo_name_cuda_device;
dynmo::c10d::NcclVersion dynmo_nccl_version;

void dynmo_connect_nccl(const dynmo::c10d::NcclPair& pair,
                        c10::intrusive_ptr<::c10d::Backend>& group) {
  // Our control plane handles lost ranks. c10d's watchdog would end the process, and its monitor
  // would watch the watchdog.
  [[maybe_unused]] static const bool once = [] {
    ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/1);
    ::setenv("TORCH_NCCL_ENABLE_MONITORING", "0", /*overwrite=*/1);
    return true;
  }();
  auto options = ::c10d::ProcessGroupNCCL::Options::create();
  options->timeout = pair.timeout;
  auto made = c10::make_intrusive<::c10d::ProcessGroupNCCL>(pair.store, pair.rank, 2, options);
  // Connects now, because at first use each rank would make its communicators in the order of its
  // own schedule. All sends and receives use this communicator.
  made->eagerConnectSingleDevice(pair.device);
  group = std::move(made);
}

void dynmo_name_cuda_device(at::Device device, std::string& name) {
  std::array<char, 32> text{};
  const bool told = cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()),
                                          device.index()) == cudaSuccess;
  name = told ? text.data() : "";
}

int dynmo_nccl_version() {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess ? version : 0;
}

}  // extern "C"
