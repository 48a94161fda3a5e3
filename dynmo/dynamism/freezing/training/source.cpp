// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/dynamism/combinations.h"
#include "dynmo/dynamism/freezing/convergence_rule.h"
#include "dynmo/dynamism/freezing/schedule.h"
#include "dynmo/dynamism/freezing/training/plasticity.h"
#include "dynmo/dynamism/freezing/training/reference.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/head_slice.h"

namespace dynmo::dynamism {
namespace {

// Returns the number of layers that shares and rules refer to. A head counts as one, the model's or
// an exit's. The model's head never freezes.
template <typename Layers>
std::size_t whole_head(const Layers& layers) {
  return static_cast<std::size_t>(model::layers_with_whole_head(layers));
}

class FreezingSource : public Source {
 public:
  FreezingSource(const FreezingOptions& options, std::int64_t steps)
      : options_(options), steps_(steps) {
    const auto valid = dynamism::check(options);
    DYNMO_CHECK(valid.has_value(), "valid options of freezing: {}", valid.error().message);
  }

  std::string_view name() const override { return "freezing"; }

  // Also checks the ties of a model that is not made from a config, whose checks come earlier.
  Expected<void> check(const Setting& setting) const override {
    const TrainingSetting known{.tied_embeddings = !setting.ties.empty()};
    DYNMO_TRY(check_training(options_, known));
    return check_combination(std::array{name()}, known);
  }

 protected:
  [[nodiscard]] const FreezingOptions& options() const { return options_; }
  [[nodiscard]] std::int64_t steps() const { return steps_; }

 private:
  FreezingOptions options_;
  std::int64_t steps_;
};

// The prefix is a function of the step, so that all ranks agree on it without a message and nothing
// has to be restored.
class ByStep final : public FreezingSource {
 public:
  using FreezingSource::FreezingSource;

  std::optional<int> freezes(const Boundary& now) const override {
    const int layers = model::layers_with_whole_head(now.model);
    return model::layers_up_to(now.model,
                               frozen_layers(options().schedule, now.step, steps(), layers));
  }
  Expected<Change> before_step(const Boundary& now) override {
    return Change{.frozen_layers = freezes(now)};
  }
};

// Freezes by a ConvergenceRule. The prefix is a function of what all steps so far have shown, which
// all ranks know alike.
class ByRule : public FreezingSource {
 public:
  using FreezingSource::FreezingSource;

  std::optional<int> freezes(const Boundary& now) const override {
    const ConvergenceRule next = unfrozen_below(rule_, options(), now.learning_rate);
    return model::layers_up_to(now.model, next.frozen);
  }
  Expected<Change> before_step(const Boundary& now) override {
    rule_ = unfrozen_below(std::move(rule_), options(), now.learning_rate);
    return Change{.frozen_layers = model::layers_up_to(now.model, rule_.frozen)};
  }
  Json state() const override { return to_json(rule_); }
  Expected<void> restore(const Json& state) override {
    DYNMO_ASSIGN(rule_, parse_convergence_rule(state));
    return {};
  }

 protected:
  [[nodiscard]] ConvergenceRule& rule() { return rule_; }
  [[nodiscard]] const ConvergenceRule& rule() const { return rule_; }

 private:
  ConvergenceRule rule_;
};

class ByNorm final : public ByRule {
 public:
  using ByRule::ByRule;

  Expected<void> after_update(const Boundary& now, const Outcome& outcome) override {
    const std::vector<model::WholePlace> places = model::whole_places(now.model);
    std::vector<double> norms(whole_head(now.model), 0.0);
    for (std::size_t i = 0; i < places.size(); ++i) {
      norms[static_cast<std::size_t>(places[i].layer)] += outcome.squared_norms[i];
    }
    rule() = after_step(std::move(rule()), options(),
                        {.step = now.step,
                         .steps = steps(),
                         .learning_rate = now.learning_rate,
                         .squared_norms = norms});
    return {};
  }
  Json figures() const override { return {{"next_norm", next_to_first(rule())}}; }
};

// A check probes before its step and decides after it. So a step that was not finished, because its
// group has ended, has no effect. The next group probes the same again.
class ByPlasticity final : public ByRule {
 public:
  using ByRule::ByRule;

