// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "dynmo/core/check.h"
#include "dynmo/core/permute.h"
#include "dynmo/tensor/counts_impl.h"

namespace dynmo::tensor {
namespace {

constexpr std::uint64_t kTail = 2048;    // the highest ranks, with a value each
constexpr std::uint64_t kStrata = 6144;  // of all other ranks
constexpr int kHalvings = 60;
constexpr double kMaxShape = 60;

__extension__ using WideRank = unsigned __int128;

}  // namespace

// Ranks below the tail.
std::uint64_t Counts::strata_below() const {
  return target_.groups > kTail + kStrata ? target_.groups - kTail : 0;
}

Expected<Counts> Counts::make(const CountTarget& target, std::uint64_t seed,
                              std::string_view what) {
  const auto groups = static_cast<double>(target.groups);
  const double mean = static_cast<double>(target.sum) / groups;
  if (target.sum < target.groups) {
    return make_error(ErrorCode::kBadInput, "{}: {} in {} groups, wanted at least one in each",
                      what, target.sum, target.groups);
  }
  const std::uint64_t rest = target.groups - 1;
  const bool fits = target.max <= target.sum - rest &&
                    (rest == 0 ? target.max == target.sum
                               : static_cast<double>(target.sum - target.max) <=
                                     static_cast<double>(rest) * static_cast<double>(target.max));
  if (!fits) {
    return make_error(ErrorCode::kBadInput,
                      "{}: a largest of {} contradicts a mean of {:.6g} in {} groups", what,
                      target.max, mean, target.groups);
  }
  Counts counts(target, seed);
  const std::uint64_t below = counts.strata_below();
  const auto add = [&](double first, double count) {
    const double u = (first + count / 2) / groups;
    counts.logits_.push_back(std::log(u / (1 - u)));
    counts.weights_.push_back(count);
  };
  const auto begin_of = [&](std::uint64_t stratum) {
    return (stratum * below + kStrata - 1) / kStrata;
  };
  for (std::uint64_t k = 0; below > 0 && k < kStrata; ++k) {
    add(static_cast<double>(begin_of(k)), static_cast<double>(begin_of(k + 1) - begin_of(k)));
  }
  for (std::uint64_t rank = below; rank < target.groups; ++rank) add(static_cast<double>(rank), 1);
  counts.values_.resize(counts.logits_.size());
  double low = 0;
  double high = kMaxShape;
  const double least = counts.cv_at(low);
  const double most = counts.cv_at(high);
  // Whole numbers cannot be all alike where their mean is none.
  const double slack = 0.02 * target.cv + 1e-3;
  if (target.cv < least - slack || target.cv > most + slack) {
    return make_error(ErrorCode::kBadInput,
                      "{}: a coefficient of variation of {:.6g} contradicts a largest of {} with a "
                      "mean of {:.6g}: wanted {:.4g} to {:.4g}",
                      what, target.cv, target.max, mean, least, most);
  }
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (low + high) / 2;
    (counts.cv_at(middle) < target.cv ? low : high) = middle;
  }
  counts.set_scale((low + high) / 2);
  return counts;
}

// The values of all ranks so that their sum is as wanted.
void Counts::set_scale(double shape) {
  const auto max = static_cast<double>(target_.max);
  const auto fill = [&](double log_scale) {
    double sum = max;
    for (std::size_t i = 0; i + 1 < values_.size(); ++i) {
      values_[i] = std::clamp(std::exp(shape * logits_[i] + log_scale), 1.0, max);
      sum += values_[i] * weights_[i];
    }
    values_.back() = max;
    return sum;
  };
  const auto wanted = static_cast<double>(target_.sum);
  // Where the lowest is the largest allowed, and where the highest is 1.
  double low = -shape * logits_.back() - 1;
  double high = std::log(max) - shape * logits_.front() + 1;
  for (int i = 0; i < 2 * kHalvings && low < high; ++i) {
    const double middle = (low + high) / 2;
    (fill(middle) < wanted ? low : high) = middle;
  }
  // The rest that bisection leaves goes to those that are not at an end.
  const double missing = wanted - fill((low + high) / 2);
  double free = 0;
  for (std::size_t i = 0; i + 1 < values_.size(); ++i) {
    if (values_[i] > 1 && values_[i] < max) free += weights_[i] * values_[i];
  }
  if (free <= 0) return;
  for (std::size_t i = 0; i + 1 < values_.size(); ++i) {
    if (values_[i] > 1 && values_[i] < max) {
      values_[i] = std::clamp(values_[i] * (1 + missing / free), 1.0, max);
    }
  }
}

double Counts::cv_at(double shape) {
  set_scale(shape);
  const auto groups = static_cast<double>(target_.groups);
  const double mean = static_cast<double>(target_.sum) / groups;
  double squares = 0;
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const double part = values_[i] - std::floor(values_[i]);  // rounded up that often
    squares += weights_[i] * ((values_[i] - mean) * (values_[i] - mean) + part * (1 - part));
  }
  return std::sqrt(squares / groups) / mean;
}

double Counts::value(std::uint64_t rank) const {
  const std::uint64_t below = strata_below();
  if (rank < below) {
    return values_[static_cast<std::size_t>(WideRank{rank} * kStrata / below)];
  }
  return values_[static_cast<std::size_t>(rank - below + (below > 0 ? kStrata : 0))];
}

std::uint64_t Counts::next() {
  DYNMO_CHECK(taken_ < target_.groups, "fewer than {} numbers taken", target_.groups);
  const double exact = value(permute(taken_++, target_.groups, seed_)) + carry_;
  const double whole = std::clamp(std::floor(exact), 1.0, static_cast<double>(target_.max));
  carry_ = exact - whole;
  return static_cast<std::uint64_t>(whole);
}

}  // namespace dynmo::tensor
