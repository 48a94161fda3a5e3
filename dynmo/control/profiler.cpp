// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/profiler.h"

#include <algorithm>
#include <cmath>
#include <ranges>

#include "dynmo/core/check.h"
#include "dynmo/core/median.h"
#include "dynmo/dynamism/freezing/schedule.h"

namespace dynmo::control {
namespace {

constexpr std::size_t kLongest = 8;     // multiple of the minimum window
constexpr int kMeasuredAgain = 6;       // steps since a change
constexpr std::size_t kLevelSteps = 3;  // whose median is the duration of a step

bool is_frozen(std::size_t layer, int frozen_layers) {
  return layer < static_cast<std::size_t>(frozen_layers);
}

// Sums a layer's times without its update.
double total_s(const cost::LayerTime& time, bool frozen) {
  return frozen ? time.forward_s : time.forward_s + time.input_gradient_s + time.weight_gradient_s;
}

// Returns the index of the first of the newest `count` elements.
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

Profiler::Profiler(cost::ModelCost known, int window, double relevant)
    : known_(std::move(known)),
      minimum_{.steps = static_cast<std::size_t>(std::max(window, 1)), .change = relevant},
      noise_(kLongest * minimum_.steps) {}

void Profiler::forget_times() {
  window_.clear();
  found_.clear();
  noise_ = NoiseMeter(kLongest * minimum_.steps);
  work_.clear();
  last_.clear();
}

std::optional<FoundChange> Profiler::add(const std::vector<cost::LayerSample>& layers,
                                         const std::vector<Rank>& owners,
                                         const cost::StepSample& step, int frozen_layers) {
  DYNMO_CHECK(layers.size() == known_.layers.size() && owners.size() == layers.size(),
              "{} layers and their ranks, got {} and {}", known_.layers.size(), layers.size(),
              owners.size());
  Sample sample{.layers = layers, .owners = owners, .overhead = step};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].stash_bytes > Bytes{0}) known_.layers[i].activation_bytes = layers[i].stash_bytes;
    if (layers[i].boundary_bytes > Bytes{0}) {
      known_.layers[i].boundary_bytes = layers[i].boundary_bytes;
      measured_boundaries_ = true;
    }
    sample.forward_s += layers[i].time.forward_s;
  }
  note_work(layers);
  noise_.add(sample.layers, sample.owners);
  note_trained(frozen_layers);
  fill_in(sample, frozen_layers);
  frozen_layers_ = frozen_layers;
  if (outdated_) {
    window_.clear();
    found_.clear();
  }
  outdated_ = false;
  if (window_.empty()) {
    products_.clear();
    for (const cost::LayerCost& layer : known_.layers) {
      products_.push_back({.time = layer.product_time, .gradient_bytes = layer.gradient_bytes});
    }
  }
  window_.push_back(std::move(sample));
  if (window_.size() > kLongest * minimum_.steps) window_.pop_front();
  note_overhead();
  return find(frozen_layers);
}

// Notes the backward passes, from the window, of layers that trained in the step before and no
// longer do.
void Profiler::note_trained(int frozen_layers) {
  for (int i = frozen_layers_; i < frozen_layers && !window_.empty(); ++i) {
    const auto layer = static_cast<std::size_t>(i);
    const auto ratio = [&](auto get) {
      return median_of(window_, [&](const Sample& step) {
        const cost::LayerSample& sample = step.layers[layer];
        return share(get(sample), sample.time.forward_s);
      });
    };
    last_[layer] = {
        .input_gradient = ratio([](const auto& s) { return s.time.input_gradient_s; }),
        .weight_gradient = ratio([](const auto& s) { return s.time.weight_gradient_s; }),
        .update = ratio([](const auto& s) { return s.update_s; })};
  }
}

// Sets the unmeasured times of layers. A layer that has never trained here gets the times of
// training layers with an equal forward pass. The first layer has no input gradient. A layer that
// trains again lacks its update for one more step, because a step measures that of the previous
// one.
void Profiler::fill_in(Sample& sample, int frozen_layers) const {
  const int changed = std::max(frozen_layers, frozen_layers_);
  cost::LayerSample sum;
  for (std::size_t i = 0; i < sample.layers.size(); ++i) {
    if (is_frozen(i, changed)) continue;
    const cost::LayerSample& layer = sample.layers[i];
    sum.time.forward_s += layer.time.forward_s;
    sum.time.input_gradient_s += layer.time.input_gradient_s;
    sum.time.weight_gradient_s += layer.time.weight_gradient_s;
    sum.update_s += layer.update_s;
  }
  for (std::size_t i = 0; i < sample.layers.size() && is_frozen(i, changed); ++i) {
    const auto last = last_.find(i);
    const Trained trained =
        last != last_.end()
            ? last->second
            : Trained{.input_gradient =
                          i == 0 ? 0 : share(sum.time.input_gradient_s, sum.time.forward_s),
                      .weight_gradient = share(sum.time.weight_gradient_s, sum.time.forward_s),
                      .update = share(sum.update_s, sum.time.forward_s)};
    cost::LayerSample& layer = sample.layers[i];
    layer.update_s = trained.update * layer.time.forward_s;
    if (!is_frozen(i, frozen_layers)) continue;
    layer.time.input_gradient_s = trained.input_gradient * layer.time.forward_s;
    layer.time.weight_gradient_s = trained.weight_gradient * layer.time.forward_s;
  }
}

