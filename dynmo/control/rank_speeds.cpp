// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/rank_speeds.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <ranges>
#include <set>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/median.h"

namespace dynmo::control {
namespace {

constexpr std::size_t kSpeedWindow = 24;  // steps
constexpr std::size_t kUsualSteps = 8;    // that show what is usual
constexpr std::size_t kSlowSteps = 4;     // a burst of 3 steps is no change
constexpr std::size_t kMovedSteps = 3;    // as for a layer in find_change()
constexpr std::size_t kSpeedLayers = 2;
constexpr double kSpeedDeviations = 6;
constexpr double kAlikeShare = 0.35;     // difference of layers, as a share of the common change
constexpr double kMostApart = 0.2;       // of logarithms of layers
constexpr double kLeastSlow = 0.2231;    // log 1.25
constexpr double kLeastOfSlow = 0.0953;  // log 1.1, of a rank that is slow already
constexpr double kFullSpeed = 1.05;      // a smaller factor is none

// Returns whether times that change by `change` are those of a slow rank that is fast again.
bool ends(double factor, double change) {
  return factor > 1 && std::abs(std::log(factor) + change) < std::min(-change, kLeastSlow) / 2;
}

// Returns whether a rank has left the group, though it computed some steps of the window.
bool is_lost(Rank rank) { return rank < Rank(0); }

// A layer's forward passes, or its weight gradients. Values are by step: logarithms relative to the
// median of the older steps.
struct Part {
  std::size_t layer = 0;
  std::vector<std::optional<double>> rate = {};   // time of a unit of work, if counted
  std::vector<std::optional<double>> whole = {};  // time
  double noise = 0;                               // standard deviation of one older rate
};

// Compares the newest steps with the older ones.
class Evidence {
 public:
  Evidence(const std::deque<RankSpeeds::Step>& steps, std::size_t newest)
      : steps_(steps), older_(steps.size() - newest) {
    for (std::size_t i = 0; i < steps.front().owners.size(); ++i) {
      add(i, &RankSpeeds::Step::forward_s);
      add(i, &RankSpeeds::Step::weight_gradient_s);
    }
    for (std::size_t t = 0; t < steps.size(); ++t) add_levels(t);
  }

  // Returns the change that all these layers share in the newest steps, or 0 if none reaches
  // `least`.
  double shared(const std::set<std::size_t>& layers, double least) const {
    std::vector<double> rates;
    std::vector<double> wholes;
    for (std::size_t t = older_; t < steps_.size(); ++t) {
      std::vector<double> rate;
      for (const Part& part : parts_) {
        if (!layers.contains(part.layer)) continue;
        rate.push_back(relative(*part.rate[t], common_[t]));
        wholes.push_back(relative(*part.whole[t], common_[t]));
      }
      if (rate.empty()) return 0;
      rates.push_back(median_in_place(rate));
    }
    const double change = median(rates);
    const auto shows_half = [&](double value) { return value / change >= 0.5; };
    if (!(std::abs(change) >= least) || !std::ranges::all_of(rates, shows_half)) return 0;
    if (!shows_half(median_in_place(wholes))) return 0;
    const auto differs = [&](const Part& part) {
      if (!layers.contains(part.layer)) return false;
      const double allowed = std::max(std::min(kAlikeShare * std::abs(change), kMostApart),
                                      kSpeedDeviations * error(part.noise));
      return std::abs(own_change(part) - change) > allowed;
    };
    return std::ranges::any_of(parts_, differs) ? 0 : change;
  }

  // Returns whether the change exceeds the noise of the rank's level in older steps.
  bool exceeds_noise(Rank rank, double change) const {
    std::vector<double> levels = levels_of(rank, 0, older_);
    if (levels.size() < kUsualSteps) return false;
    const double center = median(levels);
    for (double& level : levels) level = std::abs(level - center);
    return std::abs(change - center) >
           kSpeedDeviations * error(kDeviationPerMad * median_in_place(levels));
  }

