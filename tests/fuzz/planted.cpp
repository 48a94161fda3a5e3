// SPDX-License-Identifier: Apache-2.0
// A target with a fault that only a change of value reaches: the driver that does not find it
// within its usual executions is no good.
#include "dynmo/core/json.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  const auto json = parse_json(text, "planted.json");
  if (!json) return refused(json.error());
  JsonObject object(*json, "planted.json");
  const std::int64_t ranks = object.integer("ranks");
  if (const auto done = object.finish(); !done) return refused(done.error());
  DYNMO_CHECK(ranks < (std::int64_t{1} << 40), "the planted fault, got {}", ranks);
  return Outcome::kTaken;
}

std::vector<std::string> seeds() { return {R"({"ranks": 4})"}; }

}  // namespace dynmo::fuzz
