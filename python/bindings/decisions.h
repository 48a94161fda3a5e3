// SPDX-License-Identifier: Apache-2.0
#pragma once

// The controller of a live pipeline, told and asked with the dicts of Python.

#include <cstdint>
#include <string_view>

#include "dynmo/control/decisions.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"

namespace dynmo::python {

// One controller of a run. One thread.
class Decisions {
 public:
  // `known` is a "dynmo-profile-1" (names, bytes). `options`, each with a default: balancer,
  // minimum_gain, noise_factor, window, micro_batches, accumulation, steps, horizon_steps,
  // memory_bytes.
  [[nodiscard]] static Expected<Decisions> make(const Json& known, int ranks, const Json& options,
                                                std::int64_t first_step);

  // Takes a step as the ranks exchanged it: `layers` with the fields of cost::LayerSample, `ranks`
  // with those of control::RankFigures, `step_s` since the exchange of the step before. Returns what
  // its record has of all ranks: `imbalance`, `bubble`, `migrate_s`.
  [[nodiscard]] Expected<Json> observe(const Json& step, const Json& plan, int frozen_layers);
  [[nodiscard]] Expected<void> announce(std::string_view what, std::int64_t step);
  // Whether to `migrate`; the fields of the event "decision" but `taken`; `moved_bytes` and `moves`
  // of the plan proposed. Null: there was nothing to plan for.
  [[nodiscard]] Expected<Json> decide(const Json& plan, std::int64_t step, int frozen_layers);
  [[nodiscard]] Expected<double> predicted_step_s(const Json& plan, std::int64_t step,
                                                  int frozen_layers);
  void moved(std::int64_t bytes) { decisions_.moved(Bytes{bytes}); }
  void not_moved() { decisions_.not_moved(); }
  [[nodiscard]] double plan_s() const { return decisions_.own_plan_s(); }
  // A "dynmo-profile-1" as measured; null before the first step.
  [[nodiscard]] Json costs(int frozen_layers) const;
  // The event of the newest decision; null before the first.
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
