// SPDX-License-Identifier: Apache-2.0
#pragma once

// The summary of a run is made from its history. `dynmo train` and dynmo.torch call the same
// functions, so their summaries can be compared.

#include <vector>

#include "dynmo/observe/run_history.h"
#include "dynmo/observe/summary.h"

namespace dynmo::observe {

struct PredictionError {
  int steps = 0;  // predicted steps, from the first move on (without a move all)
  // Median of |predicted - measured| / measured. The measured time excludes balancing.
  double median = 0;
  double worst = 0;
};
[[nodiscard]] PredictionError prediction_error(const RunHistory& run);

// Returns the values of a fact in the measured steps of the sample.
[[nodiscard]] std::vector<double> measured_values(const RunHistory& run, double StepFacts::*fact);

// Returns the fields of "dynmo-summary-1" for one run. `ranks` are those of one replica.
[[nodiscard]] RunSummary summarize(const RunHistory& run, int ranks);

// Returns the summary of one run or several. Overhead, moved layers and step times are those of the
// last run, which is the balanced one. The fields of a comparison stay 0.
[[nodiscard]] Summary summarize(const std::vector<const RunHistory*>& runs, int ranks);

}  // namespace dynmo::observe
