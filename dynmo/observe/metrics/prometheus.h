// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/observe/metrics/metrics.h"

namespace dynmo::observe {

// Metrics that share labels.
struct MetricGroup {
  std::string labels;  // as prometheus_labels() writes them
  std::vector<Metric> metrics;
};

struct PrometheusLabel {
  std::string_view name;
  std::string value;
};
// Returns `{run="runs/a",rank="3"}` with escaped values.
[[nodiscard]] std::string prometheus_labels(std::span<const PrometheusLabel> labels);

// Returns the groups in Prometheus' text format, version 0.0.4. All metrics are gauges. The text
// can be a file of node_exporter's textfile collector. Requires that names of different groups
// differ.
[[nodiscard]] std::string prometheus_text(std::span<const MetricGroup> groups);

}  // namespace dynmo::observe
