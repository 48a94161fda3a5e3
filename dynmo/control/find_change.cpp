// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/find_change.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/median.h"

namespace dynmo::control {
namespace {

constexpr int kNewestOwn = 3;
constexpr int kNewestRank = 4;
constexpr std::size_t kMinOlder = 3;
constexpr std::size_t kScatter = 8;  // older steps whose spread is measured
constexpr double kDeviations = 5;

// A layer or a rank through the steps: logarithms of its time / the expected time.
using Series = std::vector<double>;

// Returns the difference between the newest steps of a series and the older ones.
double shift(const Series& series, std::size_t newest) {
  const auto split = series.end() - static_cast<std::ptrdiff_t>(newest);
  return median({split, series.end()}) - median({series.begin(), split});
}

// Returns the shift between the last `newest` and the first `older` steps, which need not be
// adjacent. Returns 0 if it may be noise.
double significant_shift(const Series& series, std::size_t older, int newest, double noise) {
  Series before(series.begin(), series.begin() + static_cast<std::ptrdiff_t>(older));
  const double center = median_in_place(before);
  Series now(series.end() - newest, series.end());
  for (double& value : now) value -= center;
  const double change = median(now);
  const auto shows_half = [&](double value) { return value / change >= 0.5; };
  if (change == 0 || !std::all_of(now.begin(), now.end(), shows_half)) return 0;
  if (older >= kScatter) {
    for (double& value : before) value = std::abs(value - center);
    noise = std::max(noise, kDeviationPerMad * median_in_place(before));
  }
  const double error =
      kMedianPerMeanError * noise * std::sqrt(1 / static_cast<double>(older) + 1.0 / newest);
  return std::abs(change) > kDeviations * error ? change : 0;
}

class Test {
 public:
  Test(const std::deque<LayerTimes>& steps, std::size_t older) : steps_(steps), older_(older) {
    for (const LayerTimes& step : steps) {
      for (const Rank owner : step.owners) ranks_ = std::max(ranks_, owner.index() + 1);
    }
    expect();
    take_apart();
  }

  std::optional<FoundChange> of_layers(double noise, double relevant) const {
    FoundChange found{.layer = {}, .rank = {}, .factors = unchanged(), .steps = kNewestOwn};
    double largest = 0;
    for (std::size_t i = 0; i < own_.size(); ++i) {
      const double change = significant_shift(own_[i], older_, kNewestOwn, noise);
      const double share = std::abs(std::expm1(change)) * expected_[i] * mean_ranks_;
      if (change == 0 || share <= relevant) continue;
      found.factors[i] = std::exp(change);
      if (share <= largest) continue;
      largest = share;
      found.layer = LayerId(static_cast<std::int32_t>(i));
      found.factor = found.factors[i];
    }
    return found.layer ? std::optional(found) : std::nullopt;
  }

  std::optional<FoundChange> of_ranks(double noise, double relevant) const {
    FoundChange found{.layer = {}, .rank = {}, .factors = unchanged(), .steps = kNewestRank};
    double largest = 0;
    for (std::size_t r = 0; r < sums_.size(); ++r) {
      if (sums_[r].empty()) continue;
      const double change = significant_shift(sums_[r], older_, kNewestRank, noise);
      const double share = std::abs(std::expm1(change)) * newest_sum_[r] * mean_ranks_;
      if (change == 0 || share <= relevant) continue;
      set_factors(found.factors, r, std::exp(change));
      if (share <= largest) continue;
      largest = share;
      found.rank = Rank(static_cast<std::int32_t>(r));
      found.factor = std::exp(change);
    }
    return found.rank ? std::optional(found) : std::nullopt;
  }

  std::vector<double> measured(const FoundChange& found) const {
    const auto newest = static_cast<std::size_t>(found.steps);
    std::vector<double> factors = unchanged();
    for (std::size_t i = 0; found.layer && i < own_.size(); ++i) {
      if (found.factors[i] != 1) factors[i] = std::exp(shift(own_[i], newest));
    }
    for (std::size_t r = 0; found.rank && r < sums_.size(); ++r) {
      if (sums_[r].empty()) continue;
      set_factors(factors, r, std::exp(shift(sums_[r], newest)));
    }
    for (std::size_t i = 0; i < factors.size(); ++i) {
      if (found.factors[i] == 1) factors[i] = 1;
    }
    return factors;
  }

 private:
  std::vector<double> unchanged() const { return std::vector<double>(own_.size(), 1.0); }
  void set_factors(std::vector<double>& factors, std::size_t rank, double factor) const {
    for (std::size_t i = 0; i < factors.size(); ++i) {
      if (steps_.back().owners[i].index() == rank) factors[i] = factor;
    }
  }

