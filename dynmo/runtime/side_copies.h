// SPDX-License-Identifier: Apache-2.0
#pragma once

// Copies from a device to host memory beside the computation, in streams of their own. On the
// device, a copy waits for the work that was queued before it. The computation goes on, and only a
// reader waits for the copy (docs/decisions/041-copies-beside-the-computation.md).
//
// Layers are copied into pinned memory that is kept, because allocating it takes longer than
// copying. Messages have another stream, because they do not wait behind layers.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/model/layer.h"

namespace dynmo::runtime {

// The end of some copies. Intentionally copyable. Any thread may wait.
class CopyEnd {
 public:
  // Makes the end of no copies. wait() then returns at once.
  CopyEnd() = default;
  explicit CopyEnd(std::shared_ptr<const c10::Event> event) : event_(std::move(event)) {}

  // Waits until the copies are complete. Does not wait for other work of the device.
  void wait() const;
  // Makes the later work of this thread's stream wait for the copies, on the device.
  void order_later_work() const;

 private:
  std::shared_ptr<const c10::Event> event_;
};

// Layers on their way to host memory, without gradients and compute copies. They may be read after
// end.wait().
struct CopiedLayers {
  model::LayerStates layers;
  CopyEnd end;
};

// Pinned host memory that is kept and used again. A tensor's memory is free when no tensor shares
// it. One thread takes memory. Any thread may drop tensors.
class PinnedMemory {
 public:
  // Begins a set of tensors whose total size is `bytes`.
  void begin(Bytes bytes);
  // Returns memory for a copy of `tensor`, contiguous.
  [[nodiscard]] at::Tensor take(const at::Tensor& tensor);
  // Ends the set. Frees unused memory until at most twice the set is held. So two sets of equal
  // size stay, and the memory of layers that have left does not.
  void end();
  [[nodiscard]] Bytes held() const;

 private:
  [[nodiscard]] bool is_free(std::size_t chunk) const;
  [[nodiscard]] std::size_t chunk_for(Bytes bytes);

  std::vector<at::Tensor> chunks_;
  std::optional<std::size_t> open_;  // chunk that is filled now
  Bytes filled_;                     // of it
  Bytes set_;
  Bytes rest_;  // of the set, not taken yet
};

// The copies of one rank. One thread calls it, which also gives the device its work.
class SideCopies {
 public:
  // Requires a device other than the CPU.
  explicit SideCopies(at::Device device);

  // Begins to copy layers, which may be dropped at once. Call order_changes() before they change.
  [[nodiscard]] CopiedLayers copy(const model::LayerStates& layers);
  // Makes the later work of this thread's stream wait, on the device, for the copies of layers that
  // were begun. The host does not wait. Does nothing without copies.
  void order_changes();

  // Begins to copy the tensors of a message into new pinned memory, and replaces them by the
  // copies. The originals may be dropped at once, but must not change before the end. Skips
  // undefined tensors.
  [[nodiscard]] CopyEnd copy_message(const std::vector<at::Tensor*>& tensors) const;

  // Returns the pinned memory that is held for layers: at most twice that of the newest layers, and
  // what is in use.
  [[nodiscard]] Bytes held() const { return pinned_.held(); }

 private:
  at::Device device_;
  c10::Stream layers_;
  c10::Stream messages_;
  PinnedMemory pinned_;
  std::optional<CopyEnd> newest_;  // of layers, for which later work does not wait yet
};

}  // namespace dynmo::runtime
