// SPDX-License-Identifier: Apache-2.0
#pragma once

// Launches the kernels of kernels.cu. Each type of device has a launcher. CUDA's launcher compiles
// the kernels (nvrtc.h). Tests have a launcher that runs them on the CPU.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "dynmo/kernels/device/adamw_factors.h"

namespace dynmo::kernels::device {

constexpr int kThreads = 256;  // per block of every kernel

// A tensor that a kernel reads, or also writes. An undefined tensor is passed as a null pointer.
struct Operand {
  at::Tensor tensor;
  bool written = false;
};

using Argument =
    std::variant<Operand, std::int64_t, std::uint64_t, int, std::uint32_t, float, AdamWFactors>;

struct Call {
  const char* kernel = "";  // a name of kernels.cu, with static storage
  at::Device device = at::kCPU;
  std::int64_t blocks = 1;
  std::vector<Argument> arguments = {};  // in the kernel's order and types
};

// The arguments of a call in memory, as cuLaunchKernel takes them.
struct Packed {
  std::vector<void*> addresses;  // of the operands
  std::vector<void*> pointers;   // to the value of each argument
};
// Packs the arguments. `address_of` returns the address of a tensor's elements for the kernel. The
// result refers to `call`.
[[nodiscard]] Packed packed(const Call& call,
                            const std::function<void*(const Operand&)>& address_of);

struct Launcher {
  // Returns why kernels cannot run on a device, for the user; "" if they can. The first call for a
  // device may compile them. Any thread may call it.
  std::string (*why_not)(at::Device device) = nullptr;
  // Queues the kernel in the device's current stream. Throws CheckFailure if the device refuses it.
  void (*launch)(const Call& call) = nullptr;
};

// Returns the launcher of CUDA devices. It uses the driver that libtorch has loaded. It loads the
// kernels once for each device, and compiles them if the cache folder (core/files.h) has none for
// it.
[[nodiscard]] Launcher cuda_launcher();

// Sets the launcher of a type of device. Call it before the first kernel.
void set_launcher(at::DeviceType type, const Launcher& launcher);

// Sets whether kernels are used on devices that have them. The default is true.
void use_kernels(bool used);

// Returns why a device has no kernels, for the user; "" if it has. The CPU has none: it uses loops
// (loops.h).
[[nodiscard]] std::string why_no_kernels(at::Device device);

// Queues a kernel through its device's launcher. Throws CheckFailure if there is none.
void launch(const Call& call);

// Returns the major number of the device's compute capability: 9 for an H100. Asks the driver that
// libtorch has loaded. Returns 0 if there is none, or for another kind of device.
[[nodiscard]] int cuda_capability(at::Device device);

// Returns the whole capability as compilers name it: "sm_90". Returns "" where cuda_capability()
// returns 0.
[[nodiscard]] std::string cuda_architecture(at::Device device);

}  // namespace dynmo::kernels::device