void Profiler::note_overhead() {
  for (const auto field :
       {&cost::StepSample::overhead_s, &cost::StepSample::action_s, &cost::StepSample::message_s,
        &cost::StepSample::reduction_bytes_per_s}) {
    std::vector<double> measured;
    for (std::size_t i = first_of_newest(window_, minimum_.steps); i < window_.size(); ++i) {
      if (window_[i].overhead.*field) measured.push_back(*(window_[i].overhead.*field));
    }
    if (!measured.empty()) overhead_.*field = median(std::move(measured));
  }
}

// Scales the window to the work of the step that is added.
void Profiler::note_work(const std::vector<cost::LayerSample>& layers) {
  work_.resize(layers.size());
  std::vector<double> factors(layers.size(), 1.0);
  double change = 0;
  int counted = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!(layers[i].work > 0)) continue;
    if (work_[i] > 0) {
      factors[i] = layers[i].work / work_[i];
      change += std::abs(factors[i] - 1);
      ++counted;
    }
    work_[i] = layers[i].work;
  }
  if (counted == 0) return;
  noise_.add_work_change(change / counted);
  if (change == 0) return;
  for (Sample& step : window_) {
    for (std::size_t i = 0; i < factors.size(); ++i) {
      cost::LayerTime& time = step.layers[i].time;
      step.forward_s += (factors[i] - 1) * time.forward_s;
      time = {factors[i] * time.forward_s, factors[i] * time.input_gradient_s,
              factors[i] * time.weight_gradient_s};
    }
  }
  noise_.scale(factors);
}

// Returns the layers' times without their updates. Layers that are frozen now have only forward
// times in all steps, so that freezing does not look like a change.
std::deque<LayerTimes> Profiler::times(int frozen_layers) const {
  std::deque<LayerTimes> steps;
  for (const Sample& sample : window_) {
    LayerTimes& times = steps.emplace_back();
    times.owners = sample.owners;
    for (std::size_t i = 0; i < sample.layers.size(); ++i) {
      times.seconds.push_back(total_s(sample.layers[i].time, is_frozen(i, frozen_layers)));
    }
  }
  return steps;
}

// Finds a change. Also measures the found changes again, 6 and 12 steps after each.
std::optional<FoundChange> Profiler::find(int frozen_layers) {
  for (FoundChange& found : found_) {
    ++found.steps;
    if (found.steps != kMeasuredAgain && found.steps != 2 * kMeasuredAgain) continue;
    if (steps() <= found.steps) continue;
    scale(measure_change(times(frozen_layers), found), found.steps, frozen_layers);
  }
  std::erase_if(found_, [](const FoundChange& f) { return f.steps >= 2 * kMeasuredAgain; });
  auto found = find_change(times(frozen_layers), {.own = noise_.own(), .rank = noise_.rank()},
                           minimum_.change);
  if (!found) return found;
  scale(found->factors, found->steps, frozen_layers);
  found_.push_back(*found);
  return found;
}

void Profiler::scale(Rank rank, double factor, std::int64_t steps) {
  for (auto step = window_.rbegin(); step != window_.rend() && steps > 0; ++step, --steps) {
    for (std::size_t i = 0; i < step->layers.size(); ++i) {
      if (step->owners[i] != rank) continue;
      step->forward_s += (factor - 1) * step->layers[i].time.forward_s;
      step->layers[i] = cost::scaled(step->layers[i], factor);
    }
  }
}

// Gives the parts of a changed layer's time the proportions of the newest steps.
void Profiler::scale(const std::vector<double>& factors, int steps, int frozen_layers) {
  const auto older =
      static_cast<std::ptrdiff_t>(first_of_newest(window_, static_cast<std::size_t>(steps)));
  const std::ranges::subrange newest(window_.begin() + older, window_.end());
  for (std::size_t i = 0; i < factors.size(); ++i) {
    if (factors[i] == 1) continue;
    const bool frozen = is_frozen(i, frozen_layers);
    const auto part = [&](auto field) {
      return median_of(newest, [&](const Sample& step) {
        const cost::LayerTime& time = step.layers[i].time;
        return share(time.*field, total_s(time, frozen));
      });
    };
    const double forward = part(&cost::LayerTime::forward_s);
    const double input = part(&cost::LayerTime::input_gradient_s);
    const double weight = part(&cost::LayerTime::weight_gradient_s);
    for (auto step = window_.begin(); step != window_.begin() + older; ++step) {
      cost::LayerTime& time = step->layers[i].time;
      const double total = factors[i] * total_s(time, frozen);
      step->forward_s += forward * total - time.forward_s;
      time = {forward * total, input * total, weight * total};
    }
  }
}

