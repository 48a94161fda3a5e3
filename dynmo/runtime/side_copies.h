// SPDX-License-Identifier: Apache-2.0
#pragma once

// Copies from a device to host memory beside the computation, in streams of their own. A copy waits
// on the device for the work that was queued before it. The computation goes on meanwhile, and only
// a reader of the copy waits for it (docs/decisions/041-copies-beside-the-computation.md).
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
  // Without copies, nothing is waited for.
  CopyEnd() = default;
  explicit CopyEnd(std::shared_ptr<const c10::Event> event) : event_(std::move(event)) {}

  // Waits until the copies are complete. Waits for no other work of the device.
  void wait() const;
  // Lets the later work of this thread's stream wait for the copies, on the device.
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

// Pinned host memory that is kept. A tensor's memory is used again when no tensor shares it any
// more. One thread takes memory. Any thread may drop tensors.
class PinnedMemory {
 public:
  // Begins a set of tensors, which take `bytes` together.
  void begin(Bytes bytes);
  // Returns memory for a copy of `tensor`, contiguous.
  [[nodiscard]] at::Tensor take(const at::Tensor& tensor);
  // Ends the set. Gives back memory that is not used, until twice the set is left. So two sets of
  // equal size stay, and the memory of layers that have left does not.
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

  // Begins to copy layers. They may be dropped at once. Call order_changes() before they change.
  [[nodiscard]] CopiedLayers copy(const model::LayerStates& layers);
  // Lets the later work of this thread's stream wait, on the device, for the copies of layers that
  // were begun. The host does not wait. Costs nothing if there are none.
  void order_changes();

  // Begins to copy the tensors of a message into new pinned memory, and replaces them by the
  // copies. Undefined tensors stay. The tensors may be dropped at once. They do not change before
  // the end.
  [[nodiscard]] CopyEnd copy_message(const std::vector<at::Tensor*>& tensors) const;

  // Returns the pinned memory that is kept for layers. It is at most twice that of the newest
  // layers, and what is in use.
  [[nodiscard]] Bytes held() const { return pinned_.held(); }

 private:
  at::Device device_;
  c10::Stream layers_;
  c10::Stream messages_;
  PinnedMemory pinned_;
  std::optional<CopyEnd> newest_;  // of layers, if later work is not ordered yet
};

}  // namespace dynmo::runtime
