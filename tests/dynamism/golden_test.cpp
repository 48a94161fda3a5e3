// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include "dynmo/dynamism/freezing/convergence_rule.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/dynamism/load_model.h"

namespace dynmo::dynamism {
namespace {

// The text of the trace that was read from `text`.
Expected<std::string> written_again(const std::string& text) {
  DYNMO_ASSIGN(const auto load, parse_trace(text, "golden"));
  const Recording* recording = load->recording();
  if (recording == nullptr) return make_error(ErrorCode::kInternal, "wanted a recording");
  TraceLines lines(TraceLines::Device::kEmulated);
  lines.start(recording->start);
  std::string again;
  for (const auto& [step, observed] : recording->steps) {
    const TraceLines::Measured measured{observed, recording->moving.contains(step)};
    DYNMO_ASSIGN(const std::string line,
                 lines.add(step, load->announced_at(step), load->at(step), &measured));
    again += line;
  }
  return again;
}

TEST(DynamismGoldens, ALoadTraceIsWrittenAsItWasRead) {
  const auto text =
      read_file(std::filesystem::path(DYNMO_TESTS) / "dynamism/goldens/load_trace.jsonl");
  ASSERT_TRUE(text) << text.error().message;
  const auto again = written_again(*text);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(*again, *text);
}

TEST(DynamismGoldens, TheStateOfFreezingIsWrittenAsItWasRead) {
  expect_rewritten("dynamism/goldens/freezing.json", [](const Json& json) -> Expected<Json> {
    DYNMO_ASSIGN(const ConvergenceRule rule, parse_convergence_rule(json));
    return to_json(rule);
  });
}

}  // namespace
}  // namespace dynmo::dynamism
