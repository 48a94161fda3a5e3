// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer's tensors as messages: one stream of bytes, cut into pieces of bounded size. A message
// costs as much as the copy of some ten thousand bytes, and a layer has many tensors smaller than
// that.

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/model/layer.h"

namespace dynmo::runtime {

// One message. The bytes of the state themselves where they lie together in memory, else a copy.
class LayerPiece {
 public:
  // Requires at least one part, none empty; parts that touch are one.
  explicit LayerPiece(std::vector<std::span<std::byte>> parts);

  [[nodiscard]] std::span<std::byte> message() const { return message_; }
  void take_from_state();                 // before it is sent
  void bring_to_state() const;            // when it has arrived
  void digest(Digester& digester) const;  // of the bytes of the state

 private:
  std::vector<std::span<std::byte>> parts_;
  std::unique_ptr<std::byte[]> copy_;  // none where there is one part
  std::span<std::byte> message_;
};

// The tensors of a state in the order of model::tensors(), as pieces of kPieceBytes and a rest.
// Their sizes follow from the model and the state's shape, so that both ends of a transfer know
// them, wherever each has its tensors.
[[nodiscard]] std::vector<LayerPiece> layer_pieces(model::LayerState& state);
// The same of the gradients alone, in the order of the parameters; none where the layer is frozen.
[[nodiscard]] std::vector<LayerPiece> layer_gradient_pieces(const model::LayerState& state);

// Takes over the numbers of a header that arrived and describes this very layer; else the refusal.
[[nodiscard]] std::string take_header(std::span<const std::byte> bytes, model::LayerState& state);

}  // namespace dynmo::runtime
