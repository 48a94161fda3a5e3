// SPDX-License-Identifier: Apache-2.0
// Counts of experts that are taken from records have one size in all steps and blocks, and
// straggler factors of them are numbers, also of a block without tokens.
#include <cmath>
#include <vector>

#include "dynmo/dynamism/moe/load.h"
#include "dynmo/dynamism/moe/load_counts.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  const auto counts = dynamism::parse_counts(text, "rank-0.jsonl");
  if (!counts) return refused(counts.error());
  const std::size_t blocks = counts->steps.begin()->second.size();
  for (const auto& [step, own] : counts->steps) {
    DYNMO_CHECK(own.size() == blocks && !own.empty(), "{} blocks, got {}", blocks, own.size());
    for (const std::vector<double>& block : own) {
      DYNMO_CHECK(std::ssize(block) == counts->experts, "{} experts, got {}", counts->experts,
                  block.size());
      const double factor = dynamism::straggler_factor(block, 1, 1e300);
      DYNMO_CHECK(std::isfinite(factor) && factor > 0, "a factor above 0, got {}", factor);
    }
    DYNMO_CHECK(&counts->at(step) == &own, "the counts of step {}", step);
  }
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {R"({"step": 0, "sources": {"moe": {"counts": [[1, 2, 3, 6], [3, 3, 3, 3]]}}}
{"step": 1, "loss": 2.5}
{"step": 5, "sources": {"moe": {"counts": [[0, 0, 0, 8], [8, 0, 0, 0]], "entropy": [1, 1]}}}
)",
          R"({"step": 3, "sources": {"moe": {"counts": [[1e15, 1]]}}})",
          R"({"step": 7, "sources": {"moe": {"counts": [[8, 8], [0, 0]]}}})"};
}

}  // namespace dynmo::fuzz
