// SPDX-License-Identifier: Apache-2.0
#pragma once

// Copies tensors between a device and transports that move bytes of host memory. No other code
// knows how. For tensors in host memory everything here is the identity and costs nothing.
//
// A device works off its queue later than the host fills it, in order. So outgoing bytes are waited
// for: the copy is complete when to_host() returns. Incoming bytes are queued for the device and
// not waited for. libtorch keeps pinned memory until the device has read it.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <memory>

#include "dynmo/model/layer.h"

namespace dynmo::runtime {

class SideCopies;

// The place of a rank's tensors, and their copies in host memory for transports.
struct Staging {
  enum class Copies {
    kWhereNeeded,
    // Also copies tensors in host memory, so that the copies are tested without a device.
    kAlways,
  };
  at::Device device = at::kCPU;
  Copies copies = Copies::kWhereNeeded;
  // The rank's copies beside its computation (side_copies.h). Null without a device. A pipeline on
  // a device makes it if it is null.
  std::shared_ptr<SideCopies> beside = {};

  [[nodiscard]] bool needed() const { return !device.is_cpu() || copies == Copies::kAlways; }

  // Returns `tensor`'s numbers in host memory, contiguous and complete. The result is the tensor
  // itself, or a copy in memory that the device accesses directly (pinned). Undefined stays
  // undefined.
  [[nodiscard]] at::Tensor to_host(const at::Tensor& tensor) const;
  // Like to_host(), but does not wait: the copy is complete when the host has waited for the
  // device.
  [[nodiscard]] at::Tensor to_host_later(const at::Tensor& tensor) const;
  // Waits for all copies of to_host_later() by this thread.
  void wait() const;
  // Returns host memory that a transport fills for to_device().
  [[nodiscard]] at::Tensor host_buffer(at::IntArrayRef shape, at::ScalarType type) const;
  // Returns the tensor of the device for data that arrived in `host`: the same tensor, or a copy on
  // the device.
  [[nodiscard]] at::Tensor to_device(const at::Tensor& host) const;
  // Like to_device(), into an existing tensor. Does nothing if to_host() makes no copies.
  void put(const at::Tensor& host, const at::Tensor& tensor) const;

  // Copies all tensors of a layer, with one wait.
  [[nodiscard]] model::LayerState to_host(const model::LayerState& state) const;
  [[nodiscard]] model::LayerState to_device(const model::LayerState& state) const;
};

}  // namespace dynmo::runtime
