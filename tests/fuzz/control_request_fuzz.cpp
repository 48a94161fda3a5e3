// SPDX-License-Identifier: Apache-2.0
// What somebody says to the leader of a run: a request that is taken reads back as it was written,
// and a refusal does not repeat it, as who wrote it may not know the run's secret.
#include "dynmo/elastic/control_messages.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

using elastic::Request;
using elastic::RequestKind;

Outcome run_target(std::string_view text) {
  const auto taken = elastic::parse_request(text);
  if (!taken) return refused(taken.error());
  const std::string line = to_line(*taken);
  DYNMO_CHECK(line.find('\n') + 1 == line.size(), "one line, got {}", line);
  const auto again = elastic::parse_request(std::string_view(line).substr(0, line.size() - 1));
  DYNMO_CHECK(again.has_value(), "a request that reads back, got: {}", again.error().message);
  DYNMO_CHECK(to_line(*again) == line, "the same request, got another");
  DYNMO_CHECK(again->newcomer == taken->newcomer && again->build == taken->build,
              "the same newcomer, got another");
  DYNMO_CHECK(elastic::check_same(taken->build, again->build).has_value(), "the same build");
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  const Request join{
      .kind = RequestKind::kJoin,
      .secret = "0123456789abcdef",
      .newcomer = {.id = {0xFEDCBA9876543210ULL}, .number = 3, .host = "h", .pid = 7},
      .build = {.program = "a",
                .libtorch = "2",
                .instruction_set = "AVX2",
                .threads = 1,
                .config = "b",
                .data = "c"}};
  return {to_line(Request{.kind = RequestKind::kStatus, .secret = "s"}),
          to_line(Request{.kind = RequestKind::kPack, .secret = "s", .ranks = 2}),
          to_line(Request{.kind = RequestKind::kDrain, .secret = "s", .member = 4}),
          to_line(Request{.kind = RequestKind::kStop, .secret = "\xC3\x9F\"\\"}), to_line(join)};
}

}  // namespace dynmo::fuzz
