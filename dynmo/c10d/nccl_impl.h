// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two functions of the library libdynmo_nccl.so (nccl/nccl.cpp), which is built where the
// headers of CUDA and NCCL are found and loaded only beside libtorch_cuda.so. Everything else about
// NCCL is in the program (nccl_transport.cpp) and goes through c10d's own interface.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dynmo::c10d {

// A group of two ranks that meet in `store`, connected when it returns. Throws what c10d throws.
struct NcclPair {
  c10::intrusive_ptr<::c10d::Store> store;
  int rank = 0;
  at::Device device;
  std::chrono::milliseconds timeout;
};
using ConnectNccl = void(const NcclPair& pair, c10::intrusive_ptr<::c10d::Backend>& group);
inline constexpr const char* kConnectNccl = "dynmo_connect_nccl";

// The address of a device on the buses of its host, which is the same for all processes however
// they number the devices; "" if CUDA does not tell.
using NameCudaDevice = void(at::Device device, std::string& name);
inline constexpr const char* kNameCudaDevice = "dynmo_name_cuda_device";

}  // namespace dynmo::c10d