  // Sets the expected share of each layer in a step, from the older steps.
  void expect() {
    const std::size_t layers = steps_.front().seconds.size();
    for (const LayerTimes& step : steps_) {
      totals_.push_back(std::accumulate(step.seconds.begin(), step.seconds.end(), 0.0));
    }
    Series shares(older_);
    for (std::size_t i = 0; i < layers; ++i) {
      for (std::size_t t = 0; t < older_; ++t) {
        shares[t] = totals_[t] > 0 ? steps_[t].seconds[i] / totals_[t] : 0;
      }
      expected_.push_back(median_in_place(shares));
    }
  }

  void take_apart() {
    own_.assign(expected_.size(), Series(steps_.size()));
    sums_.assign(ranks_, Series(steps_.size()));
    for (std::size_t t = 0; t < steps_.size(); ++t) take_apart(t);
    double in_use = 0;
    double whole = 0;
    for (const double sum : newest_sum_) {
      in_use += sum > 0 ? 1 : 0;
      whole += sum;
    }
    mean_ranks_ = whole > 0 ? in_use / whole : 0;
  }

  void take_apart(std::size_t t) {
    const LayerTimes& step = steps_[t];
    std::vector<std::vector<double>> of_rank(ranks_);  // its layers
    std::vector<double> sum(ranks_);
    std::vector<double> expected(ranks_);
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      const std::size_t r = step.owners[i].index();
      sum[r] += step.seconds[i];
      expected[r] += expected_[i];
      if (!is_timed(i, step)) continue;
      own_[i][t] = std::log(step.seconds[i] / (totals_[t] * expected_[i]));
      of_rank[r].push_back(own_[i][t]);
    }
    std::vector<double> levels;
    for (std::size_t r = 0; r < ranks_; ++r) {
      const bool timed = sum[r] > 0 && expected[r] > 0;
      if (timed && !sums_[r].empty()) {
        sums_[r][t] = std::log(sum[r] / (totals_[t] * expected[r]));
        levels.push_back(sums_[r][t]);
      } else {
        sums_[r].clear();  // not comparable in every step
      }
    }
    const double of_step = levels.empty() ? 0 : median_in_place(levels);
    for (Series& series : sums_) {
      if (!series.empty()) series[t] -= of_step;
    }
    std::vector<double> common(ranks_);
    for (std::size_t r = 0; r < ranks_; ++r) common[r] = common_part(of_rank[r], of_step);
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      if (is_timed(i, step)) own_[i][t] -= common[step.owners[i].index()];
    }
    newest_sum_ = std::move(expected);
  }

  // Returns the common part of a rank's layers. If there are two and they differ, one has changed
  // rather than both in opposite ways. So the layer nearer to the step's part shows the common
  // part.
  static double common_part(std::vector<double>& layers, double of_step) {
    if (layers.empty()) return of_step;
    if (layers.size() != 2) return median_in_place(layers);
    return std::abs(layers[0] - of_step) < std::abs(layers[1] - of_step) ? layers[0] : layers[1];
  }

  bool is_timed(std::size_t layer, const LayerTimes& step) const {
    return expected_[layer] > 0 && step.seconds[layer] > 0;
  }

  const std::deque<LayerTimes>& steps_;
  std::size_t older_;
  std::size_t ranks_ = 0;
  std::vector<double> totals_;      // by step
  std::vector<double> expected_;    // by layer, share of a step
  std::vector<Series> own_;         // by layer
  std::vector<Series> sums_;        // by rank; empty: not timed in all steps
  std::vector<double> newest_sum_;  // expected, by rank
  double mean_ranks_ = 0;           // ranks in use over the expected sum: 1 / the mean rank's share
};

}  // namespace

std::optional<FoundChange> find_change(const std::deque<LayerTimes>& steps, const StepNoise& noise,
                                       double relevant) {
  const std::size_t count = steps.size();
  if (count < kMinOlder + kNewestOwn) return std::nullopt;
  for (const LayerTimes& step : steps) {
    DYNMO_CHECK(step.seconds.size() == steps.front().seconds.size() &&
                    step.owners.size() == step.seconds.size(),
                "steps of {} layers and their ranks, got {} and {}", steps.front().seconds.size(),
                step.seconds.size(), step.owners.size());
  }
  const std::size_t older = std::max(kMinOlder, count - kNewestRank);
  const Test test(steps, older);
  if (auto found = test.of_layers(noise.own, relevant)) return found;
  if (count < older + kNewestRank) return std::nullopt;
  return test.of_ranks(noise.rank, relevant);
}

std::vector<double> measure_change(const std::deque<LayerTimes>& steps, const FoundChange& found) {
  const auto newest = static_cast<std::size_t>(found.steps);
  DYNMO_CHECK(steps.size() > newest && found.factors.size() == steps.front().seconds.size(),
              "more than {} steps of the same layers, got {}", newest, steps.size());
  return Test(steps, steps.size() - newest).measured(found);
}

}  // namespace dynmo::control
