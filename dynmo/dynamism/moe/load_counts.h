// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts of tokens that a training gave to its experts, from the records of its steps, so that a
// load model has the imbalance of a real router.

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::dynamism {

struct RecordedCounts {
  // For each step, then block: assignments of each expert, before drops.
  std::map<std::int64_t, std::vector<std::vector<double>>> steps;
  std::int64_t experts = 0;

  // Returns the counts of the step or of the last one before it; before the first, those of the
  // first. Requires a step.
  [[nodiscard]] const std::vector<std::vector<double>>& at(std::int64_t step) const;
};

// Lines of a RUN/records/rank-R.jsonl: those with sources.moe.counts are taken, and there has to be
// one. kBadInput naming `origin` and line: no JSON, counts below 0, above 1e15 or of other sizes
// than before, a block without any. A last line without its newline is passed over if it cannot be
// read.
[[nodiscard]] Expected<RecordedCounts> parse_counts(std::string_view text, std::string_view origin);
[[nodiscard]] Expected<RecordedCounts> read_counts(const std::filesystem::path& path);

}  // namespace dynmo::dynamism
