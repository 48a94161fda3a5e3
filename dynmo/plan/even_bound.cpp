// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "dynmo/plan/even_bound_impl.h"

namespace dynmo::plan::internal {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

constexpr int kNewtonSteps = 20;
constexpr double kRounding = 1e-9;  // far above that of sums of a million doubles

struct Prices {
  double above = 0;
  double below = 0;
  std::vector<double> values_above;
  std::vector<double> values_below;
};

// Last in [low, high] that is not `beyond`, which is monotone; low if all are.
template <typename Beyond>
int last_false(int low, int high, Beyond beyond) {
  while (low < high) {
    const int middle = high - (high - low) / 2;
    beyond(middle) ? high = middle - 1 : low = middle;
  }
  return low;
}

}  // namespace

EvenBound::EvenBound(const Chain& chain) : chain_(chain), capacity_(1, 0.0) {
  for (const ChainRank& rank : chain.ranks) {
    const auto slowness = static_cast<double>(rank.tie_slowness);
    capacity_.push_back(capacity_.back() + 1 / (slowness * slowness));
    fastest_ = std::max(fastest_, 1 / (slowness * slowness));
  }
  // Finds the price p at which the bound is highest: the sum of min(w, p c) is p x all capacity.
  // This is Newton's method from above on a concave, piecewise linear function. Any result is a
  // valid price.
  price_ = work(0, chain.layers()) / capacity_.back();
  for (int i = 0; i < kNewtonSteps; ++i) {
    double light = 0;
    double capacity = capacity_.back();
    for (int layer = 0; layer < chain.layers(); ++layer) {
      const double w = work(layer, layer + 1);
      if (price_ * fastest_ < w) {
        capacity -= fastest_;
      } else {
        light += w;
      }
    }
    if (capacity <= 0 || light / capacity >= price_) break;
    price_ = light / capacity;
  }
  values_ = values(price_);
}

std::vector<Window> EvenBound::near_divisible() const {
  std::vector<Window> windows(1, {0, 0});
  std::vector<double> taken(1, 0.0);
  for (int layer = 0; layer < chain_.layers(); ++layer) {
    taken.push_back(taken.back() + std::min(work(layer, layer + 1), price_ * fastest_));
  }
  for (int s = 1; s < chain_.size(); ++s) {
    const double middle = price_ * capacity_[at(s)];
    const auto low = std::lower_bound(taken.begin(), taken.end(), middle - price_ * fastest_);
    const auto high = std::upper_bound(low, taken.end(), middle + price_ * fastest_);
    const auto first = static_cast<int>(low - taken.begin());
    windows.push_back({first, static_cast<int>(high - taken.begin()) - 1});
  }
  return windows;
}

// One price for the layers before a start and another for those behind it bound the sum of all. The
// bound is a monotone function of the start. The best distance of the two is sqrt(slack / capacity
// of a side).
std::vector<Window> EvenBound::within(Wide squares) const {
  std::vector<Window> windows(1, {0, 0});
  if (squares == 0) return windows;
  const double all = capacity_.back();
  const auto sum = static_cast<double>(squares);
  const double slack = std::max(sum - values_.back() + price_ * price_ * all, kRounding * sum);
  const double min_step = std::sqrt(slack / all);
  std::vector<Prices> steps;
  for (double step = min_step; step < 2 * std::sqrt(slack / fastest_); step *= 2) {
    const double lower = std::max(price_ - step, 0.0);
    steps.push_back({price_ + step, lower, values(price_ + step), values(lower)});
  }
  const auto best = [&](double capacity) -> const Prices& {
    const auto step = std::lround(std::log2(std::sqrt(all / capacity)));
    return steps[std::min(static_cast<std::size_t>(step), steps.size() - 1)];
  };
  for (int s = 1; s < chain_.size(); ++s) {
    const Prices& front = best(capacity_[at(s)]);
    const Prices& back = best(all - capacity_[at(s)]);
    const auto beyond = [&](double price, const std::vector<double>& value, double price_behind,
                            const std::vector<double>& value_behind, int start) {
      const double gain = value[at(start)] + value_behind.back() - value_behind[at(start)];
      const double loss =
          price * price * capacity_[at(s)] + price_behind * price_behind * (all - capacity_[at(s)]);
      const double summed = value.back() + value_behind.back() + loss + sum;
      return gain - loss > sum + kRounding * summed;
    };
    int low = s;
    int high = chain_.layers();
    high = last_false(low, high, [&](int start) {
      return beyond(front.above, front.values_above, price_, values_, start) ||
             beyond(price_, values_, back.below, back.values_below, start);
    });
    low = -last_false(-high, -low, [&](int start) {
      return beyond(front.below, front.values_below, price_, values_, -start) ||
             beyond(price_, values_, back.above, back.values_above, -start);
    });
    windows.push_back({low, high});
  }
  return windows;
}

std::vector<double> EvenBound::values(double price) const {
  std::vector<double> sums(1, 0.0);
  sums.reserve(at(chain_.layers()) + 1);
  for (int layer = 0; layer < chain_.layers(); ++layer) {
    const double w = work(layer, layer + 1);
    sums.push_back(sums.back() + (w <= price * fastest_
                                      ? 2 * price * w
                                      : w * w / fastest_ + price * price * fastest_));
  }
  return sums;
}

}  // namespace dynmo::plan::internal
