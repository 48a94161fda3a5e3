// SPDX-License-Identifier: Apache-2.0
#pragma once

// A source of dynamism in real training: what changes a model's work while it trains. One folder
// each (dynmo/dynamism/S), or none: examples/custom_source.cpp is built outside of DynMo.
//
// Every rank has an instance of its own; all are equal and take the same decisions, because they
// derive them from values that all ranks have: the step, the model, the figures and norms of the
// last step. So nothing has to be sent when a source changes its mind. What belongs to a layer is
// in the layer's state (parameters, buffers), where it moves with the layer; the source owns what
// follows from exchanged numbers.

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

// A value that a source has measured on this machine in place of "auto".
struct Measured {
  std::string key;    // in its table
  std::string value;  // as TOML
  std::string why;    // for people: "as measured"
};

// Between two steps. Equal on all ranks but for `states`.
struct Boundary {
  std::int64_t step;           // before_step: the one that comes; after_update: the one just done
  const model::Model& model;   // as shaped
  model::LayerStates& states;  // this rank's
  double learning_rate = 0;    // of the step
  bool imported = false;       // the run began with given weights (train.init), not with drawn ones
  // In before_step: element by element over the ranks of a replica. All call it equally often with
  // equal lengths.
  std::function<Expected<std::vector<std::int64_t>>(std::vector<std::int64_t>)> sum = {};
  // In before_step: runs the run's first micro-batch forward through `layers`, as many as the model
  // has and with the same boundaries, `times` times as micro-batches 0, 1, ... of a validation. All
  // call it equally often; each rank runs its own layers, with `states`.
  std::function<Expected<void>(const model::Model& layers, int times)> probe = {};
};

// The outcome of the step just done, by layer, as all ranks know it.
struct Outcome {
  const std::vector<std::vector<double>>& figures;  // as Layer::figures() names them
  const std::vector<double>& squared_norms;         // of the gradients
};

// The changes that a source has made; equal on all ranks.
struct Change {
  // The work of layers is another from now on, and has to be measured anew: the controller need not
  // find it out. Not of freezing alone, whose costs follow from those before.
  bool work = false;
  // How many layers from the first one on run forward only; those behind them train, with new
  // moments where they did not. Unset: no opinion.
  std::optional<int> frozen_layers = {};
  // States have other sizes (model/pruned.h): what their layers cost follows from what is left, and
  // is measured afterwards.
  bool sizes = false;
};

class Source {
 public:
  virtual ~Source() = default;

  [[nodiscard]] virtual std::string_view name() const = 0;  // its table in a config
  // kBadInput naming what does not go together.
  [[nodiscard]] virtual Expected<void> check(const Setting&) const { return {}; }
  // Replaces or wraps layers before the model is made, on all ranks alike.
  [[nodiscard]] virtual Expected<void> shape(model::Recipe&) const { return {}; }
  // Its shape() puts layers in the place of others, so that it comes before those that wrap them,
  // and the model runs in no other shape, also without training.
  [[nodiscard]] virtual bool replaces_layers() const { return false; }
  // Its layers take other decisions in Pass::kGeneration than in kValidation, which a validation
  // tells the loss of, too.
  [[nodiscard]] virtual bool generates_otherwise() const { return false; }
  // Its keys that are "auto", on all ranks at once, before the first step of a run: rank 0's are
  // those of the run, stand in its config, and are the ones that a resumed run has. `tokens` are
  // those of a micro-batch.
  [[nodiscard]] virtual std::vector<Measured> measure(const model::Model& /*model*/,
                                                      std::int64_t /*tokens*/) const {
    return {};
  }
  // The frozen prefix of the step that comes, where the source knows it beforehand, as before_step
  // will say. The states have it when before_step of all sources is called, so that one which
  // leaves frozen layers alone leaves the same ones alone when it is asked again.
  [[nodiscard]] virtual std::optional<int> freezes(const Boundary&) const { return std::nullopt; }
  // Once before each step, also before the first one after a start; again where the step was not
  // finished, as its group has ended.
  [[nodiscard]] virtual Expected<Change> before_step(const Boundary&) { return Change{}; }
  // After the update of a step, of a skipped one, too. What later steps need of the outcome belongs
  // into the layers' states or into the source's own.
  [[nodiscard]] virtual Expected<void> after_update(const Boundary&, const Outcome&) { return {}; }
  // Returns the work of each layer in the step that `boundary` comes before the update of, in any
  // unit that stays the same, counted from what all ranks know alike; 0 of a layer whose work the
  // source does not change. Empty: it counts nothing. So the controller need not measure a change
  // of work, but only the time of a unit (control/profiler.h).
  [[nodiscard]] virtual std::vector<double> work(const Boundary& /*boundary*/,
                                                 const Outcome& /*outcome*/) const {
    return {};
  }
  // Returns the state besides the layers' states that a run continues from: in the manifest of a
  // checkpoint. null: nothing.
  [[nodiscard]] virtual Json state() const { return nullptr; }
  [[nodiscard]] virtual Expected<void> restore(const Json&) { return {}; }
  // Its numbers after a step, for people: an object in the record of the step. null: none.
  [[nodiscard]] virtual Json figures() const { return nullptr; }
  // The same in a few words, for the line that tells how training goes on. Empty: none.
  [[nodiscard]] virtual std::string progress() const { return {}; }
};

using Sources = std::vector<std::unique_ptr<Source>>;
// Each call makes new ones, as they are when a run of `steps` steps starts.
using MakeSources = std::function<Sources(std::int64_t steps)>;

// Make the sources of sources.def from a config's tables.
#define DYNMO_SOURCE(name)                                                               \
  [[nodiscard]] std::unique_ptr<Source> name##_in_training(const SourceOptions& options, \
                                                           std::int64_t steps);
#include "dynmo/dynamism/sources.def"
#undef DYNMO_SOURCE

// The enabled sources of a config's tables, by sources.def.
[[nodiscard]] MakeSources make_sources(SourceOptions options);

// The calls above for all sources of a run, in their order. Changes are merged: work changes if it
// does in one of them, the longest frozen prefix wins, which is put into the states.
[[nodiscard]] Expected<void> check(const Sources& sources, const Setting& setting);
// (Of shape: those that replace layers first.)
[[nodiscard]] Expected<void> shape(const Sources& sources, model::Recipe& recipe);
[[nodiscard]] Expected<void> replace_layers(const Sources& sources, model::Recipe& recipe);
[[nodiscard]] Expected<Change> before_step(const Sources& sources, const Boundary& boundary);
[[nodiscard]] Expected<void> after_update(const Sources& sources, const Boundary& boundary,
                                          const Outcome& outcome);
// The product of what the sources count, by layer; empty: none does.
[[nodiscard]] std::vector<double> work(const Sources& sources, const Boundary& boundary,
                                       const Outcome& outcome);
// Collects the figures of the sources by name. kBadInput where the state is of other sources.
[[nodiscard]] Json figures(const Sources& sources);
[[nodiscard]] std::string progress(const Sources& sources);  // each after two blanks
[[nodiscard]] Json state(const Sources& sources);
[[nodiscard]] Expected<void> restore(const Sources& sources, const Json& state);

}  // namespace dynmo::dynamism
