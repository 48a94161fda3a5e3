// SPDX-License-Identifier: Apache-2.0
#pragma once

// A device for tests that is stricter than a GPU. It computes on the CPU with the CPU's kernels,
// but:
//
// - The host cannot touch its memory. A read or write ends the process with kTouched and a stack.
// - Memory is NaN until an operator writes it, and after it is freed.
// - Streams and the host have vector clocks. A use that no event, wait or launch orders is an error
//   with the operator's name, each time.
// - Pinned memory cannot be read until the host has waited for the copy into it. It cannot be
//   written until the host has waited for the copy out of it.
// - It refuses operators that CUDA does not have.
// - It counts the host's waits, and refuses them in a NoWait scope.
//
// It cannot show rounding, limits, memory or speed of a GPU. All host threads have one clock: a
// missing order between two threads is not found. A forked child shares the memory.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>

namespace dynmo::strict {

// Exit code of a process that touched memory it must not touch.
constexpr int kTouched = 86;
constexpr int kDevices = 2;

// Registers the device with libtorch at the first call, and makes device `local_rank` modulo
// kDevices the calling thread's. Any thread may call it.
at::Device open(int local_rank = 0);

// Operators run when they are called, or not before a wait needs them. In the late mode an early
// read of a result finds NaN or protected memory.
enum class Mode { kAtOnce, kLate };

// Sets the mode of all threads. The device must be idle. The first mode is kAtOnce, or kLate if the
// environment has DYNMO_STRICT_DEVICE=late.
void set_mode(Mode mode);
[[nodiscard]] Mode mode();
// Returns how many operators the device has yet to run.
[[nodiscard]] std::int64_t queued();

// Returns the waits of all threads since the last call, by what waited: an operator, or a wait for
// an event, a stream or the device.
std::map<std::string, std::int64_t> take_waits();

// Returns the operators that have run on the device in this process.
[[nodiscard]] std::set<std::string> operators_used();

// Queues `work` as an operator that reads some tensors and writes others. `what` lives as long as
// the program. The work finds a tensor's elements at address_of().
void launch(at::Device device, const char* what, std::span<const at::Tensor> read,
            std::span<const at::Tensor> written, std::function<void()> work);
[[nodiscard]] void* address_of(const at::Tensor& tensor);

// Returns how often memory that the device keeps for later was given back.
[[nodiscard]] std::int64_t caches_emptied();

// Refuses waits of this thread while it lives: an operator or a wait throws.
class NoWait {
 public:
  NoWait();
  ~NoWait();
  NoWait(const NoWait&) = delete;
  NoWait& operator=(const NoWait&) = delete;
};

}  // namespace dynmo::strict
