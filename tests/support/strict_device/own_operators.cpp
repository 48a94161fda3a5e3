// SPDX-License-Identifier: Apache-2.0
// Operators of the strict device that allocate, copy, view and wait.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <utility>

#include "operators_impl.h"

namespace dynmo::strict {

using at::Tensor;

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

Tensor opened(const Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  if (tensor.storage().nbytes() == 0 || tensor.storage().data() == nullptr) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  return at::from_blob(address_of(tensor), tensor.sizes(), tensor.strides(), options);
}

Block* block_of(const Tensor& tensor) {
  return static_cast<Block*>(tensor.storage().data_ptr().get_context());
}

void* address_of(const Tensor& tensor) {
  return Machine::get().open(tensor.storage().data()) +
         tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
}

void launch(at::Device device, const char* what, std::span<const Tensor> read,
            std::span<const Tensor> written, std::function<void()> work) {
  const auto blocks_of = [device](std::span<const Tensor> tensors) {
    std::vector<Block*> blocks;
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(is_ours(tensor) && tensor.device() == device, "strict device: a kernel of ",
                  device, " got a tensor of ", tensor.device());
      if (tensor.numel() > 0) blocks.push_back(block_of(tensor));
    }
    return blocks;
  };
  last_operator() = what;
  Machine::get().launch(device.index(), what, blocks_of(read), blocks_of(written), std::move(work));
}

namespace {

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
             std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
             std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(at::kPrivateUse1, current_device())));
  return Tensor(at::detail::empty_generic(sizes, &device_allocator(),
                                          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(type), format));
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                     std::optional<at::ScalarType> type, std::optional<at::Layout> /*layout*/,
                     std::optional<at::Device> device, std::optional<bool> /*pinned*/) {
  const c10::DeviceGuard guard(device.value_or(at::Device(at::kPrivateUse1, current_device())));
  return Tensor(at::detail::empty_strided_generic(
      sizes, strides, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(type)));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef sizes,
                     std::optional<at::MemoryFormat> /*format*/) {
  const std::size_t wanted = at::detail::computeStorageNbytesContiguous(
      sizes, self.element_size(), static_cast<std::size_t>(self.storage_offset()));
  c10::StorageImpl* const storage = self.storage().unsafeGetStorageImpl();
  if (wanted > storage->nbytes()) {
    const Tensor old = storage->nbytes() > 0 ? self.clone() : Tensor();
    storage->set_data_ptr_noswap(Machine::get().allocate(wanted, self.device().index()));
    storage->set_nbytes(wanted);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    if (old.defined()) self.flatten().narrow(0, 0, old.numel()).copy_(old.flatten());
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Scalar item(const Tensor& self) {
  constexpr const char* kName = "aten::_local_scalar_dense";
  last_operator() = kName;
  Block* const block = block_of(self);
  Machine::get().launch(self.device().index(), kName, {&block, 1}, {}, [] {});
  Machine::get().wait_for_current_stream(self.device().index(), kName);
  return opened(self).item();
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  constexpr const char* kName = "aten::copy_";
  last_operator() = kName;
  if (self.numel() == 0) return self;
  Machine& machine = Machine::get();
  const bool in = is_ours(self);
  const bool out = is_ours(source);
  TORCH_CHECK(self.device().type() != at::kMeta && source.device().type() != at::kMeta,
              "strict device: copy_ with the meta device");
  const at::DeviceIndex device = (in ? self : source).device().index();
  const auto is_pinned = [&](const Tensor& tensor) {
    return !is_ours(tensor) && machine.is_pinned(tensor.storage().data());
  };
  const bool pinned_self = is_pinned(self);
  const bool pinned_source = is_pinned(source);
  // A GPU converts types and order on its own side: one copy of bytes, which may be early, remains.
  const bool waits = !(in && out) && !(non_blocking && (pinned_self || pinned_source));
  if (waits) machine.count_wait(kName);
  std::vector<Block*> read;
  std::vector<Block*> written;
  if (out) read.push_back(block_of(source));
  if (pinned_source) read.push_back(machine.block_at(source.storage().data()));
  if (in) written.push_back(block_of(self));
  if (pinned_self) written.push_back(machine.block_at(self.storage().data()));
  const at::AutoDispatchBelowADInplaceOrView below;
  machine.launch(
      device, kName, read, written,
      [to = in || pinned_self ? opened(self) : self,
       from = out || pinned_source ? opened(source) : source]() mutable { to.copy_(from); });
  if (waits) machine.finish(device);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy(target, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override { Machine::get().empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_context() == nullptr) return;
    Machine::get().name_as_user(data.get_context(), stream_number(stream));
  }
  // All bytes are of tensors: nothing is cached beside them.
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      bytes->front() = Machine::get().allocated(device);
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override { Machine::get().reset_allocated(device); }
  c10::DataPtr allocate(std::size_t bytes) override {
    return Machine::get().allocate(bytes, current_device());
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(Machine::get().open(to), Machine::get().open(from), bytes);
  }
};

}  // namespace

c10::Allocator& device_allocator() {
  static DeviceAllocator allocator;
  return allocator;
}

void register_own(torch::Library& own) {
  own.impl("empty.memory_format", TORCH_FN(empty));
  own.impl("empty_strided", TORCH_FN(empty_strided));
  own.impl("resize_", TORCH_FN(resize));
  own.impl("_local_scalar_dense", TORCH_FN(item));
  own.impl("copy_", TORCH_FN(copy));
  own.impl("_copy_from", TORCH_FN(copy_from));
  own.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  own.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  own.impl("view", TORCH_FN(at::native::view));
  own.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  own.impl("unfold", TORCH_FN(at::native::unfold));
}

}  // namespace dynmo::strict
