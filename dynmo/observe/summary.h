// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a comparison of runs came to ("dynmo-summary-1", docs/formats.md): speed, bubble, the losses
// that show that the runs learned the same, and what balancing itself cost.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"

namespace dynmo::observe {

struct RunSummary {
  std::string name;  // "static", "dynmo"
  double tokens_per_s = 0;
  double step_time_s = 0;  // median
  double loss_first = 0;   // NaN (null in JSON) if it diverged
  double loss_last = 0;
  std::string loss_digest;  // of the losses of all steps, bit by bit
  double bubble = 0;        // mean
  double imbalance = 0;     // mean
  int ranks = 0;
  friend bool operator==(const RunSummary&, const RunSummary&) = default;
};

// Shares of the balanced run's time.
struct Overhead {
  double profile = 0;
  double plan = 0;
  double migrate = 0;
  friend bool operator==(const Overhead&, const Overhead&) = default;
};

struct Summary {
  std::vector<RunSummary> runs;
  double speedup = 0;       // of the balanced run over the baseline
  double best_speedup = 0;  // that the best possible cuts would have given, by replay; NaN: unknown
  Overhead overhead;
  std::int64_t layers_moved = 0;
  double predicted_step_time_s = 0;
  double measured_step_time_s = 0;
  friend bool operator==(const Summary&, const Summary&) = default;
};

[[nodiscard]] Json summary_json(const Summary& summary);
// kBadInput with file and JSON pointer.
[[nodiscard]] Expected<Summary> parse_summary(const Json& json, std::string_view origin);
[[nodiscard]] Expected<Summary> read_summary(const std::filesystem::path& path);

}  // namespace dynmo::observe
