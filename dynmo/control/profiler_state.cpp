// SPDX-License-Identifier: Apache-2.0
// A profiler that changes hands: other numbers of ranks, and what a rank that comes new is given.
#include <algorithm>
#include <set>
#include <utility>

#include "dynmo/control/profiler.h"
#include "dynmo/control/state_json_impl.h"
#include "dynmo/cost/files.h"

namespace dynmo::control {

// Ranks that are gone get numbers behind those that are there: what their layers had in common in
// the steps measured with them is still to be told apart.
void Profiler::ranks_changed(const std::vector<std::optional<Rank>>& before) {
  std::map<Rank, Rank> now;
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (before[i]) now.emplace(*before[i], Rank(static_cast<std::int32_t>(i)));
  }
  std::set<Rank> measured(owners_.begin(), owners_.end());
  for (const Sample& step : window_) measured.insert(step.owners.begin(), step.owners.end());
  for (const FoundChange& found : found_) {
    if (found.rank) measured.insert(*found.rank);
  }
  auto next = static_cast<std::int32_t>(before.size());
  for (const Rank rank : measured) {
    if (!now.contains(rank)) now.emplace(rank, Rank(next++));
  }
  const auto renumber = [&](std::vector<Rank>& owners) {
    for (Rank& owner : owners) owner = now.at(owner);
  };
  for (Sample& step : window_) renumber(step.owners);
  renumber(owners_);
  for (FoundChange& found : found_) {
    if (found.rank) found.rank = now.at(*found.rank);
  }
}

template <typename Self, typename Visit>
void Profiler::fields(Self& self, Visit visit) {
  visit("measured_boundaries", self.measured_boundaries_);
  visit("window", self.window_);
  visit("outdated", self.outdated_);
  visit("products", self.products_);
  visit("found", self.found_);
  visit("overhead", self.overhead_);
  visit("frozen_layers", self.frozen_layers_);
  visit("last", self.last_);
  visit("owners", self.owners_);
  visit("own_shares", self.own_shares_);
  visit("rank_levels", self.rank_levels_);
  visit("own_changes", self.own_changes_);
  visit("rank_changes", self.rank_changes_);
  visit("work", self.work_);
  visit("work_changes", self.work_changes_);
  visit("own_deviation", self.own_deviation_);
  visit("rank_deviation", self.rank_deviation_);
}

Json Profiler::state() const {
  Json json = {{"known", cost::profile_json(known_)}};
  fields(*this, [&](const char* key, const auto& field) { json[key] = to_state(field); });
  return json;
}

Expected<void> Profiler::restore(const Json& state) {
  try {
    DYNMO_ASSIGN(known_, cost::parse_profile(state.at("known"), "state of the profiler"));
    fields(*this, [&](const char* key, auto& field) { from_state(state.at(key), field); });
  } catch (const Json::exception& fault) {
    return make_error(ErrorCode::kInternal, "state of the profiler: {}", fault.what());
  }
  const std::size_t layers = known_.layers.size();
  const auto of_layers = [&](const auto& values) {
    return values.empty() || values.size() == layers;
  };
  bool fits = of_layers(owners_) && of_layers(work_) && own_shares_.size() == owners_.size() &&
              std::ranges::all_of(own_changes_, of_layers) &&
              (products_.size() == layers || window_.empty());
  for (const Sample& step : window_) {
    fits = fits && step.layers.size() == layers && step.owners.size() == layers;
  }
  for (const FoundChange& found : found_) fits = fits && found.factors.size() == layers;
  if (fits) return {};
  return make_error(ErrorCode::kInternal, "state of the profiler: not of {} layers", layers);
}

}  // namespace dynmo::control
