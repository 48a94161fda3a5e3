// SPDX-License-Identifier: Apache-2.0
#pragma once

// The final report of a run is made from the files that the run leaves behind: `dynmo train` prints
// it, `dynmo report` prints it again, with a table of the layers and one of the traffic.

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/observe/summary.h"

namespace dynmo::observe {

// The curves of one run, one value a step.
struct RunCurves {
  std::vector<double> imbalance;
  std::vector<double> bubble;
};

// Lines without their ends. `folder` is the run's. The first of two runs is the baseline. Requires
// as many curves as runs.
[[nodiscard]] std::vector<std::string> report_lines(const Summary& summary,
                                                    std::span<const RunCurves> curves,
                                                    const std::string& folder);

// Prints the costs of each layer: F, I, W of a micro-batch, update, bytes. Ends with a line of
// sums.
[[nodiscard]] std::string layer_table(const cost::ModelCost& model);

// Bytes a step by pair of ranks and purpose, and messages. Above `rows` pairs, those with most
// bytes; the others in one line. "" of no traffic.
[[nodiscard]] std::string traffic_table(const RunSummary& run, std::size_t rows = 24);

// All of it for a run's folder, from its summary.json, records and profile.json. kBadInput, naming
// the file that is missing or damaged.
[[nodiscard]] Expected<std::string> read_report(const std::filesystem::path& folder);

}  // namespace dynmo::observe
