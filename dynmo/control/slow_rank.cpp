// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/slow_rank.h"

#include <algorithm>
#include <limits>

#include "dynmo/core/median.h"

namespace dynmo::control {
namespace {

constexpr std::size_t kNew = 5;  // steps
constexpr std::size_t kWindow = 20;
constexpr double kSlow = 1.5;

double median_between(const std::deque<std::vector<double>>& steps, std::size_t from,
                      std::size_t to, std::size_t layer) {
  std::vector<double> values;
  for (std::size_t i = from; i < to; ++i) values.push_back(steps[i][layer]);
  return median(std::move(values));
}

}  // namespace

std::optional<SlowRank> SlowRankDetector::add(const std::vector<cost::LayerSample>& layers,
                                              const plan::Plan& plan) {
  std::vector<double>& newest = forward_s_.emplace_back();
  for (const cost::LayerSample& layer : layers) newest.push_back(layer.time.forward_s);
  if (forward_s_.size() > kWindow) forward_s_.pop_front();
  if (quiet_ > 0) --quiet_;
  if (forward_s_.size() < kWindow || quiet_ > 0) return std::nullopt;

  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<double> slowed(static_cast<std::size_t>(plan.ranks), kNone);
  for (const plan::PlanStage& stage : plan.stages) {
    for (int i = stage.layers.first.value; i < stage.layers.end(); ++i) {
      const auto layer = static_cast<std::size_t>(i);
      const double before = median_between(forward_s_, 0, kWindow - kNew, layer);
      const double now = median_between(forward_s_, kWindow - kNew, kWindow, layer);
      double& least = slowed[stage.rank.index()];
      if (before > 0) least = std::min(least, now / before);
    }
  }
  double common = kNone;
  std::optional<SlowRank> slowest;
  for (std::size_t rank = 0; rank < slowed.size(); ++rank) {
    common = std::min(common, slowed[rank]);
    if (slowed[rank] == kNone || (slowest && slowed[rank] <= slowest->factor)) continue;
    slowest = SlowRank{Rank(static_cast<std::int32_t>(rank)), slowed[rank]};
  }
  if (!slowest) return std::nullopt;
  slowest->factor /= std::max(1.0, common);
  if (slowest->factor < kSlow) return std::nullopt;
  quiet_ = static_cast<int>(kWindow);
  return slowest;
}

}  // namespace dynmo::control
