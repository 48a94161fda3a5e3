// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/units.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dynmo/core/check.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/model/pruned.h"

namespace dynmo::model {
namespace {

// A parameter as [before, sections, units, size, behind]. `units` is their number.
struct UnitView {
  std::int64_t before = 1;
  std::int64_t sections = 1;
  std::int64_t size = 1;  // elements of a unit along the axis, in a section
  std::int64_t behind = 1;

  explicit UnitView(const ParameterSpec& spec) {
    DYNMO_CHECK(spec.units, "{} with units", spec.name);
    const auto axis = static_cast<std::size_t>(spec.units->axis);
    for (std::size_t i = 0; i < spec.shape.size(); ++i) {
      if (i < axis) before *= spec.shape[i];
      if (i > axis) behind *= spec.shape[i];
    }
    sections = spec.units->sections;
    size = spec.shape[axis] / (sections * spec.units->count);
  }
  [[nodiscard]] std::int64_t weights_of_a_unit() const { return before * sections * size * behind; }
  [[nodiscard]] at::Tensor of(const at::Tensor& tensor, std::int64_t units) const {
    return tensor.view({before, sections, units, size, behind});
  }
};

at::Tensor places_of(std::span<const std::int32_t> units) {
  at::Tensor places = at::empty({std::ssize(units)}, at::kLong);
  std::ranges::copy(units, kernels::host_data<std::int64_t>(places));
  return places;
}

// Returns the mask that keeps the units with these numbers, in host memory.
at::Tensor mask_of_units(const ParameterSpec& spec, std::span<const std::int32_t> units) {
  const UnitView view(spec);
  at::Tensor kept = at::zeros({spec.units->count}, at::kByte);
  kept.index_fill_(0, places_of(units), 1);
  const std::int64_t weights = c10::multiply_integers(spec.shape);
  at::Tensor bits = at::zeros({(weights + 7) / 8 * 8}, at::kByte);
  view.of(bits.narrow(0, 0, weights), spec.units->count)
      .copy_(kept.view({1, 1, spec.units->count, 1, 1}));
  at::Tensor mask = at::zeros({bits.numel() / 8}, at::kByte);
  const at::Tensor of_byte = bits.view({-1, 8});
  for (std::int64_t bit = 0; bit < 8; ++bit) {
    mask.bitwise_or_(of_byte.select(1, bit).bitwise_left_shift(bit));
  }
  return mask;
}

}  // namespace

std::vector<UnitSet> unit_sets(const std::vector<ParameterSpec>& specs) {
  std::vector<UnitSet> sets;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].units) continue;
    const UnitAxis& units = *specs[i].units;
    auto found = std::ranges::find_if(
        sets, [&](const UnitSet& set) { return set.kind == units.kind && set.set == units.set; });
    if (found == sets.end()) {
      found = sets.insert(
          sets.end(),
          {.kind = units.kind, .set = units.set, .count = units.count, .parameters = {}});
    }
    DYNMO_CHECK(found->count == units.count, "{} units in {}, got {}", found->count, specs[i].name,
                units.count);
    found->parameters.push_back(i);
  }
  return sets;
}

std::vector<std::int64_t> shape_with(const ParameterSpec& spec, std::int64_t units) {
  const UnitView view(spec);
  std::vector<std::int64_t> shape = spec.shape;
  shape[static_cast<std::size_t>(spec.units->axis)] = view.sections * units * view.size;
  return shape;
}

std::int64_t units_of(const ParameterSpec& spec, std::int64_t weights) {
  const std::int64_t of_one = UnitView(spec).weights_of_a_unit();
  return weights % of_one == 0 ? weights / of_one : -1;
}

std::vector<std::int32_t> units_left(const Parameter& parameter, const ParameterSpec& spec) {
  std::vector<std::int32_t> units;
  if (!parameter.mask.defined()) {
    units.resize(static_cast<std::size_t>(spec.units->count));
    std::iota(units.begin(), units.end(), 0);
    return units;
  }
  const at::Tensor mask = parameter.mask.cpu();
  const std::span<const std::uint8_t> bits = mask_bits(mask);
  const UnitView view(spec);
  for (std::int64_t unit = 0; unit < spec.units->count; ++unit) {
    const std::int64_t first = unit * view.size * view.behind;  // of its weights
    if ((bits[static_cast<std::size_t>(first / 8)] >> (first % 8) & 1) != 0) {
      units.push_back(static_cast<std::int32_t>(unit));
    }
  }
  return units;
}

