// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/source.h"

#include "dynmo/core/check.h"

namespace dynmo::dynamism {
namespace {

// The prefix is a function of the step, so that all ranks agree on it without a message and nothing
// has to be restored.
class FreezingSource final : public Source {
 public:
  FreezingSource(const FreezingSchedule& schedule, std::int64_t steps)
      : schedule_(schedule), steps_(steps) {
    const auto valid = dynamism::check(schedule);
    DYNMO_CHECK(valid.has_value(), "a valid schedule: {}", valid.error().message);
  }

  std::string_view name() const override { return "freezing"; }

  // The config of a run has been asked the same before; a model of one's own shows its ties here.
  Expected<void> check(const Setting& setting) const override {
    return check_training(FreezingOptions{.schedule = schedule_},
                          {.tied_embeddings = !setting.ties.empty()});
  }

  Expected<Change> before_step(const Boundary& boundary) override {
    const int layers = static_cast<int>(boundary.model.size());
    const int frozen = frozen_layers(schedule_, boundary.step, steps_, layers);
    for (auto& [id, state] : boundary.states) {
      if (id.value >= frozen) break;
      if (!state.frozen) model::freeze(state);
    }
    return Change{.frozen_layers = frozen};
  }

 private:
  FreezingSchedule schedule_;
  std::int64_t steps_;
};

}  // namespace

std::unique_ptr<Source> freezing_in_training(const SourceOptions& options, std::int64_t steps) {
  return make_freezing_source(options.get<FreezingOptions>().schedule, steps);
}

std::unique_ptr<Source> make_freezing_source(const FreezingSchedule& schedule, std::int64_t steps) {
  return std::make_unique<FreezingSource>(schedule, steps);
}

}  // namespace dynmo::dynamism
