// SPDX-License-Identifier: Apache-2.0
#pragma once

// The text of a run for the user: the progress line while it runs, and the summary at its end.

#include <string>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/observe/metrics/metrics.h"
#include "dynmo/train/setup/comparison.h"

namespace dynmo::train {

// Returns step, loss, tokens/s of every run (over the last steps), imbalance, bubble, plan.
[[nodiscard]] std::string progress_line(std::int64_t step, std::int64_t steps,
                                        const std::vector<const observe::RunHistory*>& runs,
                                        const plan::Plan& plan);

// Returns the leader's memory, and the MFU over the last steps if the peak FLOP/s of a rank's
// device is known. MFU counts the products of the dense model, which the text tells if `sparse`.
[[nodiscard]] std::string usage_text(const observe::RunHistory& run, const observe::RunScale& scale,
                                     bool sparse, Bytes memory);

struct Report {
  std::vector<std::string> lines;
  Json summary;  // "dynmo-summary-1"
};
// Makes the report of one run or two. `known` has names and bytes of the layers, and `given` their
// costs if known. The first of two runs is the baseline.
[[nodiscard]] Expected<Report> make_report(const std::vector<const observe::RunHistory*>& runs,
                                           const cost::ModelCost& known, const GivenCosts& given,
                                           const config::Config& config, int ranks);

}  // namespace dynmo::train
