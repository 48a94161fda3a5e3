// SPDX-License-Identifier: Apache-2.0
#pragma once

// The head of a run's charts: its model, ranks and speed, and its main events, as text.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "dynmo/core/json.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/summary.h"

namespace dynmo::observe {

// Sums over the records and events of a run.
struct RunTotals {
  // The program that wrote it, with its version. If several did, all of them in order.
  std::string program = {};
  std::int64_t ranks = 0;  // at the beginning
  std::int64_t first_step = 0;
  std::int64_t steps = 0;
  double tokens = 0;
  double seconds = 0;  // of the steps
  std::int64_t moves = 0;
  std::int64_t moved_layers = 0;
  std::int64_t lost_ranks = 0;
  std::int64_t losses = 0;  // events of lost ranks
};

// Returns how exact times of several hosts are, given the largest error of their clocks.
[[nodiscard]] std::string clocks_text(double error_s);

// Returns a list of pairs, a name and a value. `folder` has the run's config.toml. If it cannot be
// read, the model is omitted. `number` is the index of the run in the summary, if it has one.
[[nodiscard]] Json run_head(const RunFolder& folder, const Summary& summary,
                            std::optional<std::size_t> number, const RunTotals& totals);

}  // namespace dynmo::observe
