// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rule kNorm of a training: a layer freezes once its gradients have become small. A value and
// pure functions of what all ranks have alike, so that all ranks decide alike and a resumed run
// decides as the one before.
//
// A moving average of the norm of every layer's gradients is compared with what it was at the first
// check. A layer is still when the average is below `tolerance` of that, and is ready when it was
// so in `patience` checks in a row. The longest prefix of ready layers freezes. This is the
// simplest of the rules that follow gradients (AutoFreeze, Liu et al., 2021, compares gradients
// accumulated over intervals). We leave out the division by the norm of the weights: a layer is
// compared with itself, and its weights change little beside its gradients.
//
// Layers train again once the learning rate has dropped, as in Egeria (Wang et al., EuroSys'23),
// which unfreezes all of them when it has dropped ten times. The averages begin anew then; what
// they are compared with stays.

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/dynamism/freezing/options.h"

namespace dynmo::dynamism {

// What the rule remembers.
struct NormRule {
  int frozen = 0;  // layers of the prefix
  // Of the step after which the first of them froze; 0 where none is frozen.
  double learning_rate = 0;
  std::vector<double> average = {};      // by layer; empty: no step has been seen
  std::vector<double> first = {};        // the averages at the first check; empty: there was none
  std::vector<std::int64_t> still = {};  // by layer: checks in a row, up to now
  friend bool operator==(const NormRule&, const NormRule&) = default;
};

// A step that was done.
struct NormStep {
  std::int64_t step = 0;
  std::int64_t steps = 1;  // of the run
  double learning_rate = 0;
  const std::vector<double>& squared_norms;  // of the gradients, by layer
};

// The step before which the first check is; the others follow `check_every` steps apart.
[[nodiscard]] std::int64_t first_check(const FreezingOptions& options, std::int64_t steps);
// Also checks, where a check is due before the next step. A step whose norms are no numbers leaves
// the averages as they were. Requires valid options and equally many layers in every step.
[[nodiscard]] NormRule after_step(NormRule rule, const FreezingOptions& options,
                                  const NormStep& done);
// Before a step with this learning rate. Nothing changes where nothing is frozen.
[[nodiscard]] NormRule unfrozen_below(NormRule rule, const FreezingOptions& options,
                                      double learning_rate);
// Of the layer that is to freeze next: its average to that at the first check. 0: not known yet.
[[nodiscard]] double next_norm(const NormRule& rule);

[[nodiscard]] Json to_json(const NormRule& rule);
// kBadInput naming the key that is not as to_json() writes it.
[[nodiscard]] Expected<NormRule> parse_norm_rule(const Json& json);

}  // namespace dynmo::dynamism
