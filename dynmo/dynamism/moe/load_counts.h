// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts of tokens that a training assigned to its experts, from the records of its steps. With
// them a load model has the imbalance of a real router.

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

  // Returns the counts of the step or of the last one before it. Before the first step, returns
  // those of the first. Requires a step.
  [[nodiscard]] const std::vector<std::vector<double>>& at(std::int64_t step) const;
};

// Parses the lines of a RUN/records/rank-R.jsonl that have sources.moe.counts. There must be one.
// Returns kBadInput with `origin` and line for bad JSON, or a block without counts. Counts must be
// 0 to 1e15, with the same sizes in each step. Ignores an unreadable last line without its newline.
[[nodiscard]] Expected<RecordedCounts> parse_counts(std::string_view text, std::string_view origin);
[[nodiscard]] Expected<RecordedCounts> read_counts(const std::filesystem::path& path);

}  // namespace dynmo::dynamism
