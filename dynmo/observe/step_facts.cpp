// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/step_facts.h"

#include <cmath>

namespace dynmo::observe {
namespace {

// Calls `visit` with the field of each fact.
template <typename Facts, typename Visit>
void for_each_field(Facts& facts, Visit visit) {
  for (const StepFact& fact : kStepFacts) {
    std::visit([&](auto member) { visit(facts.*member); }, fact.field);
  }
}

Json value_of(double value) { return dynmo::internal::measured(value); }
Json value_of(int value) { return value; }
Json value_of(Bytes value) { return value.value; }

void set(const Json& from, double& value) {
  value = from.is_null() ? std::nan("") : from.get<double>();
}
void set(const Json& from, int& value) { from.get_to(value); }
void set(const Json& from, Bytes& value) { from.get_to(value.value); }

}  // namespace

Json fact_values(const StepFacts& facts) {
  Json values = Json::array();
  for_each_field(facts, [&](const auto& value) { values.push_back(value_of(value)); });
  return values;
}

StepFacts parse_fact_values(const Json& values) {
  StepFacts facts;
  std::size_t at = 0;
  for_each_field(facts, [&](auto& value) { set(values.at(at++), value); });
  return facts;
}

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
