// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls of the kernels of kernels.cu. Each type of device has a launcher. That of CUDA compiles the
// kernels (nvrtc.h), and that of tests runs them on the CPU.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

namespace dynmo::kernels::device {

// Threads of a block, for all kernels.
constexpr int kThreads = 256;

// A tensor that a kernel reads, or also writes. An undefined one is a null pointer.
struct Operand {
  at::Tensor tensor;
  bool written = false;
};

// The struct AdamW of kernels.cu.
struct AdamWFactors {
  float gradient = 1;  // of clipping
  float first = 0;
  float second = 0;
  float second_kept = 0;
  float rate = 0;  // bias correction of the first moment included
  float deviation = 1;
  float epsilon = 0;
  float kept = 1;  // after weight decay
};

using Argument =
    std::variant<Operand, std::int64_t, std::uint64_t, int, std::uint32_t, float, AdamWFactors>;

struct Call {
  const char* kernel = "";  // a name of kernels.cu, which lives as long as the program
  at::Device device = at::kCPU;
  std::int64_t blocks = 1;
  std::vector<Argument> arguments = {};  // those of the kernel, with its types
};

// The arguments of a call in memory, as a launch takes them.
struct Packed {
  std::vector<void*> addresses;  // of the operands
  std::vector<void*> pointers;   // one an argument: where its value is
};
// Packs the arguments. `address_of` returns where the kernel finds a tensor's elements. The result
// refers to `call`.
[[nodiscard]] Packed packed(const Call& call,
                            const std::function<void*(const Operand&)>& address_of);

struct Launcher {
  // Returns why kernels cannot run on a device, for the user; "" if they can. The first call for a
  // device may compile them. Any thread may call it.
  std::string (*why_not)(at::Device device) = nullptr;
  // Queues the kernel in the device's current stream. Throws CheckFailure if the device refuses it.
  void (*launch)(const Call& call) = nullptr;
};

// Returns the launcher of CUDA devices, by the driver that libtorch has loaded. It compiles the
// kernels for the device at hand once a process, and keeps them in the cache folder (core/files.h).
[[nodiscard]] Launcher cuda_launcher();

// Sets the launcher of a type of device. Call it before the first kernel.
void set_launcher(at::DeviceType type, const Launcher& launcher);

// Says whether kernels are used where they can be. They are, before the first call.
void use_kernels(bool used);

// Returns why a device has no kernels, for the user; "" if it has. Tensors of the CPU have loops
// (loops.h).
[[nodiscard]] std::string why_no_kernels(at::Device device);

// Queues a kernel by the launcher of its device. Throws CheckFailure if there is none.
void launch(const Call& call);

// Returns the major number of the device's compute capability: 9 for an H100. Asks the driver that
// libtorch has loaded. Returns 0 if there is none, or for another kind of device.
[[nodiscard]] int cuda_capability(at::Device device);

// Returns the whole capability as compilers name it: "sm_90". Returns "" where cuda_capability()
// returns 0.
[[nodiscard]] std::string cuda_architecture(at::Device device);

}  // namespace dynmo::kernels::device
