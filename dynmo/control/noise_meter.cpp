// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/noise_meter.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <utility>

#include "dynmo/core/median.h"

namespace dynmo::control {
namespace {

std::map<Rank, double> forward_by_rank(const std::vector<cost::LayerSample>& layers,
                                       const std::vector<Rank>& owners) {
  std::map<Rank, double> sums;
  for (std::size_t i = 0; i < layers.size(); ++i) sums[owners[i]] += layers[i].time.forward_s;
  return sums;
}

}  // namespace

// Adds the differences of the layers' shares and the ranks' sums from the previous step, under the
// same plan.
void NoiseMeter::add(const std::vector<cost::LayerSample>& layers,
                     const std::vector<Rank>& owners) {
  const std::map<Rank, double> sums = forward_by_rank(layers, owners);
  std::vector<double> shares;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    shares.push_back(share(layers[i].time.forward_s, sums.at(owners[i])));
  }
  std::vector<double> levels;
  double total = 0;
  for (const auto& [rank, sum] : sums) {
    levels.push_back(std::log(std::max(sum, 1e-12)));
    total += levels.back();
  }
  const auto ranks = static_cast<double>(levels.size());
  for (double& level : levels) level -= total / ranks;
  if (owners == owners_) {
    std::vector<double>& changes = own_changes_.emplace_back();
    for (std::size_t i = 0; i < shares.size(); ++i) {
      const double before = own_shares_[i];
      changes.push_back(2 * share(std::abs(shares[i] - before), shares[i] + before));
    }
    if (own_changes_.size() > longest_) own_changes_.pop_front();
    for (std::size_t i = 0; ranks > 1 && i < levels.size(); ++i) {
      // The levels are relative to the mean of the ranks. So their difference has 2 (1 - 1 / ranks)
      // times the variance of one value.
      rank_changes_.push_back(std::abs(levels[i] - rank_levels_[i]) /
                              std::sqrt(2 * (1 - 1 / ranks)));
    }
    while (rank_changes_.size() > longest_ * levels.size()) rank_changes_.pop_front();
    double sum = 0;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      sum += median_of(own_changes_, [&](const std::vector<double>& step) { return step[i]; });
    }
    own_deviation_ = kDeviationPerMad / std::sqrt(2.0) * sum / static_cast<double>(shares.size());
    rank_deviation_ = kDeviationPerMad * median({rank_changes_.begin(), rank_changes_.end()});
  }
  owners_ = owners;
  own_shares_ = std::move(shares);
  rank_levels_ = std::move(levels);
}

void NoiseMeter::scale(const std::vector<double>& factors) {
  std::map<Rank, double> sums;  // of the scaled shares, by rank
  for (std::size_t i = 0; i < owners_.size(); ++i) {
    own_shares_[i] *= factors[i];
    sums[owners_[i]] += own_shares_[i];
  }
  for (std::size_t i = 0; i < owners_.size(); ++i) {
    own_shares_[i] = share(own_shares_[i], sums[owners_[i]]);
  }
  double total = 0;
  std::size_t rank = 0;
  for (const auto& [owner, sum] : sums) {
    rank_levels_[rank] += std::log(std::max(sum, 1e-12));
    total += rank_levels_[rank++];
  }
  for (double& level : rank_levels_) level -= total / static_cast<double>(rank_levels_.size());
}

void NoiseMeter::add_work_change(double change) {
  work_changes_.push_back(change);
  if (work_changes_.size() > longest_) work_changes_.pop_front();
}

// Divides by 2 / sqrt(pi), the mean difference of two normal numbers of std 1.
double NoiseMeter::work() const {
  if (work_changes_.empty()) return 0;
  return std::sqrt(std::numbers::pi) / 2 * median({work_changes_.begin(), work_changes_.end()});
}

bool NoiseMeter::fits(std::size_t layers) const {
  return (owners_.empty() || owners_.size() == layers) && own_shares_.size() == owners_.size() &&
         std::ranges::all_of(own_changes_, [&](const std::vector<double>& step) {
           return step.empty() || step.size() == layers;
         });
}

}  // namespace dynmo::control
