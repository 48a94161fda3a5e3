// SPDX-License-Identifier: Apache-2.0
#pragma once

// Metrics are the numbers of a step under the names of dashboards. All outputs (TensorBoard,
// Prometheus) follow one list: the fields of the step record, and a few figures made of them.

#include <string>
#include <vector>

#include "dynmo/observe/step_record.h"

namespace dynmo::observe {

struct Metric {
  std::string tag;   // TensorBoard's: torchtitan's if it has one, else "dynmo/busy_s"
  std::string name;  // Prometheus': "dynmo_busy_seconds"
  double value = 0;
};

// Returns the metrics of a record: those of one rank, or of the run, which are the same on all
// ranks. `ranks` is the number of ranks that train. A number that is not known on this rank is
// omitted. Tags are unique, and so are names.
[[nodiscard]] std::vector<Metric> metrics_of(const StepRecord& record, MetricOf of, int ranks);

}  // namespace dynmo::observe
