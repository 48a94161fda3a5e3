// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/side_copies.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/state_bytes.h"

namespace dynmo::runtime {
namespace {

// A multiple of the size of any element, and of a cache line.
constexpr std::int64_t kCopyAlignment = 64;
// libtorch's allocator of pinned memory rounds up to powers of two.
constexpr std::int64_t kMinChunk = std::int64_t{1} << 16;
constexpr std::int64_t kMaxChunk = std::int64_t{1} << 26;
// A chunk may have at most this times the wanted size, so that a few small layers keep no large
// one.
constexpr std::int64_t kMostRoom = 2;

Bytes room_of(const at::Tensor& tensor) {
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  return Bytes{(bytes + kCopyAlignment - 1) / kCopyAlignment * kCopyAlignment};
}

c10::Stream side_stream(at::Device device) {
  DYNMO_CHECK(!device.is_cpu(), "a device with streams, got {}", device.str());
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

c10::Stream current_stream_of(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

std::shared_ptr<const c10::Event> event_in(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  return event;
}

// Makes `stream` the current one, behind all work that this thread has queued so far.
class BehindCurrent {
 public:
  explicit BehindCurrent(const c10::Stream& stream) : guard_(stream) {
    event_in(guard_.original_stream())->block(stream);
  }

 private:
  c10::StreamGuard guard_;
};

// Copies on `stream`. The device's memory may be dropped before the copy has read it.
void copy_beside(const at::Tensor& from, const at::Tensor& to, const c10::Stream& stream) {
  if (from.numel() == 0) return;
  to.copy_(from, /*non_blocking=*/true);
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(from.storage().data_ptr(), stream);
}

// Visits the tensors of a layer that are copied, as model::tensors() lists them.
template <typename Visit>
void visit_copied(model::LayerState& state, Visit visit) {
  for (auto kind : {&model::Parameter::value, &model::Parameter::first_moment,
                    &model::Parameter::second_moment, &model::Parameter::mask}) {
    for (model::Parameter& parameter : state.parameters) {
      if ((parameter.*kind).defined()) visit(parameter.*kind);
    }
  }
  for (model::Buffer& buffer : state.buffers) {
    if (!buffer.value.is_cpu()) visit(buffer.value);
  }
}

}  // namespace

void CopyEnd::wait() const {
  if (event_ == nullptr) return;
  const c10::DeviceGuard guard(event_->device());  // for threads without a current device
  event_->synchronize();
}

void CopyEnd::order_later_work() const {
  if (event_ != nullptr) event_->block(current_stream_of(event_->device()));
}

void PinnedMemory::begin(Bytes bytes) {
  set_ = rest_ = bytes;
  open_.reset();
}

bool PinnedMemory::is_free(std::size_t chunk) const {
  return chunk != open_ && chunks_[chunk].storage().use_count() == 1;
}

std::size_t PinnedMemory::chunk_for(Bytes bytes) {
  const std::int64_t wanted = std::max(bytes.value, std::clamp(rest_.value, kMinChunk, kMaxChunk));
  const auto size = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(wanted)));
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    const std::int64_t has = chunks_[i].numel();
    if (is_free(i) && has >= bytes.value && has <= kMostRoom * size) return i;
  }
  chunks_.push_back(at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(true)));
  return chunks_.size() - 1;
}

at::Tensor PinnedMemory::take(const at::Tensor& tensor) {
  const Bytes room = room_of(tensor);
  if (!open_ || chunks_[*open_].numel() - filled_.value < room.value) {
    open_ = chunk_for(room);
    filled_ = Bytes{0};
  }
  const at::Tensor bytes =
      chunks_[*open_].narrow(0, filled_.value, static_cast<std::int64_t>(tensor.nbytes()));
  filled_ += room;
  rest_ -= room;
  return bytes.view(tensor.scalar_type()).view(tensor.sizes());
}

void PinnedMemory::end() {
  open_.reset();
  Bytes left = held();
  for (std::size_t i = chunks_.size(); i-- > 0 && left > set_ * 2;) {
    if (!is_free(i)) continue;
    left -= Bytes{chunks_[i].numel()};
    chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

Bytes PinnedMemory::held() const {
  Bytes all;
  for (const at::Tensor& chunk : chunks_) all += Bytes{chunk.numel()};
  return all;
}

SideCopies::SideCopies(at::Device device)
    : device_(device), layers_(side_stream(device)), messages_(side_stream(device)) {}

CopiedLayers SideCopies::copy(const model::LayerStates& layers) {
  const at::NoGradGuard no_graph;
  const BehindCurrent behind(layers_);
  CopiedLayers copies{.layers = layers, .end = {}};
  Bytes bytes;
  for (auto& [id, layer] : copies.layers) {
    visit_copied(layer, [&](const at::Tensor& tensor) { bytes += room_of(tensor); });
  }
  pinned_.begin(bytes);
  for (auto& [id, layer] : copies.layers) {
    for (model::Parameter& parameter : layer.parameters) {
      parameter.gradient.reset();
      parameter.compute_copy.reset();
    }
    for (model::Buffer& buffer : layer.buffers) {
      if (buffer.value.is_cpu()) buffer.value = buffer.value.clone();
    }
  }
  for (auto& [id, layer] : copies.layers) {
    visit_copied(layer, [&](at::Tensor& tensor) {
      const at::Tensor host = pinned_.take(tensor);
      copy_beside(tensor, host, layers_);
      tensor = host;
    });
  }
  pinned_.end();
  copies.end = CopyEnd(event_in(layers_));
  newest_ = copies.end;
  return copies;
}

void SideCopies::order_changes() {
  if (newest_) newest_->order_later_work();
  newest_.reset();
}

CopyEnd SideCopies::copy_message(const std::vector<at::Tensor*>& tensors) const {
  const at::NoGradGuard no_graph;
  const BehindCurrent behind(messages_);
  for (at::Tensor* tensor : tensors) {
    if (!tensor->defined()) continue;
    const at::Tensor host = at::empty(
        tensor->sizes(), at::TensorOptions().dtype(tensor->scalar_type()).pinned_memory(true));
    copy_beside(*tensor, host, messages_);
    *tensor = host;
  }
  return CopyEnd(event_in(messages_));
}

}  // namespace dynmo::runtime
