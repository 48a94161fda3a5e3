// SPDX-License-Identifier: Apache-2.0
#pragma once

// The three functions of the library libdynmo_nccl.so (nccl/nccl.cpp). It is built if the headers
// of CUDA and NCCL are found, and loaded only with libtorch_cuda.so. Everything else about NCCL is
// in the program (nccl_transport.cpp) and uses c10d's own interface.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dynmo::c10d {

// Arguments for the group of two ranks that meet in `store`. ConnectNccl returns when the group is
// connected. It throws what c10d throws.
struct NcclPair {
  c10::intrusive_ptr<::c10d::Store> store;
  int rank = 0;
  at::Device device;
  std::chrono::milliseconds timeout;
};
using ConnectNccl = void(const NcclPair& pair, c10::intrusive_ptr<::c10d::Backend>& group);
inline constexpr const char* kConnectNccl = "dynmo_connect_nccl";

// Sets `name` to the address of a device on the buses of its host, or to "" if CUDA does not know
// it. All processes get the same address, however they number devices.
using NameCudaDevice = void(at::Device device, std::string& name);
inline constexpr const char* kNameCudaDevice = "dynmo_name_cuda_device";

// Returns the version of the NCCL that is loaded, as ncclGetVersion has it, or 0.
using NcclVersion = int();
inline constexpr const char* kNcclVersion = "dynmo_nccl_version";

}  // namespace dynmo::c10d
