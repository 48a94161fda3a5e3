// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/step_facts.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "dynmo/observe/number_impl.h"

namespace dynmo::observe {
namespace {

bool is_of(const StepFact& fact, FactsOf of) {
  return of == FactsOf::kStep || fact.over_steps != OverSteps::kNothing;
}

// Calls `visit` with the field of each fact, and the fact.
template <typename Facts, typename Visit>
void for_each_field(Facts& facts, Visit visit) {
  for (const StepFact& fact : kStepFacts) {
    std::visit([&](auto member) { visit(facts.*member, fact); }, fact.field);
  }
}

Json value_of(double value) { return internal::measured(value); }
Json value_of(int value) { return value; }
Json value_of(Bytes value) { return value.value; }

struct Reader {
  JsonObject& object;
  const Json& json;

  void read(const std::string& key, double& value) const {
    value = internal::read_measured(object, json, key, 0.0);
  }
  void read(const std::string& key, int& value) const {
    const std::int64_t given = object.integer(key, 0);
    if (given >= 0 && given <= std::numeric_limits<int>::max()) {
      value = static_cast<int>(given);
      return;
    }
    object.fail(key, fmt::format("is {}, wanted a whole number from 0 to 2^31 - 1", given));
  }
  void read(const std::string& key, Bytes& value) const { value = object.bytes(key, Bytes{0}); }
};

void set(const Json& from, double& value) {
  value = from.is_null() ? std::nan("") : from.get<double>();
}
void set(const Json& from, int& value) { from.get_to(value); }
void set(const Json& from, Bytes& value) { from.get_to(value.value); }

}  // namespace

void write_facts(const StepFacts& facts, FactsOf of, Json& json) {
  for_each_field(facts, [&](const auto& value, const StepFact& fact) {
    if (is_of(fact, of)) json[std::string(fact.name)] = value_of(value);
  });
}

void read_facts(JsonObject& object, const Json& json, FactsOf of, StepFacts& facts) {
  for_each_field(facts, [&](auto& value, const StepFact& fact) {
    if (is_of(fact, of)) Reader{object, json}.read(std::string(fact.name), value);
  });
}

Json fact_values(const StepFacts& facts) {
  Json values = Json::array();
  for_each_field(facts,
                 [&](const auto& value, const StepFact&) { values.push_back(value_of(value)); });
  return values;
}

StepFacts parse_fact_values(const Json& values) {
  StepFacts facts;
  std::size_t at = 0;
  for_each_field(facts, [&](auto& value, const StepFact&) { set(values.at(at++), value); });
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
