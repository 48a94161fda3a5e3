// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include "dynmo/observe/step_record.h"
#include "dynmo/observe/summary.h"
#include "dynmo/observe/traffic_log.h"

namespace dynmo::observe {
namespace {

TEST(ObserveGoldens, AStepIsWrittenAsItWasRead) {
  expect_lines_rewritten("observe/goldens/steps.jsonl",
                         [](std::string_view line) -> Expected<std::string> {
                           DYNMO_ASSIGN(const auto records, parse_records(line, "golden"));
                           return record_json(records.at(0)).dump() + "\n";
                         });
}

TEST(ObserveGoldens, TrafficIsWrittenAsItWasRead) {
  expect_lines_rewritten("observe/goldens/traffic.jsonl",
                         [](std::string_view line) -> Expected<std::string> {
                           DYNMO_ASSIGN(const auto intervals, parse_traffic(line, "golden"));
                           return to_json(intervals.at(0)).dump() + "\n";
                         });
}

TEST(ObserveGoldens, ASummaryIsWrittenAsItWasRead) {
  expect_rewritten("observe/goldens/summary.json", [](const Json& json) -> Expected<Json> {
    DYNMO_ASSIGN(const Summary summary, parse_summary(json, "golden"));
    return summary_json(summary);
  });
}

TEST(ObserveGoldens, RefusalsStayTheSame) {
  expect_refusals("observe/goldens/steps.jsonl", [](const std::string& text) -> Expected<void> {
    DYNMO_TRY(parse_records(text, "golden"));
    return {};
  });
  expect_refusals("observe/goldens/traffic.jsonl", [](const std::string& text) -> Expected<void> {
    DYNMO_TRY(parse_traffic(text, "golden"));
    return {};
  });
  expect_refusals("observe/goldens/summary.json", [](const std::string& text) -> Expected<void> {
    DYNMO_TRY(parse_summary(Json::parse(text), "golden"));
    return {};
  });
}

}  // namespace
}  // namespace dynmo::observe
