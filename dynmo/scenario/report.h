// SPDX-License-Identifier: Apache-2.0
#pragma once

// A comparison as people and programs read it.

#include <string>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/observe/trace.h"
#include "dynmo/scenario/run.h"

namespace dynmo::scenario {

// A line on the job, a table of the runs (dense and uniform first), notes where a run's memory
// would not have sufficed, and the advice. Ends with a newline.
[[nodiscard]] std::string report(const Scenario& scenario, const Comparison& comparison);

// A line for each decision for which a plan was made: step, run, what for, and what was decided.
[[nodiscard]] std::string decisions_text(const Comparison& comparison);

// "dynmo-simulation-1" (docs/scenarios.md): the runs as in the table, with the parts of their time.
[[nodiscard]] Json comparison_json(const Scenario& scenario, const Comparison& comparison);

// One process a run, of the steps kept.
[[nodiscard]] std::vector<observe::TraceProcess> trace_of(const Comparison& comparison);

}  // namespace dynmo::scenario
