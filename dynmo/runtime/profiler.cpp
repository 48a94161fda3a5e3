// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/profiler.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <ranges>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/freezing.h"

namespace dynmo::runtime {
namespace {

constexpr std::size_t kLongest = 8;             // lengths of the least window
constexpr std::size_t kLevelSteps = 3;          // whose median says how long steps take
constexpr double kOutdated = 5;                 // deviations that are no noise
constexpr double kDeviationPerMad = 1.4826;     // of a normal distribution
constexpr double kMedianPerMeanError = 1.2533;  // standard error of a median to that of a mean

// The median of one number over the elements of a range.
template <typename Range, typename Get>
double median_of(const Range& range, Get get) {
  std::vector<double> values;
  for (const auto& element : range) values.push_back(get(element));
  return median(std::move(values));
}

// Its deviation, from the changes between neighbours: a drift is no noise.
template <typename Range, typename Get>
double deviation_of(const Range& range, Get get) {
  std::vector<double> changes;
  for (std::size_t i = 1; i < range.size(); ++i) {
    changes.push_back(std::abs(get(range[i]) - get(range[i - 1])));
  }
  return kDeviationPerMad * median(std::move(changes)) / std::sqrt(2.0);
}

double share(double part, double whole) { return whole > 0 ? part / whole : 0; }

// Of layer `i` in its step's forward time.
auto forward_share(std::size_t i) {
  return [i](const auto& step) { return share(step.layers[i].time.forward_s, step.forward_s); };
}

// The first of the newest `count` elements.
template <typename Range>
std::size_t first_of_newest(const Range& range, std::size_t count) {
  return range.size() - std::min(range.size(), count);
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
    : known_(std::move(known)), least_(static_cast<std::size_t>(std::max(window, 1))) {}

void Profiler::forget_times() {
  window_.clear();
  owners_.clear();
  rank_changes_.clear();
}

void Profiler::shorten() {
  while (window_.size() > least_) window_.pop_front();
}

void Profiler::add(const std::vector<LayerSample>& layers, const std::vector<Rank>& owners,
                   const StepSample& step) {
  DYNMO_CHECK(layers.size() == known_.layers.size() && owners.size() == layers.size(),
              "{} layers and their ranks, got {} and {}", known_.layers.size(), layers.size(),
              owners.size());
  Sample sample{.layers = layers, .beside = step};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].stash_bytes > Bytes{0}) known_.layers[i].activation_bytes = layers[i].stash_bytes;
    sample.forward_s += layers[i].time.forward_s;
  }
  window_.push_back(std::move(sample));
  if (window_.size() > kLongest * least_) window_.pop_front();
  note_ranks(layers, owners);
  drop_outdated();
  for (const auto field : {&StepSample::overhead_s, &StepSample::action_s, &StepSample::message_s,
                           &StepSample::reduction_bytes_per_s}) {
    std::vector<double> measured;
    for (std::size_t i = first_of_newest(window_, least_); i < window_.size(); ++i) {
      if (window_[i].beside.*field) measured.push_back(*(window_[i].beside.*field));
    }
    if (!measured.empty()) beside_.*field = median(std::move(measured));
  }
}

void Profiler::note_ranks(const std::vector<LayerSample>& layers, const std::vector<Rank>& owners) {
  std::map<Rank, double> sums;
  for (std::size_t i = 0; i < layers.size(); ++i) sums[owners[i]] += layers[i].time.forward_s;
  std::vector<double> levels;
  double total = 0;
  for (const auto& [rank, sum] : sums) {
    if (sum <= 0) return;
    levels.push_back(std::log(sum));
    total += levels.back();
  }
  const auto ranks = static_cast<double>(levels.size());
  for (double& level : levels) level -= total / ranks;
  if (owners == owners_ && ranks > 1) {
    for (std::size_t i = 0; i < levels.size(); ++i) {
      // Of two steps, and from the mean of all: 2 (1 - 1 / ranks) variances of one.
      rank_changes_.push_back(std::abs(levels[i] - rank_levels_[i]) /
                              std::sqrt(2 * (1 - 1 / ranks)));
    }
    while (rank_changes_.size() > kLongest * least_ * levels.size()) rank_changes_.pop_front();
  }
  owners_ = owners;
  rank_levels_ = std::move(levels);
}

// A change must exceed what a layer's own times, those of all layers and those of ranks make of
// noise: a few steps show too little of it, and one of the three may look calm by chance.
void Profiler::drop_outdated() {
  if (window_.size() < 2 * least_) return;
  const auto older = static_cast<std::ptrdiff_t>(first_of_newest(window_, least_));
  const std::ranges::subrange before(window_.begin(), window_.begin() + older);
  const std::ranges::subrange since(window_.begin() + older, window_.end());
  const double error =
      std::sqrt(1.0 / static_cast<double>(older) + 1.0 / static_cast<double>(least_));
  const double common = std::max(layer_deviation(), rank_deviation());
  for (std::size_t i = 0; i < known_.layers.size(); ++i) {
    const auto share = forward_share(i);
    const double center = median_of(before, share);
    const double deviation = std::max(deviation_of(before, share), common * center);
    if (std::abs(median_of(since, share) - center) >
        kOutdated * kMedianPerMeanError * error * deviation) {
      shorten();
      return;
    }
  }
}

std::optional<cost::ModelCost> Profiler::costs(int frozen_layers) const {
  if (window_.empty()) return std::nullopt;
  const std::ranges::subrange newest(
      window_.begin() + static_cast<std::ptrdiff_t>(first_of_newest(window_, kLevelSteps)),
      window_.end());
  const double forward_s = median_of(newest, [](const Sample& step) { return step.forward_s; });
  cost::ModelCost model = known_;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    cost::LayerCost& layer = model.layers[i];
    const auto over_window = [&](auto get) {
      return forward_s * median_of(window_, [&](const Sample& step) {
               return share(get(step.layers[i]), step.forward_s);
             });
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

double Profiler::layer_deviation() const {
  double sum = 0;
  for (std::size_t i = 0; i < known_.layers.size(); ++i) {
    const double center = median_of(window_, forward_share(i));
    if (center > 0) sum += deviation_of(window_, forward_share(i)) / center;
  }
  return sum / static_cast<double>(known_.layers.size());
}

double Profiler::rank_deviation() const {
  return kDeviationPerMad * median({rank_changes_.begin(), rank_changes_.end()});
}

double Profiler::median_error() const {
  return kMedianPerMeanError /
         std::sqrt(static_cast<double>(std::max<std::size_t>(window_.size(), 1)));
}

double Profiler::relative_noise() const { return median_error() * layer_deviation(); }

double Profiler::rank_noise() const { return median_error() * rank_deviation(); }

}  // namespace dynmo::runtime
