// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/training/source.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace dynmo::dynamism {

MakeSources make_sources(SourceOptions options) {
  return [options = std::move(options)](std::int64_t steps) {
    Sources sources;
    const std::vector<std::string_view> enabled = options.enabled_tables();
#define DYNMO_SOURCE(name)                                        \
  if (std::ranges::count(enabled, std::string_view(#name)) > 0) { \
    sources.push_back(name##_in_training(options, steps));        \
  }
#include "dynmo/dynamism/sources.def"
#undef DYNMO_SOURCE
    return sources;
  };
}

namespace {

Change both(const Change& a, const Change& b) {
  Change change{
      .work = a.work || b.work, .frozen_layers = a.frozen_layers, .sizes = a.sizes || b.sizes};
  if (b.frozen_layers) {
    change.frozen_layers = std::max(*b.frozen_layers, a.frozen_layers.value_or(0));
  }
  return change;
}

void set_frozen(model::LayerStates& states, int layers) {
  for (auto& [id, state] : states) {
    if (id.value >= layers) {
      model::unfreeze(state);
    } else if (!state.frozen) {
      model::freeze(state);
    }
  }
}

// Returns an object with the results of `get` by the source's name, without null ones.
template <typename Get>
Json by_name(const Sources& sources, Get get) {
  Json all = Json::object();
  for (const auto& source : sources) {
    Json own = get(*source);
    if (!own.is_null()) all[std::string(source->name())] = std::move(own);
  }
  return all;
}

}  // namespace

Expected<void> check(const Sources& sources, const Setting& setting) {
  for (const auto& source : sources) DYNMO_TRY(source->check(setting));
  return {};
}

Expected<void> replace_layers(const Sources& sources, model::Recipe& recipe) {
  for (const auto& source : sources) {
    if (source->replaces_layers()) DYNMO_TRY(source->shape(recipe));
  }
  return {};
}

Expected<void> shape(const Sources& sources, model::Recipe& recipe) {
  DYNMO_TRY(replace_layers(sources, recipe));
  for (const auto& source : sources) {
    if (!source->replaces_layers()) DYNMO_TRY(source->shape(recipe));
  }
  return {};
}

Expected<Change> before_step(const Sources& sources, const Boundary& boundary) {
  std::optional<int> frozen;
  for (const auto& source : sources) frozen = std::max(frozen, source->freezes(boundary));
  if (frozen) set_frozen(boundary.states, *frozen);
  Change all;
  for (const auto& source : sources) {
    DYNMO_ASSIGN(const Change change, source->before_step(boundary));
    all = both(all, change);
  }
  if (all.frozen_layers) set_frozen(boundary.states, *all.frozen_layers);
  return all;
}

Expected<void> after_update(const Sources& sources, const Boundary& boundary,
                            const Outcome& outcome) {
  for (const auto& source : sources) DYNMO_TRY(source->after_update(boundary, outcome));
  return {};
}

std::vector<double> work(const Sources& sources, const Boundary& boundary, const Outcome& outcome) {
  std::vector<double> all;
  for (const auto& source : sources) {
    const std::vector<double> own = source->work(boundary, outcome);
    if (own.empty()) continue;
    all.resize(own.size(), 0.0);
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (own[i] > 0) all[i] = all[i] > 0 ? all[i] * own[i] : own[i];
    }
  }
  return all;
}

Json figures(const Sources& sources) {
  return by_name(sources, [](const Source& source) { return source.figures(); });
}

std::string progress(const Sources& sources) {
  std::string all;
  for (const auto& source : sources) {
    if (const std::string own = source->progress(); !own.empty()) all += "  " + own;
  }
  return all;
}

Json state(const Sources& sources) {
  return by_name(sources, [](const Source& source) { return source.state(); });
}

Expected<void> restore(const Sources& sources, const Json& state) {
  for (const auto& [name, own] : state.items()) {
    const auto found = std::ranges::find_if(
        sources,
        [&, wanted = std::string_view(name)](const auto& s) { return s->name() == wanted; });
    if (found == sources.end()) {
      return make_error(ErrorCode::kBadInput,
                        "the checkpoint holds the state of source '{}', which this run does not "
                        "have; wanted the sources of its run",
                        name);
    }
    DYNMO_TRY((*found)->restore(own));
  }
  return {};
}

}  // namespace dynmo::dynamism
