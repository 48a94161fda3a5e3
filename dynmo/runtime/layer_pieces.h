// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer's tensors as messages: one stream of bytes, cut into pieces of bounded size. A message
// costs the same as a copy of some ten thousand bytes, and many tensors of a layer are smaller than
// that.

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/model/layer.h"

namespace dynmo::runtime {

// One message. It is the bytes of the state themselves if they are adjacent in memory, else a copy.
class LayerPiece {
 public:
  // Makes a piece from parts of a state. Adjacent parts become one. Requires at least one part,
  // none empty.
  explicit LayerPiece(std::vector<std::span<std::byte>> parts);

  [[nodiscard]] std::span<std::byte> message() const { return message_; }
  void take_from_state();                 // call before sending
  void bring_to_state() const;            // call after receiving
  void digest(Digester& digester) const;  // of the state's bytes

 private:
  std::vector<std::span<std::byte>> parts_;
  std::unique_ptr<std::byte[]> copy_;  // null if there is one part
  std::span<std::byte> message_;
};

// Returns the tensors of a state in the order of model::tensors(), as pieces of kPieceBytes and a
// shorter last one. Sizes follow from the model and the state's shape, so both ends of a transfer
// know them, wherever their tensors are in memory.
[[nodiscard]] std::vector<LayerPiece> layer_pieces(model::LayerState& state);
// Like layer_pieces(), for the gradients alone, in parameter order. Returns none if the layer is
// frozen.
[[nodiscard]] std::vector<LayerPiece> layer_gradient_pieces(const model::LayerState& state);

// Stores the numbers of a received header in `state` and returns "". Returns the reason for a
// refusal if the header describes another layer.
[[nodiscard]] std::string take_header(std::span<const std::byte> bytes, model::LayerState& state);

}  // namespace dynmo::runtime