  // Returns the number of newest steps that show the change.
  std::size_t age(Rank rank, double change) const {
    std::size_t count = 0;
    while (count < steps_.size()) {
      const std::size_t t = steps_.size() - 1 - count;
      const std::vector<double> level = levels_of(rank, t, t + 1);
      if (level.empty() || level.front() / change < 0.5) break;
      ++count;
    }
    return count;
  }

  // Returns the median level over the newest steps.
  double level(Rank rank) const { return median(levels_of(rank, older_, steps_.size())); }

  // Returns the layers that are timed.
  std::set<std::size_t> layers() const {
    std::set<std::size_t> result;
    for (const Part& part : parts_) result.insert(part.layer);
    return result;
  }

 private:
  // Returns a rank's change relative to the common one. So a rank does not count as slow if only
  // the others have less work.
  static double relative(double value, double common) {
    if (common >= 0) return value - common;
    return value < 0 ? std::min(0.0, value - common) : value;
  }

  // Returns the standard error of the difference between the medians of the newest and the older
  // steps.
  double error(double noise) const {
    const auto newest = static_cast<double>(steps_.size() - older_);
    return kMedianPerMeanError * noise * std::sqrt(1 / newest + 1 / static_cast<double>(older_));
  }

  double own_change(const Part& part) const {
    std::vector<double> values;
    for (std::size_t t = older_; t < steps_.size(); ++t) {
      values.push_back(relative(*part.rate[t], common_[t]));
    }
    return median_in_place(values);
  }

  std::vector<double> levels_of(Rank rank, std::size_t from, std::size_t to) const {
    std::vector<double> result;
    for (std::size_t t = from; t < to; ++t) {
      const auto found = levels_[t].find(rank);
      if (found != levels_[t].end()) result.push_back(relative(found->second, common_[t]));
    }
    return result;
  }

  void add(std::size_t layer, std::vector<double> RankSpeeds::Step::*seconds) {
    Part part{.layer = layer};
    bool counted = true;
    for (const RankSpeeds::Step& step : steps_) {
      const double time = (step.*seconds)[layer];
      const double work = step.work[layer];
      part.whole.push_back(time > 0 ? std::optional(std::log(time)) : std::nullopt);
      counted = counted && (work > 0 || !(time > 0));
      part.rate.push_back(time > 0 && work > 0 ? std::optional(std::log(time / work))
                                               : std::nullopt);
    }
    if (!counted) part.rate = part.whole;
    for (std::size_t t = older_; t < steps_.size(); ++t) {
      if (!part.rate[t]) return;
    }
    if (!center(part.whole) || !center(part.rate)) return;
    part.noise =
        kDeviationPerMad * median_of_older(part.rate, [](double v) { return std::abs(v); });
    parts_.push_back(std::move(part));
  }

  template <typename Get>
  double median_of_older(const std::vector<std::optional<double>>& values, Get get) const {
    std::vector<double> older;
    for (std::size_t t = 0; t < older_; ++t) {
      if (values[t]) older.push_back(get(*values[t]));
    }
    return median_in_place(older);
  }

  // Subtracts the median of the older steps. Returns false if there are too few of them.
  bool center(std::vector<std::optional<double>>& values) const {
    const auto older =
        std::ranges::subrange(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(older_));
    const auto measured = std::ranges::count_if(older, [](const auto& v) { return v.has_value(); });
    if (measured < static_cast<std::ptrdiff_t>(kUsualSteps)) return false;
    const double usual = median_of_older(values, [](double v) { return v; });
    for (std::optional<double>& value : values) {
      if (value) *value -= usual;
    }
    return true;
  }

  // Adds the levels of the ranks in step `t`, each the median of the rank's parts. Also adds the
  // common part: the change that more than half of the ranks share.
  void add_levels(std::size_t t) {
    std::map<Rank, std::vector<double>> of_rank;
    for (const Part& part : parts_) {
      if (part.rate[t]) of_rank[steps_[t].owners[part.layer]].push_back(*part.rate[t]);
    }
    std::map<Rank, double>& levels = levels_.emplace_back();
    std::vector<double> values;
    for (auto& [rank, rates] : of_rank) {
      values.push_back(levels[rank] = median_in_place(rates));
    }
    std::ranges::sort(values);
    const double lower = values.empty() ? 0 : values[(values.size() - 1) / 2];
    const double upper = values.empty() ? 0 : values[values.size() / 2];
    common_.push_back(lower > 0 ? lower : std::min(0.0, upper));
  }

