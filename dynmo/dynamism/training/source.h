// SPDX-License-Identifier: Apache-2.0
#pragma once

// A source of dynamism in real training changes a model's work while it trains. Each source has a
// folder (dynmo/dynamism/S), or none: examples/custom_source.cpp is built outside of DynMo.
//
// Every rank has its own instance. All instances are equal and make the same decisions, because
// they derive them from values that all ranks have. These are the step, the model, and the figures
// and norms of the last step. So a decision needs no message. State of a layer is in the layer's
// state (parameters, buffers), and moves with the layer. The source owns state that follows from
// exchanged numbers.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/dynamism/source_options.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/recipe.h"
#include "dynmo/model/tie.h"

namespace dynmo::dynamism {

// The settings that a source may refuse before a rank starts.
struct Setting {
  const model::Model& model;
  const std::vector<model::Tie>& ties;
};

// A value that a source has measured on this machine to replace "auto".
struct Measured {
  std::string key;    // in its table
  std::string value;  // as TOML
  std::string why;    // for the user: "as measured"
};

// The state between two steps. Equal on all ranks except for `states`.
struct Boundary {
  std::int64_t step;           // before_step: the next one; after_update: the completed one
  const model::Model& model;   // as shaped
  model::LayerStates& states;  // this rank's
  double learning_rate = 0;    // of the step
  bool imported = false;  // the run began with given weights (train.init), not with random ones
  // In before_step: sums element by element over the ranks of a replica. All call it equally often
  // with equal lengths.
  std::function<Expected<std::vector<std::int64_t>>(std::vector<std::int64_t>)> sum = {};
  // In before_step: runs the run's first micro-batch forward through `layers`, `times` times, as
  // micro-batches 0, 1, ... of a validation. `layers` has the same number and boundaries as the
  // model. All call it equally often. Each rank runs its own layers, with `states`.
  std::function<Expected<void>(const model::Model& layers, int times)> probe = {};
};

// The outcome of the completed step, by layer, equal on all ranks.
struct Outcome {
  const std::vector<std::vector<double>>& figures;  // as Layer::figures() names them
  const std::vector<double>& squared_norms;         // of the gradients
};

// The changes that a source has made. Equal on all ranks.
struct Change {
  // The work of layers has changed, and must be measured again. So the controller need not detect
  // it. Freezing alone does not set it, because its costs follow from those before.
  bool work = false;
  // The number of layers from the first one on that run forward only. Those behind them train, with
  // new moments if they did not before. Unset: no opinion.
  std::optional<int> frozen_layers = {};
  // States have other sizes (model/pruned.h). The costs of their layers follow from the kept
  // weights, and are measured afterwards.
  bool sizes = false;
};

class Source {
 public:
  virtual ~Source() = default;

