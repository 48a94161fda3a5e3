// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/metrics/metrics.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <string_view>

namespace dynmo::observe {
namespace {

const StepFact* fact_of(std::string_view key) {
  const auto* found = std::ranges::find(kStepFacts, key, &StepFact::name);
  return found == kStepFacts.end() ? nullptr : found;
}

// Returns whether a field belongs to the run or to a rank. Fields that are no facts belong to the
// run, except for the position of a rank's layers.
MetricOf scope_of(const StepFact* fact, std::string_view key) {
  if (fact != nullptr) return fact->of;
  return key == "first_layer" || key == "layers" ? MetricOf::kRank : MetricOf::kRun;
}

// Returns "dynmo_busy_seconds" for "busy_s". Characters that Prometheus does not allow become "_".
std::string prometheus_name(std::string_view key) {
  const bool seconds = key.ends_with("_s");
  std::string name = fmt::format("dynmo_{}", key.substr(0, key.size() - (seconds ? 2 : 0)));
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return seconds ? name + "_seconds" : name;
}

}  // namespace

double flops_per_s(const RunScale& scale, double step_s) {
  return step_s > 0 && scale.ranks > 0 ? scale.step_flops / step_s / scale.ranks : 0;
}

std::vector<Metric> metrics_of(const StepRecord& record, MetricOf of, const RunScale& scale) {
  std::vector<Metric> metrics;
  const auto add = [&](std::string_view key, std::string tag, double value) {
    if (std::isfinite(value)) metrics.push_back({std::move(tag), prometheus_name(key), value});
  };
  const auto add_json = [&](std::string_view key, std::string_view tag, const Json& value) {
    if (!value.is_number() && !value.is_boolean()) return;
    add(key, tag.empty() ? fmt::format("dynmo/{}", key) : std::string(tag),
        value.is_boolean() ? (value.get<bool>() ? 1.0 : 0.0) : value.get<double>());
  };
  const Json json = record_json(record);
  for (const auto& [key, value] : json.items()) {
    if (key == "step" || key == "rank") continue;
    const StepFact* fact = fact_of(key);
    if (scope_of(fact, key) == of) add_json(key, fact == nullptr ? "" : fact->tag, value);
  }
  if (of == MetricOf::kRank) return metrics;
  for (const auto& [source, figures] : record.sources.items()) {
    for (const auto& [key, value] : figures.items()) {
      add_json(fmt::format("{}/{}", source, key), "", value);
    }
  }
  const auto tokens = static_cast<double>(record.tokens);
  add("ranks", "dynmo/ranks", scale.ranks);
  add("tokens_seen", "ntokens_seen", tokens * static_cast<double>(record.step + 1));
  if (record.step_s > 0 && scale.ranks > 0) {
    // (torchtitan counts the tokens of one device.)
    add("tokens_per_second_per_rank", "throughput(tps)", tokens / record.step_s / scale.ranks);
    add("end_to_end_s", "time_metrics/end_to_end(s)", record.step_s);
  }
  if (const double flops = flops_per_s(scale, record.step_s); flops > 0) {
    add("tflops_per_rank", "tflops", flops * 1e-12);
    if (scale.peak_flops > 0) add("mfu_percent", "mfu(%)", 100 * flops / scale.peak_flops);
  }
  return metrics;
}

}  // namespace dynmo::observe