  const std::deque<RankSpeeds::Step>& steps_;
  std::size_t older_;
  std::vector<Part> parts_;
  std::vector<std::map<Rank, double>> levels_;  // by step
  std::vector<double> common_;                  // by step
};

}  // namespace

double RankSpeeds::factor(Rank rank) const {
  const auto found = factors_.find(rank);
  return found != factors_.end() ? found->second : 1;
}

const std::vector<SpeedChange>& RankSpeeds::add(const std::vector<cost::LayerSample>& layers,
                                                const std::vector<Rank>& owners,
                                                std::int64_t steps) {
  DYNMO_CHECK(owners.size() == layers.size() &&
                  (window_.empty() || window_.front().owners.size() == layers.size()),
              "layers and their ranks, as before, got {} and {}", layers.size(), owners.size());
  Step& step = window_.emplace_back();
  step.owners = owners;
  step.steps = steps;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const double slowness = factor(owners[i]);
    step.forward_s.push_back(layers[i].time.forward_s / slowness);
    step.weight_gradient_s.push_back(layers[i].time.weight_gradient_s / slowness);
    step.work.push_back(layers[i].work);
  }
  if (window_.size() > kSpeedWindow) window_.pop_front();
  changes_.clear();
  learn_from_moves();
  if (changes_.empty()) find_new_speeds();
  return changes_;
}

void RankSpeeds::find_new_speeds() {
  if (window_.size() < kUsualSteps + kSlowSteps) return;
  const Evidence evidence(window_, kSlowSteps);
  std::map<Rank, std::set<std::size_t>> stayed;
  for (const std::size_t layer : evidence.layers()) {
    const Rank rank = window_.back().owners[layer];
    const auto here = [&](const Step& step) { return step.owners[layer] == rank; };
    const auto since = window_.end() - static_cast<std::ptrdiff_t>(kSlowSteps + 1);
    if (std::all_of(since, window_.end(), here)) stayed[rank].insert(layer);
  }
  for (const auto& [rank, layers] : stayed) {
    const double before = factor(rank);
    const double change = evidence.shared(layers, before > 1 ? kLeastOfSlow : kLeastSlow);
    if (change == 0 || (change < 0 && before == 1)) continue;
    // Few layers may be left on a slow rank when it is fast again.
    if (layers.size() < kSpeedLayers && !ends(before, change)) continue;
    if (!evidence.exceeds_noise(rank, change)) continue;
    set(rank, before * std::exp(change), std::max(kSlowSteps, evidence.age(rank, change)));
  }
}

void RankSpeeds::learn_from_moves() {
  if (window_.size() < kUsualSteps + kMovedSteps) return;
  const Step& before = window_[window_.size() - kMovedSteps - 1];
  const Step& now = window_.back();
  const auto same = [&](const Step& step) { return step.owners == now.owners; };
  const auto newest = window_.end() - static_cast<std::ptrdiff_t>(kMovedSteps);
  if (before.owners == now.owners || !std::all_of(newest, window_.end(), same)) return;
  const Evidence evidence(window_, kMovedSteps);
  std::map<Rank, std::set<std::size_t>> left;
  std::map<Rank, std::set<std::size_t>> arrived;
  for (const std::size_t layer : evidence.layers()) {
    if (before.owners[layer] == now.owners[layer]) continue;
    left[before.owners[layer]].insert(layer);
    arrived[now.owners[layer]].insert(layer);
  }
  for (const auto& [rank, layers] : arrived) {
    const double change = evidence.shared(layers, kLeastOfSlow);
    if (ends(factor(rank), change)) set(rank, 1, kMovedSteps);
  }
  if (!changes_.empty()) return;
  for (const auto& [rank, layers] : left) {
    if (is_lost(rank)) continue;
    const double slowness = factor(rank);
    const double refuted = slowness > 1 ? std::log(slowness) / 2 : kLeastSlow;
    const double change = evidence.shared(layers, std::min(refuted, kLeastSlow));
    if (change == 0 || (change > 0 && (slowness == 1 || change < refuted))) continue;
    if (change < 0 && (-change < kLeastSlow || layers.size() < kSpeedLayers)) continue;
    // The layers that stayed on the rank must not have changed, too.
    const double of_rest = evidence.level(rank);
    if (std::abs(of_rest) > std::abs(change) / 2) continue;
    set(rank, slowness * std::exp(-change), window_.size());
  }
}

