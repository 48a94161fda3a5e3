// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/staging.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace dynmo::runtime {
namespace {

template <typename Change>
model::LayerState changed(model::LayerState state, Change change) {
  for (model::Parameter& parameter : state.parameters) {
    for (at::Tensor* tensor :
         {&parameter.value, &parameter.gradient, &parameter.first_moment, &parameter.second_moment,
          &parameter.compute_copy, &parameter.mask}) {
      if (tensor->defined()) *tensor = change(*tensor);
    }
  }
  for (model::Buffer& buffer : state.buffers) {
    buffer.value = buffer.on_host ? buffer.value.clone() : change(buffer.value);
  }
  return state;
}

}  // namespace

at::Tensor Staging::host_buffer(at::IntArrayRef shape, at::ScalarType type) const {
  return at::empty(shape, at::TensorOptions().dtype(type).pinned_memory(!device.is_cpu()));
}

at::Tensor Staging::to_host(const at::Tensor& tensor) const {
  if (!needed() || !tensor.defined()) return tensor;
  at::Tensor host = host_buffer(tensor.sizes(), tensor.scalar_type());
  return host.copy_(tensor);
}

at::Tensor Staging::to_host_later(const at::Tensor& tensor) const {
  if (!needed() || !tensor.defined()) return tensor;
  return host_buffer(tensor.sizes(), tensor.scalar_type()).copy_(tensor, /*non_blocking=*/true);
}

void Staging::wait() const {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
}

at::Tensor Staging::to_device(const at::Tensor& host) const {
  if (!needed() || !host.defined()) return host;
  return host.to(device, /*non_blocking=*/true, /*copy=*/true);
}

void Staging::put(const at::Tensor& host, const at::Tensor& tensor) const {
  if (needed() && tensor.defined()) tensor.copy_(host, /*non_blocking=*/true);
}

model::LayerState Staging::to_host(const model::LayerState& state) const {
  if (!needed()) return state;
  model::LayerState host =
      changed(state, [this](const at::Tensor& tensor) { return to_host_later(tensor); });
  wait();
  return host;
}

model::LayerState Staging::to_device(const model::LayerState& state) const {
  if (!needed()) return state;
  return changed(state, [this](const at::Tensor& tensor) { return to_device(tensor); });
}

}  // namespace dynmo::runtime
