// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/profiler.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <ranges>

#include "dynmo/core/check.h"
#include "dynmo/core/median.h"
#include "dynmo/dynamism/freezing/load_schedule.h"

namespace dynmo::control {
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

double share(double part, double whole) { return whole > 0 ? part / whole : 0; }

std::map<Rank, double> forward_by_rank(const std::vector<cost::LayerSample>& layers,
                                       const std::vector<Rank>& owners) {
  std::map<Rank, double> sums;
  for (std::size_t i = 0; i < layers.size(); ++i) sums[owners[i]] += layers[i].time.forward_s;
  return sums;
}

// The first of the newest `count` elements.
template <typename Range>
std::size_t first_of_newest(const Range& range, std::size_t count) {
  return range.size() - std::min(range.size(), count);
}

}  // namespace

cost::LayerTime mean_time(const std::vector<cost::LayerTime>& micro_batches) {
  cost::LayerTime sum;
  for (const cost::LayerTime& time : micro_batches) {
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
  rank_levels_.clear();
  rank_changes_.clear();
}

void Profiler::shorten() {
  while (window_.size() > least_) window_.pop_front();
}

void Profiler::add(const std::vector<cost::LayerSample>& layers, const std::vector<Rank>& owners,
                   const cost::StepSample& step) {
  DYNMO_CHECK(layers.size() == known_.layers.size() && owners.size() == layers.size(),
              "{} layers and their ranks, got {} and {}", known_.layers.size(), layers.size(),
              owners.size());
  Sample sample{.layers = layers, .owners = owners, .beside = step};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].stash_bytes > Bytes{0}) known_.layers[i].activation_bytes = layers[i].stash_bytes;
    sample.forward_s += layers[i].time.forward_s;
  }
  const std::map<Rank, double> sums = forward_by_rank(layers, owners);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    sample.own_shares.push_back(share(layers[i].time.forward_s, sums.at(owners[i])));
  }
  const bool same_plan = !window_.empty() && owners == window_.back().owners;
  if (same_plan) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const double before = window_.back().own_shares[i];
      const double now = sample.own_shares[i];
      sample.own_changes.push_back(2 * share(std::abs(now - before), now + before));
    }
  }
  note_ranks(sums, same_plan);
  window_.push_back(std::move(sample));
  if (window_.size() > kLongest * least_) window_.pop_front();
  drop_outdated();
  for (const auto field :
       {&cost::StepSample::overhead_s, &cost::StepSample::action_s, &cost::StepSample::message_s,
        &cost::StepSample::reduction_bytes_per_s}) {
    std::vector<double> measured;
    for (std::size_t i = first_of_newest(window_, least_); i < window_.size(); ++i) {
      if (window_[i].beside.*field) measured.push_back(*(window_[i].beside.*field));
    }
    if (!measured.empty()) beside_.*field = median(std::move(measured));
  }
}

void Profiler::note_ranks(const std::map<Rank, double>& sums, bool same_plan) {
  std::vector<double> levels;
  double total = 0;
  for (const auto& [rank, sum] : sums) {
    levels.push_back(std::log(std::max(sum, 1e-12)));
    total += levels.back();
  }
  const auto ranks = static_cast<double>(levels.size());
  for (double& level : levels) level -= total / ranks;
  if (same_plan) {
    for (std::size_t i = 0; ranks > 1 && i < levels.size(); ++i) {
      // Of two steps, and from the mean of all: 2 (1 - 1 / ranks) variances of one.
      rank_changes_.push_back(std::abs(levels[i] - rank_levels_[i]) /
                              std::sqrt(2 * (1 - 1 / ranks)));
    }
    while (rank_changes_.size() > kLongest * least_ * levels.size()) rank_changes_.pop_front();
  }
  rank_levels_ = std::move(levels);
}

// Of a layer's forward time, and of all its time but the update's, in the forward time of its step.
// A change must exceed what measuring makes of noise; deviations are from changes between
// neighbours, as a drift is no noise.
void Profiler::drop_outdated() {
  if (window_.size() < 2 * least_) return;
  const std::size_t older = first_of_newest(window_, least_);
  const double error = kMedianPerMeanError * std::sqrt(1.0 / static_cast<double>(older) +
                                                       1.0 / static_cast<double>(least_));
  const double common = std::hypot(layer_deviation(), rank_deviation());
  const auto outdated = [&](auto share) {
    std::vector<double> before;
    std::vector<double> since;
    std::vector<double> changes;
    for (std::size_t i = 0; i < window_.size(); ++i) {
      (i < older ? before : since).push_back(share(window_[i]));
      if (i > 0 && i < older) changes.push_back(std::abs(before[i] - before[i - 1]));
    }
    const double center = median(std::move(before));
    // One of the two may look calm by chance.
    const double deviation =
        std::max(kDeviationPerMad / std::sqrt(2.0) * median(std::move(changes)), common * center);
    return std::abs(median(std::move(since)) - center) > kOutdated * error * deviation;
  };
  for (std::size_t i = 0; i < known_.layers.size(); ++i) {
    const auto forward = [i](const Sample& step) {
      return share(step.layers[i].time.forward_s, step.forward_s);
    };
    const auto all = [i](const Sample& step) {
      const cost::LayerTime& time = step.layers[i].time;
      return share(time.forward_s + time.input_gradient_s + time.weight_gradient_s, step.forward_s);
    };
    if (outdated(forward) || outdated(all)) {
      shorten();
      return;
    }
  }
}

cost::ModelCost Profiler::known(int frozen_layers) const {
  return dynamism::freeze_prefix(known_, frozen_layers);
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
    layer.forward_s = over_window([](const cost::LayerSample& s) { return s.time.forward_s; });
    layer.backward_input_s =
        over_window([](const cost::LayerSample& s) { return s.time.input_gradient_s; });
    layer.backward_weight_s =
        over_window([](const cost::LayerSample& s) { return s.time.weight_gradient_s; });
    layer.update_s = over_window([](const cost::LayerSample& s) { return s.update_s; });
  }
  return dynamism::freeze_prefix(std::move(model), frozen_layers);
}

double Profiler::layer_deviation() const {
  double sum = 0;
  for (std::size_t i = 0; i < known_.layers.size(); ++i) {
    std::vector<double> changes;
    for (const Sample& step : window_) {
      if (!step.own_changes.empty()) changes.push_back(step.own_changes[i]);
    }
    sum += median(std::move(changes));
  }
  return kDeviationPerMad / std::sqrt(2.0) * sum / static_cast<double>(known_.layers.size());
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

}  // namespace dynmo::control
