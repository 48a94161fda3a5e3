// SPDX-License-Identifier: Apache-2.0
#pragma once

// A comparison as text and as JSON.

#include <string>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/observe/trace.h"
#include "dynmo/scenario/run.h"

namespace dynmo::scenario {

// Returns a line on the job, a table of the runs (dense and uniform first), and the advice. Notes
// name runs with insufficient memory. Ends with a newline.
[[nodiscard]] std::string report(const Scenario& scenario, const Comparison& comparison);

// Returns a line for each decision with a plan: step, run, cause, and result.
[[nodiscard]] std::string decisions_text(const Comparison& comparison);

// Returns "dynmo-simulation-1" (docs/scenarios.md): the runs as in the table, with the parts of
// their time.
[[nodiscard]] Json comparison_json(const Scenario& scenario, const Comparison& comparison);

// Returns one process for each run, with the steps that were kept.
[[nodiscard]] std::vector<observe::TraceProcess> trace_of(const Comparison& comparison);

}  // namespace dynmo::scenario
