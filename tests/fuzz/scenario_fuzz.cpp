// SPDX-License-Identifier: Apache-2.0
// A scenario that is taken is written and read back to the same text. It is not run: that would
// only find large questions slow.
#include "dynmo/scenario/scenario.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  const auto taken = scenario::parse_scenario(text, "fuzz.toml");
  if (!taken) return refused(taken.error());
  const std::string written = scenario::to_toml(*taken);
  const auto again = scenario::parse_scenario(written, "written.toml");
  DYNMO_CHECK(again.has_value(), "a scenario that reads back, got: {}", again.error().message);
  DYNMO_CHECK(scenario::to_toml(*again) == written, "the same scenario, got another");
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {
      "[model]\nfamily = \"llama\"\nblocks = 8\n[cluster]\npipeline_ranks = 16\nmemory = "
      "\"80GiB\"\nbetween_latency = "
      "\"20us\"\nnic_bandwidth = \"50 GB/s\"\n[[event]]\nstep = 3\nleave = [1, 2]\nfailure = "
      "true\n[[event]]\nstep = 9\njoin = [1]\n",
      scenario::to_toml({})};
}

}  // namespace dynmo::fuzz
