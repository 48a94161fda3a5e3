// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/metrics/prometheus.h"

namespace dynmo::observe {

std::string prometheus_labels(std::span<const PrometheusLabel> labels) {
  std::string text;
  for (const PrometheusLabel& label : labels) {
    text += fmt::format("{}{}=\"", text.empty() ? "{" : ",", label.name);
    for (const char c : label.value) {
      if (c == '\n') {
        text += "\\n";
        continue;
      }
      if (c == '"' || c == '\\') text += '\\';
      text += c;
    }
    text += '"';
  }
  return text.empty() ? text : text + "}";
}

std::string prometheus_text(std::span<const MetricGroup> groups) {
  std::string text;
  for (const MetricGroup& group : groups) {
    for (const Metric& metric : group.metrics) {
      text +=
          fmt::format("# TYPE {0} gauge\n{0}{1} {2}\n", metric.name, group.labels, metric.value);
    }
  }
  return text;
}

}  // namespace dynmo::observe
