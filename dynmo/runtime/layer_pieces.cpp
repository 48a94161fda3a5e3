// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/layer_pieces.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "dynmo/model/state_bytes.h"
#include "dynmo/runtime/pieces.h"

namespace dynmo::runtime {
namespace {

std::vector<LayerPiece> cut(const std::vector<std::span<std::byte>>& tensors) {
  std::vector<LayerPiece> pieces;
  std::vector<std::span<std::byte>> parts;
  std::size_t room = kPieceBytes;
  for (std::span<std::byte> left : tensors) {
    while (!left.empty()) {
      const std::size_t size = std::min(left.size(), room);
      parts.push_back(left.first(size));
      left = left.subspan(size);
      room -= size;
      if (room > 0) continue;
      pieces.emplace_back(std::exchange(parts, {}));
      room = kPieceBytes;
    }
  }
  if (!parts.empty()) pieces.emplace_back(std::move(parts));
  return pieces;
}

}  // namespace

LayerPiece::LayerPiece(std::vector<std::span<std::byte>> parts) {
  std::size_t bytes = 0;
  for (const auto part : parts) {
    bytes += part.size();
    if (!parts_.empty() && parts_.back().data() + parts_.back().size() == part.data()) {
      parts_.back() = {parts_.back().data(), parts_.back().size() + part.size()};
    } else {
      parts_.push_back(part);
    }
  }
  message_ = parts_.front();
  if (parts_.size() == 1) return;
  copy_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  message_ = {copy_.get(), bytes};
}

void LayerPiece::take_from_state() {
  if (copy_ == nullptr) return;
  std::byte* to = copy_.get();
  for (const auto part : parts_) {
    std::memcpy(to, part.data(), part.size());
    to += part.size();
  }
}

void LayerPiece::bring_to_state() const {
  if (copy_ == nullptr) return;
  const std::byte* from = copy_.get();
  for (const auto part : parts_) {
    std::memcpy(part.data(), from, part.size());
    from += part.size();
  }
}

void LayerPiece::digest(Digester& digester) const {
  for (const auto part : parts_) digester.update(part);
}

std::vector<LayerPiece> layer_pieces(model::LayerState& state) {
  std::vector<std::span<std::byte>> tensors;
  for (const model::NamedTensor& tensor : model::tensors(state)) tensors.push_back(tensor.bytes);
  return cut(tensors);
}

std::vector<LayerPiece> layer_gradient_pieces(const model::LayerState& state) {
  std::vector<std::span<std::byte>> tensors;
  for (const model::Parameter& parameter : state.parameters) {
    if (parameter.gradient.defined()) tensors.push_back(bytes_of(parameter.gradient));
  }
  return cut(tensors);
}

std::string take_header(std::span<const std::byte> bytes, model::LayerState& state) {
  const auto header = model::unpack(bytes);
  if (!header) return header.error().message;
  const model::StateHeader expected = model::header(state);
  if (header->id != expected.id || header->frozen != expected.frozen ||
      header->layout != expected.layout) {
    return "its header is that of another layer";
  }
  state.optimizer_steps = header->optimizer_steps;
  state.random_key = header->random_key;
  return "";
}

}  // namespace dynmo::runtime
