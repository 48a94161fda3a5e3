// SPDX-License-Identifier: Apache-2.0
#pragma once

// How many bytes layers hold, and a meter of what libtorch allocates.

#include <c10/core/DeviceType.h>

#include <memory>

#include "dynmo/core/units.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

// fp32 values of a layer; its gradients take as much, its AdamW moments twice as much.
[[nodiscard]] Bytes parameter_bytes(const Layer& layer);

// The rounded copies of the same (Parameter::rounded): half as much in bf16, else 0.
[[nodiscard]] Bytes copy_bytes(const Layer& layer);

// Returns the bytes of a layer's buffers (Layer::buffers()), frozen or not.
[[nodiscard]] Bytes buffer_bytes(const Layer& layer);

// Counts what libtorch's allocator of one kind of device gives to and takes back from the thread
// that made it, while it lives. Not to be nested with libtorch's profiler, whose place it takes.
// Use on one thread.
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
