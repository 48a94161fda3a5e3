// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/source.h"

#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/freezing/load_still_rule.h"
#include "dynmo/dynamism/freezing/load_schedule.h"

namespace dynmo::dynamism {
namespace {

class FreezingSource : public Source {
 public:
  FreezingSource(const FreezingOptions& options, std::int64_t steps)
      : options_(options), steps_(steps) {
    const auto valid = dynamism::check(options);
    DYNMO_CHECK(valid.has_value(), "valid options of freezing: {}", valid.error().message);
  }

  std::string_view name() const override { return "freezing"; }

  // The config of a run has been asked the same before; a model of one's own shows its ties here.
  Expected<void> check(const Setting& setting) const override {
    return check_training(options_, {.tied_embeddings = !setting.ties.empty()});
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

  Expected<Change> before_step(const Boundary& now) override {
    const int layers = static_cast<int>(now.model.size());
    return Change{.frozen_layers = frozen_layers(options().schedule, now.step, steps(), layers)};
  }
};

// The prefix is a function of the gradients of all steps so far, which all ranks know alike.
class ByNorm final : public FreezingSource {
 public:
  using FreezingSource::FreezingSource;

  Expected<Change> before_step(const Boundary& now) override {
    rule_ = unfrozen_below(std::move(rule_), options(), now.learning_rate);
    return Change{.frozen_layers = rule_.frozen};
  }

  Expected<void> after_update(const Boundary& now, const Outcome& outcome) override {
    rule_ = after_step(std::move(rule_), options(),
                       {.step = now.step,
                        .steps = steps(),
                        .learning_rate = now.learning_rate,
                        .squared_norms = outcome.squared_norms});
    return {};
  }

  Json state() const override { return to_json(rule_); }
  Expected<void> restore(const Json& state) override {
    DYNMO_ASSIGN(rule_, parse_still_rule(state));
    return {};
  }
  Json figures() const override { return {{"next_norm", next_to_first(rule_)}}; }

 private:
  StillRule rule_;
};

}  // namespace

std::unique_ptr<Source> freezing_in_training(const SourceOptions& options, std::int64_t steps) {
  return make_freezing_source(options.get<FreezingOptions>(), steps);
}

std::unique_ptr<Source> make_freezing_source(const FreezingOptions& options, std::int64_t steps) {
  if (options.rule == FreezingRule::kNorm) return std::make_unique<ByNorm>(options, steps);
  return std::make_unique<ByStep>(options, steps);
}

}  // namespace dynmo::dynamism
