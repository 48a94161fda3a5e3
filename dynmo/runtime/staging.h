// SPDX-License-Identifier: Apache-2.0
#pragma once

// Between tensors on a device and transports that move bytes of host memory: the one place that
// knows how tensors get from one to the other. For tensors in host memory everything here is the
// identity and costs nothing.
//
// A device works off what it is given in order, later than the host gives it. So bytes on their way
// out are waited for (the copy is complete when to_host returns), while bytes on their way in are
// handed to the device in order and not waited for: libtorch keeps pinned memory until the device
// has read it.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "dynmo/model/layer.h"

namespace dynmo::runtime {

// Where the tensors of a rank are, as the transports of host memory see it.
struct Staging {
  enum class Copies {
    kWhereNeeded,
    kAlways,  // of tensors in host memory, too: so that the copies are tested without a device
  };
  at::Device device = at::kCPU;
  Copies copies = Copies::kWhereNeeded;

  [[nodiscard]] bool needed() const { return !device.is_cpu() || copies == Copies::kAlways; }

  // `tensor`'s numbers in host memory, contiguous and complete: itself, or a copy in memory that
  // the device reads and writes by itself (pinned). Undefined stays so.
  [[nodiscard]] at::Tensor to_host(const at::Tensor& tensor) const;
  // Host memory for a transport to fill for to_device.
  [[nodiscard]] at::Tensor host_buffer(at::IntArrayRef shape, at::ScalarType type) const;
  // Returns the data that arrived in `host`, for the device to work with: itself, or a copy on the
  // device.
  [[nodiscard]] at::Tensor to_device(const at::Tensor& host) const;
  // The same into a tensor that is there: nothing where `host` is to_host(tensor) and no copy.
  void put(const at::Tensor& host, const at::Tensor& tensor) const;

  // Copies all tensors of a layer.
  [[nodiscard]] model::LayerState to_host(const model::LayerState& state) const;
  [[nodiscard]] model::LayerState to_device(const model::LayerState& state) const;
};

}  // namespace dynmo::runtime