void Profiler::know(cost::ModelCost known) {
  DYNMO_CHECK(known.layers.size() == known_.layers.size(), "{} layers, got {}",
              known_.layers.size(), known.layers.size());
  for (std::size_t i = 0; i < known.layers.size(); ++i) {
    known.layers[i].activation_bytes = known_.layers[i].activation_bytes;
    if (measured_boundaries_) known.layers[i].boundary_bytes = known_.layers[i].boundary_bytes;
  }
  known_ = std::move(known);
  if (!products_hold(known_)) outdated_ = true;
}

bool Profiler::products_hold(const cost::ModelCost& known) const {
  return std::equal(
      products_.begin(), products_.end(), known.layers.begin(),
      [](const Products& a, const cost::LayerCost& b) { return a.time == b.product_time; });
}

// Returns the window with the product times of `known`. Dense products take the time of W, which
// has only products. F and I have the same products once each. The update is proportional to the
// kept values.
std::deque<Profiler::Sample> Profiler::predicted(const cost::ModelCost& known) const {
  std::deque<Sample> window = window_;
  for (std::size_t i = 0; i < products_.size(); ++i) {
    const Products& before = products_[i];
    const double now = known.layers[i].product_time;
    if (now == before.time) continue;
    const double values = before.gradient_bytes > Bytes{0}
                              ? static_cast<double>(known.layers[i].gradient_bytes.value) /
                                    static_cast<double>(before.gradient_bytes.value)
                              : 1;
    for (Sample& step : window) {
      cost::LayerSample& layer = step.layers[i];
      const double dense = layer.time.weight_gradient_s / before.time;
      const auto with = [&](double seconds) {
        return std::max(seconds + (now - before.time) * dense, seconds * now / before.time);
      };
      step.forward_s -= layer.time.forward_s;
      layer.time = {.forward_s = with(layer.time.forward_s),
                    .input_gradient_s = with(layer.time.input_gradient_s),
                    .weight_gradient_s = now * dense};
      step.forward_s += layer.time.forward_s;
      layer.update_s *= values;
    }
  }
  return window;
}

cost::ModelCost Profiler::known(int frozen_layers) const {
  return dynamism::freeze_prefix(known_, frozen_layers);
}

std::optional<cost::ModelCost> Profiler::costs(cost::ModelCost known) const {
  if (window_.empty()) return std::nullopt;
  DYNMO_CHECK(known.layers.size() == known_.layers.size(), "{} layers, got {}",
              known_.layers.size(), known.layers.size());
  const std::deque<Sample> other = products_hold(known) ? std::deque<Sample>() : predicted(known);
  const std::deque<Sample>& window = other.empty() ? window_ : other;
  const std::ranges::subrange newest(
      window.begin() + static_cast<std::ptrdiff_t>(first_of_newest(window, kLevelSteps)),
      window.end());
  const double forward_s = median_of(newest, [](const Sample& step) { return step.forward_s; });
  const int prefix = known.frozen_layers();
  for (std::size_t i = 0; i < known.layers.size(); ++i) {
    cost::LayerCost& layer = known.layers[i];
    const auto over_window = [&](auto get) {
      return forward_s * median_of(window, [&](const Sample& step) {
               return share(get(step.layers[i]), step.forward_s);
             });
    };
    layer.forward_s = over_window([](const cost::LayerSample& s) { return s.time.forward_s; });
    layer.backward_input_s = layer.backward_weight_s = layer.update_s = 0;
    if (i >= static_cast<std::size_t>(prefix)) {
      layer.backward_input_s =
          over_window([](const cost::LayerSample& s) { return s.time.input_gradient_s; });
    }
    if (layer.frozen) continue;
    layer.backward_weight_s =
        over_window([](const cost::LayerSample& s) { return s.time.weight_gradient_s; });
    layer.update_s = over_window([](const cost::LayerSample& s) { return s.update_s; });
  }
  return known;
}

std::vector<cost::Observation> Profiler::observations() const {
  std::vector<cost::Observation> steps;
  for (const Sample& sample : window_) {
    steps.push_back({.layers = sample.layers, .overhead = sample.overhead});
  }
  return steps;
}

double Profiler::median_error(bool of_ranks) const {
  std::vector<double> steps(known_.layers.size(), static_cast<double>(std::max(this->steps(), 1)));
  for (const FoundChange& found : found_) {
    if (found.rank.has_value() != of_ranks) continue;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (found.factors[i] != 1) steps[i] = std::min(steps[i], static_cast<double>(found.steps));
    }
  }
  double variance = 0;
  for (const double count : steps) variance += 1 / count;
  variance /= static_cast<double>(std::max<std::size_t>(steps.size(), 1));
  return std::min(1.0, kMedianPerMeanError * std::sqrt(variance));
}

double Profiler::relative_noise() const { return median_error(false) * noise_.own(); }

double Profiler::rank_noise() const { return median_error(true) * noise_.rank(); }

}  // namespace dynmo::control