  Expected<void> check(const Setting& setting) const override {
    DYNMO_TRY(ByRule::check(setting));
    for (int i = 0; i < max_frozen(options(), whole_head(setting.model)); ++i) {
      const model::Layer& layer = *setting.model[static_cast<std::size_t>(i)];
      if (layer.floats_passed() > 0) {
        return make_error(ErrorCode::kBadInput,
                          "freezing.rule is plasticity, but layer {} ('{}') is a slice of an "
                          "exit's head: wanted model.head_slices = 1 or another rule",
                          i, layer.name());
      }
      if (has_reference(layer)) continue;
      return make_error(ErrorCode::kBadInput,
                        "freezing.rule is plasticity, but layer {} ('{}') has no buffers for a "
                        "reference: wanted a model as the sources shape it, and sources that add "
                        "to a layer's buffers",
                        i, layer.name());
    }
    return {};
  }

  Expected<void> shape(model::Recipe& recipe) const override {
    const int layers = max_frozen(options(), whole_head(recipe));
    for (int i = 0; i < layers; ++i) {
      auto& layer = recipe.slots[static_cast<std::size_t>(i)].layer;
      layer = with_reference(layer);
    }
    return {};
  }

  Expected<Change> before_step(const Boundary& now) override {
    DYNMO_ASSIGN(const Change change, ByRule::before_step(now));
    slopes_.reset();
    probe_s_ = 0;
    const int end = max_frozen(options(), whole_head(now.model));
    checks_ = is_check(options(), now.step, steps()) && rule().frozen < end;
    if (!checks_ || now.step == first_check(options(), steps())) return change;
    if (rule().average.empty() && !rule().first.empty()) {
      // Frozen layers have begun to train since the last check, so their movement is not that of a
      // full interval. They start again from their first value.
      slopes_ = rule().first;
      return change;
    }
    const auto begin = std::chrono::steady_clock::now();
    DYNMO_ASSIGN(slopes_, plasticity(now, {.first = rule().frozen, .end = end}));
    slopes_->resize(whole_head(now.model));
    probe_s_ = seconds_since(begin);
    return change;
  }

  Expected<void> after_update(const Boundary& now, const Outcome&) override {
    if (!checks_) return {};
    if (slopes_) {
      rule() = after_check(std::move(rule()), options(), now.learning_rate, *slopes_);
    }
    const auto begin = std::chrono::steady_clock::now();
    const int end = max_frozen(options(), whole_head(now.model));
    for (auto& [id, state] : now.states) {
      // A frozen layer has not changed.
      if (id.value < end && !state.frozen) take_reference(*now.model[id.index()], state);
    }
    probe_s_ += seconds_since(begin);
    return {};
  }

  Json figures() const override {
    Json figures = {{"next_slope", next_to_first(rule())}};
    if (probe_s_ > 0) figures["probe_s"] = probe_s_;
    return figures;
  }

 private:
  // Set before a step, for after_update().
  bool checks_ = false;
  std::optional<std::vector<double>> slopes_;  // by layer
  double probe_s_ = 0;                         // of this rank
};

}  // namespace

std::unique_ptr<Source> freezing_in_training(const SourceOptions& options, std::int64_t steps) {
  return make_freezing_source(options.get<FreezingOptions>(), steps);
}

std::unique_ptr<Source> make_freezing_source(const FreezingOptions& options, std::int64_t steps) {
  if (options.rule == FreezingRule::kNorm) return std::make_unique<ByNorm>(options, steps);
  if (options.rule == FreezingRule::kPlasticity) {
    return std::make_unique<ByPlasticity>(options, steps);
  }
  return std::make_unique<ByStep>(options, steps);
}

}  // namespace dynmo::dynamism
