// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/step_facts.h"

#include <algorithm>

namespace dynmo::observe {

void add_facts(StepFacts& sums, const StepFacts& step, OverSteps over_steps) {
  for (const StepFact& fact : kStepFacts) {
    if (fact.over_steps != over_steps) continue;
    const auto add = [&](auto member) {
      if (over_steps == OverSteps::kMax) {
        sums.*member = std::max(sums.*member, step.*member);
      } else {
        sums.*member += step.*member;
      }
    };
    std::visit(add, fact.field);
  }
}

void make_means(StepFacts& sums, std::size_t steps) {
  if (steps == 0) return;
  for (const StepFact& fact : kStepFacts) {
    if (fact.over_steps != OverSteps::kMean) continue;
    if (const auto* member = std::get_if<double StepFacts::*>(&fact.field)) {
      sums.*(*member) /= static_cast<double>(steps);
    }
  }
}

}  // namespace dynmo::observe
