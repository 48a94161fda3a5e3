// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer's state as named bytes in a fixed order: what a migration sends and a checkpoint writes.
// The layer's description (shapes, names) is on every rank; only numbers travel.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/product_fit.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

// Sizes of a state that do not follow from its layer's description. Both ends of a migration know
// it before anything is sent.
struct StateShape {
  struct Pruned {
    std::int64_t kept = 0;  // weights
    bool compressed = false;
    std::int64_t segments = 0;  // of a compressed one (cost/product_fit.h); 0: not said
    friend bool operator==(const Pruned&, const Pruned&) = default;
  };
  bool frozen = false;                   // no moments
  std::map<std::size_t, Pruned> pruned;  // by index of the parameter
  friend bool operator==(const StateShape&, const StateShape&) = default;
};
[[nodiscard]] StateShape shape_of(const LayerState& state);
// A frozen layer whose parameter 2 has 9 weights left, compressed, in 7 segments, is "f,2:9c7"; one
// that trains with all its weights "t".
[[nodiscard]] std::string to_text(const StateShape& shape);
// kInternal: other text.
[[nodiscard]] Expected<StateShape> parse_shape(std::string_view text);

enum class TensorKind { kValue, kFirstMoment, kSecondMoment, kMask, kBuffer };

// A view of one tensor of a state; valid as long as the state's tensor is.
template <typename Byte>
struct TensorView {
  // The name of the parameter; others have ".first_moment", ".second_moment", ".mask" appended.
  std::string name;
  TensorKind kind = TensorKind::kValue;
  at::ScalarType type = at::kFloat;  // that of all but masks and buffers
  std::vector<std::int64_t> shape;
  std::span<Byte> bytes;
};
using NamedTensor = TensorView<std::byte>;
using ConstNamedTensor = TensorView<const std::byte>;

// All values, then all first moments, then all second moments, then the masks of those that have
// one, each in the order of Layer::parameters(), then all buffers. A frozen layer has no moments.
// Gradients are not part of it: state moves between steps, when they are zero.
[[nodiscard]] std::vector<NamedTensor> tensors(LayerState& state);
[[nodiscard]] std::vector<ConstNamedTensor> tensors(const LayerState& state);
[[nodiscard]] Bytes tensor_bytes(const LayerState& state);  // sum of the views

// The header describes everything besides the tensors. `layout` is a digest of names, shapes, types
// of buffers and decay flags.
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

// The bytes of a layer of that shape: values as a gradient does and as each of the two moments does
// where the layer trains, masks, and patterns, which are made again where the layer arrives.
struct PrunedBytes {
  Bytes values;
  Bytes masks;
  Bytes patterns;
};
[[nodiscard]] PrunedBytes pruned_bytes(const Layer& layer, const StateShape& shape);

// Returns the share of the time of its products by cost::LayerCost::product_time: that of a
// compressed matrix is what `fit` says of what is left of it, and no more than dense.
[[nodiscard]] double product_time(const Layer& layer, const StateShape& shape,
                                  const cost::ProductFit& fit);

// A state whose values, moments and masks are to be filled through tensors(); gradients are zero.
// Its parameters' tensors lie together in memory, in the order of tensors().
// Requires a shape that fits the layer (fits()).
[[nodiscard]] LayerState allocate_like(const Layer& layer, LayerId id, const StateShape& shape);
// The same in two halves: complete_memory makes the system back all memory of the state now.
// Threads may fill the tensors meanwhile.
[[nodiscard]] LayerState allocate_tensors_like(const Layer& layer, LayerId id,
                                               const StateShape& shape);
// Whether the parameters that a shape says are pruned may be, and have that many weights and
// segments.
[[nodiscard]] bool fits(const StateShape& shape, const Layer& layer);
void complete_memory(const LayerState& state);
// The same for a header that arrived; takes over its numbers. kBadInput if its layout is not that
// of `layer` (another model or version at the other end).
[[nodiscard]] Expected<LayerState> allocate_like(const Layer& layer, const StateHeader& header);

// Over the header and all tensors: equal digests are equal states, bit for bit.
[[nodiscard]] Digest digest(const LayerState& state);

}  // namespace dynmo::model
