// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers of a given sum, largest one and spread: how many fibers a slice has, or entries a fiber.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/tensor/shuffle_impl.h"

namespace dynmo::tensor {

// A number that a file has, as a count: 0 where it is NaN or below 0, at most 2^62.
[[nodiscard]] std::uint64_t count_of(double number);

struct CountTarget {
  std::uint64_t groups = 0;  // how many numbers, each at least 1
  std::uint64_t sum = 0;
  std::uint64_t max = 0;  // of the largest
  double cv = 0;          // standard deviation / mean
};

// Gives the numbers one after another, in an order that the seed decides. Their sum and their
// largest are exact. They follow a log-logistic distribution, cut off at 1 and at the largest; its
// scale gives the mean and its shape, found by bisection, the coefficient of variation.
class Counts {
 public:
  // kBadInput names the two requests that contradict each other; `what` names the numbers.
  [[nodiscard]] static Expected<Counts> make(const CountTarget& target, std::uint64_t seed,
                                             std::string_view what);
  // Requires that fewer than `groups` were taken.
  [[nodiscard]] std::uint64_t next();

 private:
  Counts(const CountTarget& target, std::uint64_t seed)
      : target_(target), shuffle_(target.groups, seed) {}
  class Sums;
  [[nodiscard]] std::uint64_t strata_below() const;
  [[nodiscard]] double cv_at(double shape);
  void set_scale(double shape);
  [[nodiscard]] std::size_t index_of(std::uint64_t rank) const;
  void sum_up();

  CountTarget target_;
  Shuffle shuffle_;  // rank by number
  // The ranks in groups: those of one have one value. The highest have one each.
  std::vector<double> logits_;
  std::vector<double> weights_;
  std::vector<double> values_;
  std::uint64_t taken_ = 0;
  // Over all lower ranks: how many there are, and the sum of their values and a half.
  std::vector<double> ranks_below_;
  std::vector<double> sums_below_;
};

}  // namespace dynmo::tensor
