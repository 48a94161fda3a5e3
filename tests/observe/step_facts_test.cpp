// SPDX-License-Identifier: Apache-2.0
// What the list of a step's numbers says holds for all that follow it: records, summaries, sums.
#include "dynmo/observe/step_facts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <set>
#include <type_traits>
#include <vector>

#include "dynmo/observe/step_record.h"
#include "dynmo/observe/summary.h"

namespace dynmo::observe {
namespace {

// Each fact with another value, as its type has it.
StepFacts numbered(int first) {
  StepFacts facts;
  for (const StepFact& fact : kStepFacts) {
    std::visit(
        [&](auto member) {
          using Value = std::remove_reference_t<decltype(facts.*member)>;
          facts.*member = Value(first++);
        },
        fact.field);
  }
  return facts;
}

// A field that is left out would be missing from records silently.
TEST(StepFacts, TheListHasEveryFieldOnce) {
  const StepFacts facts;
  const auto* begin = reinterpret_cast<const std::byte*>(&facts);
  std::vector<int> covered(sizeof facts);
  std::set<std::string_view> names;
  for (const StepFact& fact : kStepFacts) {
    EXPECT_TRUE(names.insert(fact.name).second) << fact.name;
    std::visit(
        [&](auto member) {
          const auto at = reinterpret_cast<const std::byte*>(&(facts.*member)) - begin;
          for (std::size_t i = 0; i < sizeof(facts.*member); ++i) {
            ++covered[static_cast<std::size_t>(at) + i];
          }
        },
        fact.field);
  }
  // (An int may have four bytes of padding behind it.)
  int uncovered = 0;
  for (const int count : covered) {
    EXPECT_LE(count, 1);
    uncovered = count == 0 ? uncovered + 1 : 0;
    EXPECT_LE(uncovered, 4);
  }
}

TEST(StepFacts, AreInRecordsByTheirNamesAndReadBack) {
  StepRecord record{numbered(3), /*step=*/7};
  const Json json = record_json(record);
  for (const StepFact& fact : kStepFacts) EXPECT_TRUE(json.contains(fact.name)) << fact.name;
  const auto read = parse_record(json, "a test");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, record);
  record.loss = std::nan("");
  EXPECT_TRUE(std::isnan(parse_record(record_json(record), "a test")->loss));
}

TEST(StepFacts, AreSummedOrAveragedAsTheListSays) {
  StepFacts sums;
  StepFacts means;
  for (const int first : {1, 5}) {
    add_facts(sums, numbered(first), OverSteps::kSum);
    add_facts(means, numbered(first), OverSteps::kMean);
  }
  make_means(means, 2);
  int at = 0;
  for (const StepFact& fact : kStepFacts) {
    ++at;  // 1 + 5 in the first fact, 2 + 6 in the second, ...
    const auto value = [&](const StepFacts& facts) {
      return std::visit(
          [&](auto member) {
            if constexpr (std::is_same_v<decltype(member), Bytes StepFacts::*>) {
              return static_cast<double>((facts.*member).value);
            } else {
              return static_cast<double>(facts.*member);
            }
          },
          fact.field);
    };
    EXPECT_EQ(value(sums), fact.over_steps == OverSteps::kSum ? 2 * at + 4 : 0) << fact.name;
    EXPECT_EQ(value(means), fact.over_steps == OverSteps::kMean ? at + 2 : 0) << fact.name;
  }
}

// Those with a label have lines of their own in the report of a run (run_report_test).
TEST(StepFacts, OfARunAreInItsSummary) {
  Summary summary;
  RunSummary run;
  static_cast<StepFacts&>(run) = numbered(2);
  run.ranks = 1;
  summary.runs = {run};
  const Json json = summary_json(summary);
  for (const StepFact& fact : kStepFacts) {
    EXPECT_EQ(json["runs"][0].contains(fact.name), fact.over_steps != OverSteps::kNothing)
        << fact.name;
  }
}

}  // namespace
}  // namespace dynmo::observe
