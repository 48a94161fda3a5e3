// SPDX-License-Identifier: Apache-2.0
// Removes whole units (model/units.h). At an event one threshold for all hidden units of the model,
// and one for all groups of heads, leave the share of the schedule. There are two pools, because
// the size of a hidden unit cannot be compared with that of a group.
#include "dynmo/model/units.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/bit_mask.h"
#include "dynmo/dynamism/pruning/load.h"
#include "dynmo/dynamism/pruning/select.h"
#include "dynmo/dynamism/pruning/training/events_impl.h"

namespace dynmo::dynamism {
namespace {

using model::UnitKind;

constexpr std::array<UnitKind, 2> kUnitKinds = {UnitKind::kHidden, UnitKind::kHeads};
constexpr std::size_t index_of_kind(UnitKind kind) { return kind == UnitKind::kHidden ? 0 : 1; }

// A set of units of this rank that trains.
struct OwnSet {
  std::size_t number = 0;  // among all sets of the model
  model::LayerState* layer = nullptr;
  model::UnitSet set;
  std::vector<float> sizes = {};  // of the kept units
};

// The sets that train, on all ranks.
struct UnitPools {
  std::vector<std::int64_t> index;  // by number of the set, in the pool of its kind
  std::array<std::int64_t, 2> sets = {};
  std::array<std::int64_t, 2> units = {};
  std::array<std::int64_t, 2> least = {};  // units that stay because of max_sparsity
};

// Adds the largest of the other units to `stay`, until it has a multiple of `multiple` units or
// all. If sizes are equal, the first unit is added.
std::vector<std::int32_t> rounded_up(std::vector<std::int32_t> stay, std::span<const float> sizes,
                                     std::int64_t multiple) {
  const auto wanted =
      static_cast<std::size_t>((std::ssize(stay) + multiple - 1) / multiple * multiple);
  std::vector<std::int32_t> all(sizes.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::int32_t> going;
  std::ranges::set_difference(all, stay, std::back_inserter(going));
  std::ranges::stable_sort(going, [&](std::int32_t a, std::int32_t b) {
    return sizes[static_cast<std::size_t>(a)] > sizes[static_cast<std::size_t>(b)];
  });
  for (const std::int32_t place : going) {
    if (stay.size() >= wanted) break;
    stay.push_back(place);
  }
  std::ranges::sort(stay);
  return stay;
}

class UnitPruning final : public PruningEvents {
 public:
  using PruningEvents::PruningEvents;

  Expected<void> check(const Setting& setting) const override {
    for (const auto& layer : setting.model) {
      if (!model::unit_sets(layer->parameters()).empty()) return {};
    }
    return make_error(ErrorCode::kBadInput,
                      "pruning.form is units, but no layer of the model has units that may be "
                      "removed");
  }

  Json state() const override {
    Json state = PruningEvents::state();
    if (!left_.is_null()) state["left"] = left_;
    return state;
  }

  Expected<void> restore(const Json& state) override {
    if (state.contains("initial_std")) DYNMO_TRY(PruningEvents::restore(state));
    const auto left = state.find("left");
    if (left == state.end()) return {};
    if (!left->is_object()) {
      return make_error(ErrorCode::kBadInput,
                        "the checkpoint holds a state of source 'pruning' whose 'left' is {}, "
                        "wanted an object of counts",
                        left->dump());
    }
    left_ = *left;
    return {};
  }

 private:
  Expected<Masks> prune(const Boundary& boundary) override {
    DYNMO_ASSIGN(std::vector<OwnSet> own, own_sets(boundary));
    DYNMO_ASSIGN(const UnitPools pools, pools_of(own, boundary));
    if (pools.units[0] + pools.units[1] == 0) return Masks();
    for (const UnitKind kind : kUnitKinds) DYNMO_TRY(prune_pool(kind, own, pools, boundary));
    for (auto& [id, state] : boundary.states) model::derive(*boundary.model[id.index()], state);
    return count_left(own, pools, boundary);
  }

  // Returns this rank's training sets with the sizes of their units.
  [[nodiscard]] Expected<std::vector<OwnSet>> own_sets(const Boundary& boundary) const {
    std::vector<OwnSet> own;
    std::size_t set_number = 0;
    std::size_t matrix_number = 0;
    for (std::size_t l = 0; l < boundary.model.size(); ++l) {
      const std::vector<model::ParameterSpec> specs = boundary.model[l]->parameters();
      std::vector<float> stds(specs.size(), 1.0F);
      for (std::size_t p = 0; p < specs.size(); ++p) {
        if (!specs[p].prunable) continue;
        DYNMO_ASSIGN(stds[p], initial_std_.of(matrix_number++, specs[p]));
      }
      const auto found = boundary.states.find(LayerId(static_cast<std::int32_t>(l)));
      for (model::UnitSet& set : model::unit_sets(specs)) {
        const std::size_t number = set_number++;
        if (found == boundary.states.end() || found->second.frozen) continue;
        OwnSet& one = own.emplace_back(
            OwnSet{.number = number, .layer = &found->second, .set = std::move(set)});
        one.sizes = model::unit_sizes(found->second, specs, one.set, stds);
      }
    }
    return own;
  }

  [[nodiscard]] Expected<UnitPools> pools_of(const std::vector<OwnSet>& own,
                                             const Boundary& boundary) const {
    std::vector<UnitKind> kinds;
    for (const auto& layer : boundary.model) {
      for (const model::UnitSet& set : model::unit_sets(layer->parameters())) {
        kinds.push_back(set.kind);
      }
    }
    std::vector<std::int64_t> units(kinds.size());
    for (const OwnSet& one : own) units[one.number] = one.set.count;
    DYNMO_ASSIGN(units, boundary.sum(std::move(units)));
    UnitPools pools;
    for (std::size_t i = 0; i < units.size(); ++i) {
      const std::size_t kind = index_of_kind(kinds[i]);
      pools.index.push_back(pools.sets[kind]);
      if (units[i] == 0) continue;
      pools.sets[kind] += 1;
      pools.units[kind] += units[i];
      pools.least[kind] += protected_weights(options_.max_sparsity, units[i]);
    }
    return pools;
  }

  Expected<void> prune_pool(UnitKind kind, const std::vector<OwnSet>& own, const UnitPools& pools,
                            const Boundary& boundary) const {
    const std::size_t k = index_of_kind(kind);
    if (pools.sets[k] == 0) return {};
    PruningEvent event = event_at(options_, boundary.step, pools.sets[k], pools.units[k]);
    // Each layer keeps some heads, so few heads may not suffice for the schedule.
    if (weights_left(event.sparsity, event.weights) < pools.least[k]) {
      event.sparsity =
          1 - static_cast<double>(pools.least[k]) / static_cast<double>(pools.units[k]);
    }
    std::vector<PoolMatrix> sets;
    std::vector<const OwnSet*> of_kind;
    for (const OwnSet& one : own) {
      if (one.set.kind != kind) continue;
      of_kind.push_back(&one);
      sets.push_back({.index = pools.index[one.number],
                      .weights = one.set.count,
                      .std = 1,
                      .kept = one.sizes});
    }
    DYNMO_ASSIGN(const Selection selection, keep_largest(event, sets, boundary.sum));
    const std::int64_t multiple = kind == UnitKind::kHidden ? options_.unit_multiple : 1;
    for (std::size_t i = 0; i < of_kind.size(); ++i) {
      const OwnSet& one = *of_kind[i];
      model::prune_units(*one.layer, boundary.model[one.layer->id.index()]->parameters(), one.set,
                         rounded_up(selection.stay[i], one.sizes, multiple));
    }
    return {};
  }

  // Counts the units that are left on all ranks, and returns the masks of this rank.
  Expected<Masks> count_left(const std::vector<OwnSet>& own, const UnitPools& pools,
                             const Boundary& boundary) {
    std::vector<std::int64_t> counts(kUnitKinds.size());
    std::vector<MatrixMask> masks;
    for (const OwnSet& one : own) {
      const std::size_t first = one.set.parameters.front();
      const std::vector<std::int32_t> left = model::units_left(
          one.layer->parameters[first], boundary.model[one.layer->id.index()]->parameters()[first]);
      counts[index_of_kind(one.set.kind)] += std::ssize(left);
      masks.push_back({.index = static_cast<std::int64_t>(one.number),
                       .weights = one.set.count,
                       .bits = pack_mask(left, one.set.count)});
    }
    DYNMO_ASSIGN(counts, boundary.sum(std::move(counts)));
    left_ = Json::object();
    const std::array<const char*, 2> names = {"hidden_units", "head_groups"};
    for (std::size_t k = 0; k < names.size(); ++k) {
      if (pools.units[k] > 0) left_[names[k]] = {{"left", counts[k]}, {"of", pools.units[k]}};
    }
    return Masks(std::move(masks));
  }
};

}  // namespace

std::unique_ptr<Source> make_unit_pruning(const PruningOptions& options) {
  return std::make_unique<UnitPruning>(options);
}

}  // namespace dynmo::dynamism
