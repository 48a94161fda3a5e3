// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer's state as named bytes in a fixed order: what a migration sends and a checkpoint writes.
// The layer's description (shapes, names) is on every rank; only numbers travel.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

enum class TensorKind { kValue, kFirstMoment, kSecondMoment, kBuffer };

// A view of one tensor of a state; valid as long as the state's tensor is.
template <typename Byte>
struct TensorView {
  std::string name;  // of the parameter; moments have ".first_moment", ".second_moment" appended
  TensorKind kind = TensorKind::kValue;
  at::ScalarType type = at::kFloat;  // that of all but buffers
  std::vector<std::int64_t> shape;
  std::span<Byte> bytes;
};
using NamedTensor = TensorView<std::byte>;
using ConstNamedTensor = TensorView<const std::byte>;

// All values, then all first moments, then all second moments, each in the order of
// Layer::parameters(), then all buffers. A frozen layer has no moments. Gradients are not part of
// it: state moves between steps, when they are zero.
[[nodiscard]] std::vector<NamedTensor> tensors(LayerState& state);
[[nodiscard]] std::vector<ConstNamedTensor> tensors(const LayerState& state);
[[nodiscard]] Bytes tensor_bytes(const LayerState& state);  // sum of the views

// What there is besides tensors. `layout` is a digest of names, shapes, types of
// buffers and decay flags.
struct StateHeader {
  LayerId id;
  bool frozen = false;
  std::int64_t optimizer_steps = 0;
  std::uint64_t random_key = 0;
  Digest layout;
  friend bool operator==(const StateHeader&, const StateHeader&) = default;
};
[[nodiscard]] StateHeader header(const LayerState& state);

// Fixed size, little-endian, so that both ends of a message know its length.
inline constexpr std::size_t kHeaderBytes = 48;
[[nodiscard]] std::array<std::byte, kHeaderBytes> pack(const StateHeader& header);
// kBadInput if the bytes are not a header of this version.
[[nodiscard]] Expected<StateHeader> unpack(std::span<const std::byte> bytes);

enum class Frozen { kNo, kYes };
// A state whose values and moments are to be filled through tensors(); gradients are zero.
[[nodiscard]] LayerState allocate_like(const Layer& layer, LayerId id, Frozen frozen);
// The same in two halves: a state without gradients first, and the rest later, which also makes the
// system back all of its memory now. Threads may fill the tensors meanwhile.
[[nodiscard]] LayerState allocate_tensors_like(const Layer& layer, LayerId id, Frozen frozen);
void complete_memory(LayerState& state);
// The same for a header that arrived; takes over its numbers. kBadInput if its layout is not that
// of `layer` (another model or version at the other end).
[[nodiscard]] Expected<LayerState> allocate_like(const Layer& layer, const StateHeader& header);

// Over the header and all tensors: equal digests are equal states, bit for bit.
[[nodiscard]] Digest digest(const LayerState& state);

}  // namespace dynmo::model
