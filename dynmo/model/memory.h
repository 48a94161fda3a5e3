// SPDX-License-Identifier: Apache-2.0
#pragma once

// Computes the bytes that layers hold, and meters what libtorch allocates.

#include <c10/core/Device.h>

#include <memory>

#include "dynmo/core/units.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

// Returns the bytes of a layer's fp32 values. Its gradients take the same, its AdamW moments twice
// that.
[[nodiscard]] Bytes parameter_bytes(const Layer& layer);

// Returns the bytes of the copy of its weights that a layer keeps in its compute type, or 0 if it
// computes in fp32.
[[nodiscard]] Bytes copy_bytes(const Layer& layer);

// Returns the bytes of a layer's buffers (Layer::buffers()), frozen or not.
[[nodiscard]] Bytes buffer_bytes(const Layer& layer);

// Returns the most bytes that tensors have taken so far on a device, by libtorch's allocator of
// this process. Returns 0 for the CPU, or if the allocator does not tell.
[[nodiscard]] Bytes peak_device_memory(at::Device device);

// Counts what libtorch's allocator gives to and takes back from the thread that made the meter, for
// one kind of device. A meter takes the place of libtorch's profiler while it exists, so never use
// both at once. One thread uses it.
class AllocationMeter {
 public:
  explicit AllocationMeter(c10::DeviceType device = c10::DeviceType::CPU);
  ~AllocationMeter();
  AllocationMeter(const AllocationMeter&) = delete;
  AllocationMeter& operator=(const AllocationMeter&) = delete;
  [[nodiscard]] Bytes held() const;  // allocated less freed since construction
  [[nodiscard]] Bytes peak() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dynmo::model
