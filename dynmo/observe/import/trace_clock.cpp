// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "dynmo/observe/import/trace_parts_impl.h"

namespace dynmo::observe {

TraceClock::TraceClock(const TraceEvents& events)
    : events_(events), device_(!events.kernel_us.empty()) {
  for (const TraceEvent& launch : events.launches) {
    const auto kernel = events.kernel_us.find(launch.number.value_or(-1));
    if (kernel == events.kernel_us.end()) continue;
    Launches& launches = threads_[launch.thread];
    launches.start_us.push_back(launch.start_us);
    launches.sum_us.push_back(launches.sum_us.back() + kernel->second);
  }
}

double TraceClock::Launches::between(double start, double end) const {
  const auto at = [&](double time) {
    return sum_us[static_cast<std::size_t>(
        std::lower_bound(start_us.begin(), start_us.end(), time) - start_us.begin())];
  };
  return at(end) - at(start);
}

double TraceClock::seconds(const TraceEvent& event) const {
  if (!device_) return event.duration_us * 1e-6;
  const auto found = threads_.find(event.thread);
  return found == threads_.end() ? 0 : found->second.between(event.start_us, event.end_us()) * 1e-6;
}

double TraceClock::seconds_of_action(const TraceEvent& range) const {
  if (device_) {
    double sum = 0;
    for (const auto& [thread, launches] : threads_) {
      sum += launches.between(range.start_us, range.end_us());
    }
    return sum * 1e-6;
  }
  const auto found = events_.starts_us.find(range.thread);
  if (found == events_.starts_us.end()) return 0;
  const auto first = std::lower_bound(found->second.begin(), found->second.end(), range.start_us);
  if (first == found->second.end() || *first >= range.end_us()) return 0;
  return (range.end_us() - *first) * 1e-6;
}

double weight_share(std::string_view node) {
  if (node.find("AccumulateGrad") != std::string_view::npos) return 1;
  if (node.starts_with("EmbeddingBackward")) return 1;
  for (const std::string_view product : {"AddmmBackward", "MmBackward", "LinearBackward",
                                         "ConvolutionBackward", "CompiledFunctionBackward"}) {
    if (node.starts_with(product)) return 0.5;
  }
  return 0;
}

std::vector<std::size_t> outer_nodes(const TraceEvents& events) {
  std::vector<std::size_t> outer;
  std::map<int, double> busy_until_us;
  for (std::size_t i = 0; i < events.nodes.size(); ++i) {
    const TraceEvent& node = events.nodes[i];
    double& busy = busy_until_us[node.thread];
    if (node.start_us < busy) continue;
    busy = node.end_us();
    outer.push_back(i);
  }
  return outer;
}

}  // namespace dynmo::observe
