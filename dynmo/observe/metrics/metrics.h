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

// The size of a run and of its devices, which records do not have.
struct RunScale {
  int ranks = 0;          // that train
  double step_flops = 0;  // products of a step in the dense model, of all replicas; 0: not known
  double peak_flops = 0;  // FLOP/s of a rank's device; 0: not known
};
// Returns the FLOP/s of a rank, from products of the dense model, or 0 if they are not known.
[[nodiscard]] double flops_per_s(const RunScale& scale, double step_s);

// Returns the metrics of a record: those of the rank, or those of the run, which are the same on
// all ranks. Numbers that the record lacks are omitted. Tags are unique, and so are names.
[[nodiscard]] std::vector<Metric> metrics_of(const StepRecord& record, MetricOf of,
                                             const RunScale& scale);

}  // namespace dynmo::observe
