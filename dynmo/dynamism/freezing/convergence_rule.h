// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rules kNorm and kPlasticity of a training. A layer freezes once a number that measures its
// learning has become small. The rule is a value and pure functions of data that all ranks have. So
// all ranks decide equally, and a resumed run decides like the original.
//
// A moving average of every layer's number is compared with its first value. A layer has converged
// if the average is below `tolerance` of that. It is ready after `patience` converged checks in a
// row. The longest prefix of ready layers freezes.
//
// kNorm: the number is the norm of the layer's gradients in a step. It is compared with the average
// at the first check. This is the simplest of the rules that follow gradients. (AutoFreeze, Liu et
// al., 2021, compares gradients accumulated over intervals.) We omit the division by the norm of
// the weights. A layer is compared with itself, and its weights change little compared with its
// gradients.
//
// kPlasticity: the number is the slope of the layer's plasticity between two checks (plasticity.h).
// The first check takes references only. The second one finds the slopes with which others are
// compared.
//
// Layers train again once the learning rate has dropped. Egeria (Wang et al., EuroSys'23) unfreezes
// all of them after a tenfold drop. Then the averages start again, but their reference values stay.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/dynamism/freezing/options.h"

namespace dynmo::dynamism {

struct ConvergenceRule {
  int frozen = 0;  // layers of the prefix
  // The learning rate of the step after which the first of them froze, or 0 if none is frozen.
  double learning_rate = 0;
  std::vector<double> average = {};          // by layer; empty: no number so far
  std::vector<double> first = {};            // reference values of averages; empty: not known yet
  std::vector<std::int64_t> converged = {};  // by layer: checks in a row, up to now
  friend bool operator==(const ConvergenceRule&, const ConvergenceRule&) = default;
};

// Returns the step before which the first check is. The others follow `check_every` steps apart.
[[nodiscard]] std::int64_t first_check(const FreezingOptions& options, std::int64_t steps);
// Returns whether a check is due before this step.
[[nodiscard]] bool is_check(const FreezingOptions& options, std::int64_t step, std::int64_t steps);
// Returns the largest number of the `layers` layers that may freeze. The last layer, the head,
// never freezes.
[[nodiscard]] int max_frozen(const FreezingOptions& options, std::size_t layers);

struct NormStep {
  std::int64_t step = 0;
  std::int64_t steps = 1;  // of the run
  double learning_rate = 0;
  const std::vector<double>& squared_norms;  // of the gradients, by layer
};

// Advances kNorm by a step, and checks if a check is due before the next one. A step whose norms
// are NaN or Inf does not change the averages. Requires valid options and the same number of layers
// in every step.
[[nodiscard]] ConvergenceRule after_step(ConvergenceRule rule, const FreezingOptions& options,
                                         const NormStep& done);
// Advances kPlasticity by a check with these slopes, by layer. Slopes of NaN or Inf change
// nothing.
[[nodiscard]] ConvergenceRule after_check(ConvergenceRule rule, const FreezingOptions& options,
                                          double learning_rate, const std::vector<double>& slopes);
// Unfreezes all layers before a step with this learning rate, if it has dropped enough. Changes
// nothing if no layer is frozen.
[[nodiscard]] ConvergenceRule unfrozen_below(ConvergenceRule rule, const FreezingOptions& options,
                                             double learning_rate);
// Returns the average of the next layer to freeze, divided by the first value of that layer.
// Returns 0 if one of them is not known yet.
[[nodiscard]] double next_to_first(const ConvergenceRule& rule);

[[nodiscard]] Json to_json(const ConvergenceRule& rule);
// Parses the output of to_json(). Returns kBadInput with the faulty key.
[[nodiscard]] Expected<ConvergenceRule> parse_convergence_rule(const Json& json);

}  // namespace dynmo::dynamism