  [[nodiscard]] virtual std::string_view name() const = 0;  // its table in a config
  // Checks whether the source fits the setting. Returns kBadInput with the conflict.
  [[nodiscard]] virtual Expected<void> check(const Setting&) const { return {}; }
  // Replaces or wraps layers before the model is made, equally on all ranks.
  [[nodiscard]] virtual Expected<void> shape(model::Recipe&) const { return {}; }
  // Returns whether shape() replaces layers. Then it runs before sources that wrap them, and the
  // model cannot run without it, also without training.
  [[nodiscard]] virtual bool replaces_layers() const { return false; }
  // Returns whether its layers decide differently in Pass::kGeneration than in kValidation. Then a
  // validation also reports the loss of kGeneration.
  [[nodiscard]] virtual bool generates_otherwise() const { return false; }
  // Measures the source's keys that are "auto", on all ranks at once, before the first step of a
  // run. The values of rank 0 become those of the run. The run's config keeps them, so a resumed
  // run has them, too. `tokens` are those of a micro-batch.
  [[nodiscard]] virtual std::vector<Measured> measure(const model::Model& /*model*/,
                                                      std::int64_t /*tokens*/) const {
    return {};
  }
  // Returns the number of frozen layers of the next step, from the first layer on, if it is known
  // before before_step(). It is set in the states before any source's before_step(). So a source
  // that skips frozen layers skips the same ones if the step is prepared again.
  [[nodiscard]] virtual std::optional<int> freezes(const Boundary&) const { return std::nullopt; }
  // Prepares the next step. Called once before each step, also before the first one after a start.
  // Called again if the step was not finished, because its group has ended.
  [[nodiscard]] virtual Expected<Change> before_step(const Boundary&) { return Change{}; }
  // Observes a step after its update, also a skipped one. If later steps need parts of the outcome,
  // store them in the layers' states or in the source.
  [[nodiscard]] virtual Expected<void> after_update(const Boundary&, const Outcome&) { return {}; }
  // Returns the work of each layer in the step whose update follows `boundary`. It has any constant
  // unit, and is counted from data that all ranks have. It is 0 for a layer whose work the source
  // does not change. The result is empty if the source counts nothing. With counts, the controller
  // need not measure a change of work, but only the time of a unit (control/profiler.h).
  [[nodiscard]] virtual std::vector<double> work(const Boundary& /*boundary*/,
                                                 const Outcome& /*outcome*/) const {
    return {};
  }
  // Returns further state that a run continues from, for the manifest of a checkpoint. Layers'
  // states are not included. Returns null if there is none.
  [[nodiscard]] virtual Json state() const { return nullptr; }
  [[nodiscard]] virtual Expected<void> restore(const Json&) { return {}; }
  // Returns the source's numbers after a step, for the user: an object in the record of the step.
  // Returns null if there are none.
  [[nodiscard]] virtual Json figures() const { return nullptr; }
  // Returns the figures in a few words, for the progress line, or "" if there are none.
  [[nodiscard]] virtual std::string progress() const { return {}; }
};

using Sources = std::vector<std::unique_ptr<Source>>;
// Makes new sources, in their state at the start of a run of `steps` steps.
using MakeSources = std::function<Sources(std::int64_t steps)>;

// Make the sources of sources.def from a config's tables.
#define DYNMO_SOURCE(name)                                                               \
  [[nodiscard]] std::unique_ptr<Source> name##_in_training(const SourceOptions& options, \
                                                           std::int64_t steps);
#include "dynmo/dynamism/sources.def"
#undef DYNMO_SOURCE

// Returns a function that makes the enabled sources of a config's tables, by sources.def.
[[nodiscard]] MakeSources make_sources(SourceOptions options);

// Calls the function of the same name for all sources of a run, in their order. Changes are merged.
// Work changes if it does in one of them. The longest frozen prefix is used, and set in the states.
[[nodiscard]] Expected<void> check(const Sources& sources, const Setting& setting);
// Calls shape() of all sources, first of those that replace layers. replace_layers() calls only
// these.
[[nodiscard]] Expected<void> shape(const Sources& sources, model::Recipe& recipe);
[[nodiscard]] Expected<void> replace_layers(const Sources& sources, model::Recipe& recipe);
[[nodiscard]] Expected<Change> before_step(const Sources& sources, const Boundary& boundary);
[[nodiscard]] Expected<void> after_update(const Sources& sources, const Boundary& boundary,
                                          const Outcome& outcome);
// Returns the product of the sources' counts, by layer. The result is empty if no source counts.
[[nodiscard]] std::vector<double> work(const Sources& sources, const Boundary& boundary,
                                       const Outcome& outcome);
// Collects the figures of the sources by name.
[[nodiscard]] Json figures(const Sources& sources);
[[nodiscard]] std::string progress(const Sources& sources);  // each after two blanks
[[nodiscard]] Json state(const Sources& sources);
// Restores the sources. Returns kBadInput if the state is of other sources.
[[nodiscard]] Expected<void> restore(const Sources& sources, const Json& state);

}  // namespace dynmo::dynamism
