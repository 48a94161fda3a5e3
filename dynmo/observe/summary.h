// SPDX-License-Identifier: Apache-2.0
#pragma once

// The summary of a run or of a comparison ("dynmo-summary-1", docs/formats.md). It has the speed,
// the bubble, the cost of balancing, and the losses that show that runs learned the same.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/core/traffic.h"
#include "dynmo/core/units.h"
#include "dynmo/observe/step_facts.h"

namespace dynmo::observe {

// The seconds of all ranks by activity, if ranks may leave and join. Working, idle and changing
// seconds sum up to the time of all ranks in the run, without checkpoints and validation.
struct SizeSummary {
  std::int64_t changes = 0;
  // Number of all members of the run so far. Their numbers are below it.
  int members = 0;
  double mean_ranks = 0;            // over the time of the steps
  double working_s = 0;             // steps of ranks with layers
  double idle_s = 0;                // steps of ranks without
  double changing_s = 0;            // between a group and the next one
  std::int64_t losses = 0;          // of ranks, that the run has survived
  std::int64_t repeated_steps = 0;  // because of them
  double saved_s = 0;               // steps of ranks that it began with and had released
  friend bool operator==(const SizeSummary&, const SizeSummary&) = default;
};

// The facts are means and sums over the steps, as their OverSteps says. Facts with kNothing stay 0.
// In a file the keys after `ranks` may be absent, and also facts other than imbalance and bubble.
struct RunSummary : StepFacts {
  std::string name;  // "static", "dynmo"
  double tokens_per_s = 0;
  double end_tokens_per_s = 0;  // over the last ten steps
  double step_time_s = 0;       // median
  double loss_first = 0;        // NaN (null in JSON) if it diverged
  double loss_last = 0;
  std::string loss_digest;  // of the losses of all steps, bit by bit
  int ranks = 0;
  std::int64_t steps = 0;            // of the whole run, with any leaders and resumes
  double seconds = 0;                // of these steps, checkpoints and validation not included
  std::int64_t validation_step = 0;  // steps done at the last validation; 0: none
  double validation_loss = 0;
  // Loss with the decisions of layers in generation, if they differ.
  std::optional<double> generation_loss = {};
  // Largest error of the clocks in the trace. None: all ranks have one clock.
  std::optional<double> clock_error_s = {};
  std::int64_t migrations = 0;
  std::int64_t replicas = 1;
  // |predicted - measured| / measured step time: median and largest of `predicted_steps` steps.
  std::int64_t predicted_steps = 0;
  double prediction_error_median = 0;
  double prediction_error_worst = 0;
  std::int64_t checkpoints_written = 0;
  std::int64_t checkpoints_failed = 0;
  std::optional<SizeSummary> size = {};  // none: the ranks did not change
  Json sources = Json::object();         // their figures of the last step, by name
  TrafficRows traffic;
  // The steps of `traffic`, without those of a plan under which a rank was lost. 0: all.
  std::int64_t traffic_steps = 0;
  friend bool operator==(const RunSummary&, const RunSummary&) = default;
};

// Shares of the balanced run's time.
struct Overhead {
  double profile = 0;
  double plan = 0;
  double migrate = 0;
  friend bool operator==(const Overhead&, const Overhead&) = default;
};

// Names the costs that best_speedup is computed from.
enum class CostsAre {
  kMeasured,  // in the steps themselves; a best cut gains from their noise, too
  kGiven,     // emulated: times that the layers slept for
};

struct Summary {
  std::string device = "cpu";  // of the layers; "emulated": times were given, not measured
  std::vector<RunSummary> runs;
  double speedup = 0;  // of the balanced run over the baseline
  // Speedup with the best possible cuts, by replay; NaN: unknown.
  double best_speedup = 0;
  // Whether best_speedup is only an upper bound, because there were too many cuts to replay.
  bool best_is_bound = false;
  CostsAre best_costs = CostsAre::kMeasured;
  // Speedup with the cuts of the balanced run, by replay of given costs. Unlike `speedup` it leaves
  // out messages, moves and noise of the machine. 0: unknown.
  double cuts_speedup = 0;
  Overhead overhead;
  std::int64_t layers_moved = 0;
  double predicted_step_time_s = 0;
  double measured_step_time_s = 0;
  friend bool operator==(const Summary&, const Summary&) = default;
};

// Returns the indices of the baseline and of the run that is compared with it. A dense run, which
// comes first, is neither: its losses and layers differ. Returns nullopt if there are no such two
// runs.
[[nodiscard]] std::optional<std::pair<std::size_t, std::size_t>> compared(const Summary& summary);

[[nodiscard]] Json summary_json(const Summary& summary);
// Parses a summary. Returns kBadInput with file and JSON pointer.
[[nodiscard]] Expected<Summary> parse_summary(const Json& json, std::string_view origin);
[[nodiscard]] Expected<Summary> read_summary(const std::filesystem::path& path);

}  // namespace dynmo::observe