// Sets a factor, and corrects the newest steps of the rank's layers.
void RankSpeeds::set(Rank rank, double factor, std::size_t samples) {
  SpeedChange change{.rank = rank, .before = this->factor(rank)};
  change.factor = factor < kFullSpeed ? 1 : factor;
  if (change.factor > 1) {
    factors_[rank] = change.factor;
  } else {
    factors_.erase(rank);
  }
  for (auto step = window_.rbegin(); step != window_.rend() && samples > 0; ++step, --samples) {
    change.steps += step->steps;
    ++change.samples;
    for (std::size_t i = 0; i < step->owners.size(); ++i) {
      if (step->owners[i] != rank) continue;
      step->forward_s[i] *= change.before / change.factor;
      step->weight_gradient_s[i] *= change.before / change.factor;
    }
  }
  changes_.push_back(change);
}

void RankSpeeds::restart() {
  for (Step& step : window_) {
    for (std::size_t i = 0; i < step.work.size(); ++i) {
      if (!(step.work[i] > 0)) step.forward_s[i] = step.weight_gradient_s[i] = 0;
    }
  }
}

void RankSpeeds::forget_times() {
  window_.clear();
  changes_.clear();
}

void RankSpeeds::scale(const std::vector<double>& factors, int steps) {
  const std::size_t older =
      window_.size() - std::min(window_.size(), static_cast<std::size_t>(steps));
  for (std::size_t t = 0; t < older; ++t) {
    for (std::size_t i = 0; i < factors.size(); ++i) {
      window_[t].forward_s[i] *= factors[i];
      window_[t].weight_gradient_s[i] *= factors[i];
    }
  }
}

std::vector<cost::LayerSample> RankSpeeds::at_full_speed(std::vector<cost::LayerSample> layers,
                                                         const std::vector<Rank>& owners) const {
  if (factors_.empty()) return layers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    layers[i] = cost::scaled(layers[i], 1 / factor(owners[i]));
  }
  return layers;
}

cost::Cluster RankSpeeds::slowed(cost::Cluster ranks) const {
  for (const auto& [rank, slowness] : factors_) {
    if (rank.index() < ranks.ranks.size()) ranks.ranks[rank.index()].speed /= slowness;
  }
  return ranks;
}

// Lost ranks get negative numbers, so that their steps in the window stay separate.
void RankSpeeds::ranks_changed(const std::vector<std::optional<Rank>>& before) {
  std::map<Rank, Rank> now;
  std::map<Rank, double> factors;
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (!before[i]) continue;
    const Rank rank(static_cast<std::int32_t>(i));
    now.emplace(*before[i], rank);
    if (factor(*before[i]) > 1) factors.emplace(rank, factor(*before[i]));
  }
  factors_ = std::move(factors);
  Rank lowest(0);
  for (const Step& step : window_) {
    for (const Rank owner : step.owners) lowest = std::min(lowest, owner);
  }
  for (Step& step : window_) {
    for (Rank& owner : step.owners) {
      if (is_lost(owner)) continue;
      if (!now.contains(owner)) now.emplace(owner, Rank(--lowest.value));
      owner = now.at(owner);
    }
  }
}

bool RankSpeeds::fits(std::size_t layers) const {
  const auto is_fast = [](const auto& each) { return !(each.second > 1); };
  return std::ranges::none_of(factors_, is_fast) &&
         std::ranges::all_of(window_, [&](const Step& step) {
           return step.owners.size() == layers && step.forward_s.size() == layers &&
                  step.weight_gradient_s.size() == layers && step.work.size() == layers;
         });
}

}  // namespace dynmo::control
