// SPDX-License-Identifier: Apache-2.0
#pragma once

// Removes whole units of a layer: hidden units of an MLP or of an expert, and groups of attention
// heads. A unit has a part of several parameters, such as a row of the gate's and the up matrix and
// a column of the down matrix. All parts are removed together, with gradients and moments. The
// tensors shrink, so all products stay dense ones of smaller matrices. This pays on every device
// and in every type.
//
// The heads of a group share one head of keys and values. Without grouped queries a group is one
// head. So the ratio of query heads to heads of keys never changes.
//
// A mask says which weights are left, as for single weights (pruned.h). So migrations, checkpoints
// and exports need no other format.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/state_bytes.h"

namespace dynmo::model {

// The units of a layer that are comparable: of one MLP, one expert, or one attention.
struct UnitSet {
  UnitKind kind = UnitKind::kHidden;
  std::int64_t set = 0;                 // UnitAxis::set
  std::int64_t count = 0;               // units at the start
  std::vector<std::size_t> parameters;  // with a part of each unit, ascending
};

// Returns the sets of a layer in the order of their first parameters.
[[nodiscard]] std::vector<UnitSet> unit_sets(const std::vector<ParameterSpec>& specs);

// Returns the shape of a parameter with `units` units. Requires spec.units.
[[nodiscard]] std::vector<std::int64_t> shape_with(const ParameterSpec& spec, std::int64_t units);
// Returns the number of units whose parts in a parameter have `weights` weights, or -1 if there is
// no such number.
[[nodiscard]] std::int64_t units_of(const ParameterSpec& spec, std::int64_t weights);
// Returns the numbers of the units that a parameter still has, ascending. Waits for a device.
[[nodiscard]] std::vector<std::int32_t> units_left(const Parameter& parameter,
                                                   const ParameterSpec& spec);

// Returns the size of each unit that is left: the root mean square of its weights in the set's
// matrices. Weights of a matrix are first divided by its entry of `stds`, which is by parameter.
// Biases do not count. Sums are in fp64 and in a fixed order, on the host, so that all devices have
// the same bits.
[[nodiscard]] std::vector<float> unit_sizes(const LayerState& state,
                                            const std::vector<ParameterSpec>& specs,
                                            const UnitSet& set, std::span<const float> stds);

// Removes units from all parameters of a set. `stay` has ascending positions among the units that
// are left. Call it between two steps, when gradients are zero, and call derive() afterwards.
void prune_units(LayerState& state, const std::vector<ParameterSpec>& specs, const UnitSet& set,
                 std::span<const std::int32_t> stay);

// Returns whether `shape` has whole units, and the same number of them in all parameters of a set.
[[nodiscard]] bool units_fit(const StateShape& shape, const std::vector<ParameterSpec>& specs);
// Checks masks that come from a file. Returns kBadInput if they do not remove whole units, the same
// from all parameters of a set. Requires a shape that fits.
[[nodiscard]] Expected<void> check_units(const LayerState& state,
                                         const std::vector<ParameterSpec>& specs);

}  // namespace dynmo::model
