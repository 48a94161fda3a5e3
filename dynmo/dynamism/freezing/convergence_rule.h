// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rules kNorm and kPlasticity of a training share this file: a layer freezes once a number that
// says how much it still learns has become small. A value and pure functions of what all ranks have
// alike, so that all ranks decide alike and a resumed run decides as the one before.
//
// A moving average of every layer's number is compared with what it was at first. A layer has
// converged when the average is below `tolerance` of that, and is ready when it was so in
// `patience` checks in a row. The longest prefix of ready layers freezes.
//
// kNorm: the number is the norm of the layer's gradients in a step, compared with the average at
// the first check. This is the simplest of the rules that follow gradients (AutoFreeze, Liu et al.,
// 2021, compares gradients accumulated over intervals). We leave out the division by the norm of
// the weights: a layer is compared with itself, and its weights change little beside its gradients.
//
// kPlasticity: the number is the slope of the layer's plasticity between two checks (plasticity.h).
// The first check takes references alone, the second one the slopes that others are compared with.
//
// Layers train again once the learning rate has dropped, as in Egeria (Wang et al., EuroSys'23),
// which unfreezes all of them when it has dropped ten times. The averages begin anew then; what
// they are compared with stays.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/dynamism/freezing/options.h"

namespace dynmo::dynamism {

// The state of the rule.
struct ConvergenceRule {
  int frozen = 0;  // layers of the prefix
  // The learning rate of the step after which the first of them froze; 0 where none is frozen.
  double learning_rate = 0;
  std::vector<double> average = {};  // by layer; empty: no number has been seen
  std::vector<double> first = {};    // what averages are compared with; empty: not known yet
  std::vector<std::int64_t> converged = {};  // by layer: checks in a row, up to now
  friend bool operator==(const ConvergenceRule&, const ConvergenceRule&) = default;
};

// The step before which the first check is; the others follow `check_every` steps apart.
[[nodiscard]] std::int64_t first_check(const FreezingOptions& options, std::int64_t steps);
// Whether a check is due before this step.
[[nodiscard]] bool is_check(const FreezingOptions& options, std::int64_t step, std::int64_t steps);
// How many layers of so many may freeze: never the head.
[[nodiscard]] int max_frozen(const FreezingOptions& options, std::size_t layers);

// A step that was done.
struct NormStep {
  std::int64_t step = 0;
  std::int64_t steps = 1;  // of the run
  double learning_rate = 0;
  const std::vector<double>& squared_norms;  // of the gradients, by layer
};

// kNorm. Also checks, where a check is due before the next step. A step whose norms are NaN or Inf
// leaves the averages as they were. Requires valid options and equally many layers in every step.
[[nodiscard]] ConvergenceRule after_step(ConvergenceRule rule, const FreezingOptions& options,
                                         const NormStep& done);
// kPlasticity: a check has found these slopes, by layer. Slopes of NaN or Inf change nothing, too.
[[nodiscard]] ConvergenceRule after_check(ConvergenceRule rule, const FreezingOptions& options,
                                          double learning_rate, const std::vector<double>& slopes);
// Before a step with this learning rate. Nothing changes where nothing is frozen.
[[nodiscard]] ConvergenceRule unfrozen_below(ConvergenceRule rule, const FreezingOptions& options,
                                             double learning_rate);
// For the layer that is to freeze next: its average over the first one. 0: not known yet.
[[nodiscard]] double next_to_first(const ConvergenceRule& rule);

[[nodiscard]] Json to_json(const ConvergenceRule& rule);
// kBadInput naming the key that is not as to_json() writes it.
[[nodiscard]] Expected<ConvergenceRule> parse_convergence_rule(const Json& json);

}  // namespace dynmo::dynamism
