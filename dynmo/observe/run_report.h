// SPDX-License-Identifier: Apache-2.0
#pragma once

// The final report of a run, which is made from the files of the run. `dynmo train` prints it.
// `dynmo report` prints it again, with tables of the layers and the traffic.

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/observe/summary.h"

namespace dynmo::observe {

// The curves of one run, with one value for each step.
struct RunCurves {
  std::vector<double> imbalance;
  std::vector<double> bubble;
};

// Returns lines without their ends. `folder` is the run's. The first of two runs is the baseline.
// Requires one element of `curves` for each run.
[[nodiscard]] std::vector<std::string> report_lines(const Summary& summary,
                                                    std::span<const RunCurves> curves,
                                                    const std::string& folder);

// Returns the costs of each layer: F, I, W of a micro-batch, update, bytes. The last line has sums.
[[nodiscard]] std::string layer_table(const cost::ModelCost& model);

// Returns the bytes and messages of a step by pair of ranks and purpose. Shows the `rows` pairs
// with most bytes, and the others in one line. Returns "" for no traffic.
[[nodiscard]] std::string traffic_table(const RunSummary& run, std::size_t rows = 24);

// Returns the whole report of a run's folder, from its summary.json, records and profile.json.
// Returns kBadInput with the missing or damaged file.
[[nodiscard]] Expected<std::string> read_report(const std::filesystem::path& folder);

}  // namespace dynmo::observe
