// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/step_facts.h"

namespace dynmo::observe {

void add_facts(StepFacts& sums, const StepFacts& step, OverSteps over_steps) {
  for (const StepFact& fact : kStepFacts) {
    if (fact.over_steps != over_steps) continue;
    std::visit([&](auto member) { sums.*member += step.*member; }, fact.field);
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