std::vector<float> unit_sizes(const LayerState& state, const std::vector<ParameterSpec>& specs,
                              const UnitSet& set, std::span<const float> stds) {
  std::vector<double> squares;
  std::int64_t weights = 0;  // of a unit
  for (const std::size_t p : set.parameters) {
    if (!specs[p].prunable) continue;
    const UnitView view(specs[p]);
    const at::Tensor value = state.parameters[p].value.to(at::kCPU, at::kFloat).contiguous();
    const std::int64_t units = value.numel() / view.weights_of_a_unit();
    squares.resize(static_cast<std::size_t>(units));
    std::vector<double> own(squares.size());
    const auto* weight = kernels::host_data<const float>(value);
    for (std::int64_t outer = 0; outer < view.before * view.sections; ++outer) {
      for (double& sum : own) {
        for (std::int64_t i = 0; i < view.size * view.behind; ++i, ++weight) {
          sum += static_cast<double>(*weight) * static_cast<double>(*weight);
        }
      }
    }
    const auto std = static_cast<double>(stds[p]);
    for (std::size_t u = 0; u < own.size(); ++u) squares[u] += own[u] / (std * std);
    weights += view.weights_of_a_unit();
  }
  DYNMO_CHECK(weights > 0, "units with weights in layer {}", state.id);
  std::vector<float> sizes;
  for (const double sum : squares) {
    sizes.push_back(static_cast<float>(std::sqrt(sum / static_cast<double>(weights))));
  }
  return sizes;
}

void prune_units(LayerState& state, const std::vector<ParameterSpec>& specs, const UnitSet& set,
                 std::span<const std::int32_t> stay) {
  const at::NoGradGuard no_graph;
  for (const std::size_t p : set.parameters) {
    Parameter& parameter = state.parameters[p];
    DYNMO_CHECK(!parameter.mask.defined() || parameter.by_units,
                "{} to lose units, not single weights", specs[p].name);
    const std::vector<std::int32_t> had = units_left(parameter, specs[p]);
    std::vector<std::int32_t> left;
    for (const std::int32_t place : stay) left.push_back(had[static_cast<std::size_t>(place)]);
    const UnitView view(specs[p]);
    const at::Device device = parameter.value.device();
    const at::Tensor places = places_of(stay).to(device);
    const std::vector<std::int64_t> shape = shape_with(specs[p], std::ssize(stay));
    for (at::Tensor* tensor :
         {&parameter.value, &parameter.first_moment, &parameter.second_moment}) {
      if (!tensor->defined()) continue;
      *tensor = view.of(*tensor, std::ssize(had)).index_select(2, places).view(shape);
    }
    if (parameter.gradient.defined()) parameter.gradient = at::zeros_like(parameter.value);
    parameter.mask = mask_of_units(specs[p], left).to(device);
    parameter.by_units = true;
  }
}

bool units_fit(const StateShape& shape, const std::vector<ParameterSpec>& specs) {
  for (const auto& [index, pruned] : shape.pruned) {
    if (!pruned.by_units) continue;
    if (index >= specs.size() || !specs[index].units || pruned.compressed) return false;
  }
  for (const UnitSet& set : unit_sets(specs)) {
    std::int64_t units = -1;
    for (const std::size_t p : set.parameters) {
      const auto found = shape.pruned.find(p);
      const bool pruned = found != shape.pruned.end() && found->second.by_units;
      const std::int64_t left = pruned ? units_of(specs[p], found->second.kept) : set.count;
      if (units < 0) units = left;
      if (left < 0 || left > set.count || left != units) return false;
    }
  }
  return true;
}

Expected<void> check_units(const LayerState& state, const std::vector<ParameterSpec>& specs) {
  for (const UnitSet& set : unit_sets(specs)) {
    const Parameter& first = state.parameters[set.parameters.front()];
    const std::vector<std::int32_t> left = units_left(first, specs[set.parameters.front()]);
    for (const std::size_t p : set.parameters) {
      const Parameter& parameter = state.parameters[p];
      if (!parameter.by_units) continue;
      if (at::equal(parameter.mask.cpu(), mask_of_units(specs[p], left))) continue;
      return make_error(ErrorCode::kBadInput,
                        "the mask of '{}' in layer {} does not remove the whole units that the "
                        "mask of '{}' does",
                        parameter.name, state.id, first.name);
    }
  }
  return {};
}

}  // namespace dynmo::model
