// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer's state as named bytes in a fixed order, for migrations and checkpoints. Every rank has
// the layer's description (shapes, names). Only numbers travel.

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
// them before anything is sent.
struct StateShape {
  struct Pruned {
    std::int64_t kept = 0;  // weights
    bool compressed = false;
    // Segments if compressed (cost/product_fit.h), or 0 if not given.
    std::int64_t segments = 0;
    bool by_units = false;  // it has lost whole units (units.h)
    friend bool operator==(const Pruned&, const Pruned&) = default;
  };
  bool frozen = false;                   // no moments
  std::map<std::size_t, Pruned> pruned;  // by index of the parameter
  friend bool operator==(const StateShape&, const StateShape&) = default;
};
[[nodiscard]] StateShape shape_of(const LayerState& state);
// Returns a shape as text. "f,2:9c7" is a frozen layer whose parameter 2 has 9 weights left,
// compressed, in 7 segments. "t,1:8u" is a layer that trains, and 8 weights of parameter 1 are left
// as whole units.
[[nodiscard]] std::string to_text(const StateShape& shape);
// Parses the text of a shape. Returns kInternal for any other text.
[[nodiscard]] Expected<StateShape> parse_shape(std::string_view text);

enum class TensorKind { kValue, kFirstMoment, kSecondMoment, kMask, kBuffer };

// A view of one tensor of a state. Valid as long as the state's tensor exists.
template <typename Byte>
struct TensorView {
  // The name of the parameter, for other kinds followed by ".first_moment", ".second_moment" or
  // ".mask".
  std::string name;
  TensorKind kind = TensorKind::kValue;
  at::ScalarType type = at::kFloat;  // type of all but masks and buffers
  std::vector<std::int64_t> shape;
  std::span<Byte> bytes;
};
using NamedTensor = TensorView<std::byte>;
using ConstNamedTensor = TensorView<const std::byte>;

// Returns all values, then all first moments, then all second moments, then the masks that exist.
// Each group is in the order of Layer::parameters(). All buffers follow. A frozen layer has no
// moments. Gradients are not included: a state moves between steps, when they are zero.
[[nodiscard]] std::vector<NamedTensor> tensors(LayerState& state);
[[nodiscard]] std::vector<ConstNamedTensor> tensors(const LayerState& state);
// Returns the bytes of all tensors of a state, on any device.
[[nodiscard]] Bytes tensor_bytes(const LayerState& state);

// A layer's state except the tensors. `layout` is a digest of names, shapes, types of buffers and
// decay flags.
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
// Parses a header. Returns kBadInput if the bytes are not a header of this version.
[[nodiscard]] Expected<StateHeader> unpack(std::span<const std::byte> bytes);

// The bytes of a layer of a given shape. `values` is also the size of the gradient and of each of
// the two moments if the layer trains. Patterns do not travel: the receiver makes them.
struct PrunedBytes {
  Bytes values;
  Bytes masks;
  Bytes patterns;
};
[[nodiscard]] PrunedBytes pruned_bytes(const Layer& layer, const StateShape& shape);

// Returns cost::LayerCost::product_time: the time of the layer's products relative to dense ones. A
// compressed matrix takes the time that `fit` gives for its remaining weights, at most the dense
// time.
[[nodiscard]] double product_time(const Layer& layer, const StateShape& shape,
                                  const cost::ProductFit& fit);

// Allocates a state whose values, moments and masks the caller fills through tensors(). Gradients
// are zero. The parameters' tensors are adjacent in memory, in the order of tensors(). Requires a
// shape that fits the layer (fits()).
[[nodiscard]] LayerState allocate_like(const Layer& layer, LayerId id, const StateShape& shape);
// Does the first half of allocate_like(): the system may not have assigned the memory yet.
// complete_memory() makes it do so. Threads may fill the tensors at the same time.
[[nodiscard]] LayerState allocate_tensors_like(const Layer& layer, LayerId id,
                                               const StateShape& shape);
// Returns whether a layer can have this shape: its pruned parameters may be pruned, and the numbers
// of weights and segments are possible.
[[nodiscard]] bool fits(const StateShape& shape, const Layer& layer);
void complete_memory(const LayerState& state);
// Like allocate_like() above, with the numbers of a received header. Returns kBadInput if its
// layout is not that of `layer` (another model or version at the other end).
[[nodiscard]] Expected<LayerState> allocate_like(const Layer& layer, const StateHeader& header);

// Returns a digest of the header and all tensors. Equal digests mean equal states, bit for bit.
[[nodiscard]] Digest digest(const LayerState& state);

}  // namespace dynmo::model
