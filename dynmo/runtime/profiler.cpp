// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/profiler.h"

#include <algorithm>
#include <cmath>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/freezing.h"

namespace dynmo::runtime {
namespace {

// The median of one number over the elements of a range.
template <typename Range, typename Get>
double median_of(const Range& range, Get get) {
  std::vector<double> values;
  for (const auto& element : range) values.push_back(get(element));
  return median(std::move(values));
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

LayerTime mean_time(const std::vector<LayerTime>& micro_batches) {
  LayerTime sum;
  for (const LayerTime& time : micro_batches) {
    sum.forward_s += time.forward_s;
    sum.input_gradient_s += time.input_gradient_s;
    sum.weight_gradient_s += time.weight_gradient_s;
  }
  const double count = std::max(1.0, static_cast<double>(micro_batches.size()));
  return {sum.forward_s / count, sum.input_gradient_s / count, sum.weight_gradient_s / count};
}

Profiler::Profiler(cost::ModelCost known, int window)
    : known_(std::move(known)), capacity_(static_cast<std::size_t>(std::max(window, 1))) {}

void Profiler::forget_times() {
  window_.clear();
  steps_.clear();
}

void Profiler::add(const std::vector<LayerSample>& layers, const StepSample& step) {
  DYNMO_CHECK(layers.size() == known_.layers.size(), "{} layers, got {}", known_.layers.size(),
              layers.size());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].stash_bytes > Bytes{0}) known_.layers[i].activation_bytes = layers[i].stash_bytes;
  }
  window_.push_back(layers);
  if (window_.size() > capacity_) window_.pop_front();
  steps_.push_back(step);
  if (steps_.size() > capacity_) steps_.pop_front();
  for (const auto field : {&StepSample::overhead_s, &StepSample::action_s, &StepSample::message_s,
                           &StepSample::reduction_bytes_per_s}) {
    std::vector<double> measured;
    for (const StepSample& sample : steps_) {
      if (sample.*field) measured.push_back(*(sample.*field));
    }
    if (!measured.empty()) beside_.*field = median(std::move(measured));
  }
}

std::optional<cost::ModelCost> Profiler::costs(int frozen_layers) const {
  if (window_.empty()) return std::nullopt;
  cost::ModelCost model = known_;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    cost::LayerCost& layer = model.layers[i];
    const auto over_window = [&](auto get) {
      return median_of(window_, [&](const auto& step) { return get(step[i]); });
    };
    layer.forward_s = over_window([](const LayerSample& s) { return s.time.forward_s; });
    layer.backward_input_s =
        over_window([](const LayerSample& s) { return s.time.input_gradient_s; });
    layer.backward_weight_s =
        over_window([](const LayerSample& s) { return s.time.weight_gradient_s; });
    layer.update_s = over_window([](const LayerSample& s) { return s.update_s; });
  }
  return dynamism::freeze_prefix(std::move(model), frozen_layers);
}

double Profiler::relative_noise() const {
  constexpr double kDeviationPerMad = 1.4826;     // of a normal distribution
  constexpr double kMedianPerMeanError = 1.2533;  // standard error of a median to that of a mean
  double sum = 0;
  for (std::size_t i = 0; i < known_.layers.size(); ++i) {
    std::vector<double> shares;  // of the layer in its step's forward time
    for (const auto& step : window_) {
      double total = 0;
      for (const LayerSample& layer : step) total += layer.time.forward_s;
      if (total > 0) shares.push_back(step[i].time.forward_s / total);
    }
    const double center = median(shares);
    if (center <= 0) continue;
    for (double& share : shares) share = std::abs(share - center);
    sum += kDeviationPerMad * median(std::move(shares)) / center;
  }
  const auto layers = static_cast<double>(known_.layers.size());
  const auto steps = static_cast<double>(std::max<std::size_t>(window_.size(), 1));
  return kMedianPerMeanError * sum / layers / std::sqrt(steps);
}

}  // namespace dynmo::runtime
