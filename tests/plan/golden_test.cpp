// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include "dynmo/plan/plan.h"

namespace dynmo::plan {
namespace {

TEST(PlanGoldens, APlanIsWrittenAsItWasRead) {
  for (const char* name : {"plan/goldens/plan.json", "plan/goldens/adaptive_plan.json"}) {
    expect_rewritten(name, [](const Json& json) -> Expected<Json> {
      DYNMO_ASSIGN(const Plan plan, parse_plan(json, "golden"));
      return to_json(plan);
    });
  }
}

TEST(PlanGoldens, RefusalsStayTheSame) {
  for (const char* name : {"plan/goldens/plan.json", "plan/goldens/adaptive_plan.json"}) {
    expect_refusals(name, [](const std::string& text) -> Expected<void> {
      DYNMO_TRY(parse_plan(Json::parse(text), "golden"));
      return {};
    });
  }
}

}  // namespace
}  // namespace dynmo::plan
