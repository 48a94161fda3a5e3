// SPDX-License-Identifier: Apache-2.0
#pragma once

// The controller of a live pipeline, with an interface of Python dicts.

#include <cstdint>
#include <string_view>

#include "dynmo/control/decisions.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"

namespace dynmo::python {

// One controller of a run. One thread uses it.
class Decisions {
 public:
  // Makes a controller. `known` is a "dynmo-profile-1" (names, bytes). `options`, each with a
  // default, are balancer, minimum_gain, noise_factor, window, micro_batches, accumulation, steps,
  // horizon_steps and memory_bytes.
  [[nodiscard]] static Expected<Decisions> make(const Json& known, int ranks, const Json& options,
                                                std::int64_t first_step);

  // Adds a step as the ranks exchanged it. `layers` have the fields of cost::LayerSample, and
  // `ranks` those of control::RankFigures. `step_s` is the time since the previous exchange.
  // Returns the common values of its records: `imbalance`, `bubble`, `migrate_s`.
  [[nodiscard]] Expected<Json> observe(const Json& step, const Json& plan, int frozen_layers);
  [[nodiscard]] Expected<void> announce(std::string_view what, std::int64_t step);
  // Decides at a boundary. Returns `migrate`, the fields of the event "decision" except `taken`,
  // and `moved_bytes` and `moves` of the proposed plan. Returns null if there is no cause for a
  // plan.
  [[nodiscard]] Expected<Json> decide(const Json& plan, std::int64_t step, int frozen_layers);
  [[nodiscard]] Expected<double> predicted_step_s(const Json& plan, std::int64_t step,
                                                  int frozen_layers);
  void moved(std::int64_t bytes) { decisions_.moved(Bytes{bytes}); }
  void not_moved() { decisions_.not_moved(); }
  [[nodiscard]] double plan_s() const { return decisions_.own_plan_s(); }
  // Returns the measured "dynmo-profile-1", or null before the first step.
  [[nodiscard]] Json costs(int frozen_layers) const;
  // Returns the event of the newest decision, or null before the first.
  [[nodiscard]] const Json& newest() const { return newest_; }
  [[nodiscard]] const control::Decisions& decisions() const { return decisions_; }

 private:
  explicit Decisions(control::Decisions decisions, int layers)
      : decisions_(std::move(decisions)), layers_(layers) {}
  [[nodiscard]] Expected<plan::Plan> read_plan(const Json& json) const;

  control::Decisions decisions_;
  int layers_;
  Json newest_ = nullptr;
};

}  // namespace dynmo::python
