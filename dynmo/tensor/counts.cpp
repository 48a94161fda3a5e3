// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "dynmo/core/check.h"
#include "dynmo/tensor/counts_impl.h"

namespace dynmo::tensor {
namespace {

constexpr std::uint64_t kTail = 2048;    // the highest ranks, each with its own value
constexpr std::uint64_t kStrata = 6144;  // groups of all other ranks, each with one value
constexpr int kHalvings = 60;
constexpr double kMaxShape = 60;

}  // namespace

std::uint64_t count_of(double number) {
  return number > 0 ? static_cast<std::uint64_t>(std::min(number, 0x1p62)) : 0;
}

// Returns the number of ranks below the tail. Returns 0 if every rank has its own value.
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
  // Whole numbers cannot all be equal if their mean is not whole.
  const double slack = 0.02 * target.cv + 1e-3;
  const bool reached =
      std::isfinite(target.cv) && target.cv >= least - slack && target.cv <= most + slack;
  if (!reached) {
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
  counts.sum_up();
  return counts;
}

// Computes the sum of all values for any scale, without a pass over them. Values that are not
// clamped to 1 or max are contiguous, so their sum is a difference of two prefix sums.
class Counts::Sums {
 public:
  Sums(const Counts& counts, double shape) : counts_(counts), sums_(counts.logits_.size()) {
    const std::vector<double>& weights = counts.weights_;
    double weight = 0;
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      logs_.push_back(shape * counts.logits_[i]);
      // Uses the value of rank i as the unit, so that no sum overflows or vanishes in a double.
      const double before = i == 0 ? 0 : sums_[i - 1] * std::exp(logs_[i - 1] - logs_[i]);
      sums_[i] = before + weights[i];
      weights_below_.push_back(weight);
      weight += weights[i];
    }
  }

  [[nodiscard]] double at(double log_scale) const {
    const auto max = static_cast<double>(counts_.target_.max);
    const auto end = logs_.end() - 1;  // the last one has the largest, whatever its own value
    const auto first = std::lower_bound(logs_.begin(), end, -log_scale);
    const auto last =
        std::max(first, std::lower_bound(logs_.begin(), end, std::log(max) - log_scale));
    const auto begin = static_cast<std::size_t>(first - logs_.begin());
    const auto behind = static_cast<std::size_t>(last - logs_.begin());
    double sum = weights_below_[begin] + max;
    sum += max * (weights_below_.back() - weights_below_[behind]);
    if (begin == behind) return sum;
    double between = sums_[behind - 1];
    if (begin > 0) between -= sums_[begin - 1] * std::exp(logs_[begin - 1] - logs_[behind - 1]);
    return sum + between * std::exp(logs_[behind - 1] + log_scale);
  }

 private:
  const Counts& counts_;
  std::vector<double> logs_;
  std::vector<double> sums_;
  std::vector<double> weights_below_;
};

// Sets the values of all ranks so that their sum is the target's.
void Counts::set_scale(double shape) {
  const auto max = static_cast<double>(target_.max);
  const auto wanted = static_cast<double>(target_.sum);
  const Sums sums(*this, shape);
  // At `low` the highest value is below 1, and at `high` the lowest is above the largest allowed.
  double low = -shape * logits_.back() - 1;
  double high = std::log(max) - shape * logits_.front() + 1;
  for (int i = 0; i < kHalvings && low < high; ++i) {
    const double middle = (low + high) / 2;
    (sums.at(middle) < wanted ? low : high) = middle;
  }
  // The remainder of the bisection goes to the values that are not clamped.
  double missing = wanted - max;
  double free = 0;
  values_.back() = max;
  for (std::size_t i = 0; i + 1 < values_.size(); ++i) {
    values_[i] = std::clamp(std::exp(shape * logits_[i] + (low + high) / 2), 1.0, max);
    missing -= values_[i] * weights_[i];
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

// Returns the index of a rank's value.
std::size_t Counts::index_of(std::uint64_t rank) const {
  const std::uint64_t below = strata_below();
  return static_cast<std::size_t>(rank < below ? rank * kStrata / below
                                               : rank - below + (below > 0 ? kStrata : 0));
}

void Counts::sum_up() {
  double sum = 0.5;
  double rank = 0;
  for (std::size_t i = 0; i < values_.size(); ++i) {
    ranks_below_.push_back(rank);
    sums_below_.push_back(sum);
    rank += weights_[i];
    sum += weights_[i] * values_[i];
  }
}

// Returns how many whole numbers the running sum of the values passes at the next rank. So the
// fraction of equal values that is rounded up is right, and the total is exact.
std::uint64_t Counts::next() {
  DYNMO_CHECK(taken_ < target_.groups, "fewer than {} numbers taken", target_.groups);
  ++taken_;
  if (values_.front() == values_.back()) return target_.max;
  const std::uint64_t rank = shuffle_.next();
  const std::size_t i = index_of(rank);
  const double before = static_cast<double>(rank) - ranks_below_[i];
  const bool is_last = before + 1 == weights_[i] && i + 1 < values_.size();
  const double begin = sums_below_[i] + before * values_[i];
  const double end = is_last ? sums_below_[i + 1] : sums_below_[i] + (before + 1) * values_[i];
  const double whole =
      std::clamp(std::floor(end) - std::floor(begin), 1.0, static_cast<double>(target_.max));
  return static_cast<std::uint64_t>(whole);
}

}  // namespace dynmo::tensor
