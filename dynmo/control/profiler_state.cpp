// SPDX-License-Identifier: Apache-2.0
// Renumbers the ranks of a profiler, and writes and reads its state for new ranks.
#include <set>
#include <utility>

#include "dynmo/control/profiler.h"
#include "dynmo/control/state_json_impl.h"
#include "dynmo/cost/files.h"

namespace dynmo::control {

// Lost ranks get numbers behind the present ones. So the common part of their layers in earlier
// steps is still separate.
void Profiler::ranks_changed(const std::vector<std::optional<Rank>>& before) {
  std::map<Rank, Rank> now;
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (before[i]) now.emplace(*before[i], Rank(static_cast<std::int32_t>(i)));
  }
  std::set<Rank> measured(noise_.owners().begin(), noise_.owners().end());
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
  renumber(noise_.owners());
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
  visit("noise", self.noise_);
  visit("work", self.work_);
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
  bool fits = noise_.fits(layers) && (work_.empty() || work_.size() == layers) &&
              (products_.size() == layers || window_.empty());
  for (const Sample& step : window_) {
    fits = fits && step.layers.size() == layers && step.owners.size() == layers;
  }
  for (const FoundChange& found : found_) fits = fits && found.factors.size() == layers;
  if (fits) return {};
  return make_error(ErrorCode::kInternal, "state of the profiler: not of {} layers", layers);
}

}  // namespace dynmo::control
