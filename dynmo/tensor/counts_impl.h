// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers with a given sum, maximum and spread: how many fibers each slice has, or entries each
// fiber.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/tensor/shuffle_impl.h"

namespace dynmo::tensor {

// Returns a number that a file has as a count. NaN and numbers below 0 give 0, and the result is at
// most 2^62.
[[nodiscard]] std::uint64_t count_of(double number);

struct CountTarget {
  std::uint64_t groups = 0;  // number of numbers, each at least 1
  std::uint64_t sum = 0;
  std::uint64_t max = 0;  // largest number
  double cv = 0;          // standard deviation / mean
};

// Draws the numbers one after another, in an order that the seed decides. Their sum and their
// maximum are exact. They follow a log-logistic distribution between 1 and the maximum. Its scale
// gives the mean. Its shape, found by bisection, gives the coefficient of variation.
class Counts {
 public:
  // Prepares the draw. Returns kBadInput with the two values of the target that contradict each
  // other. `what` is the word for the numbers in errors.
  [[nodiscard]] static Expected<Counts> make(const CountTarget& target, std::uint64_t seed,
                                             std::string_view what);
  // Returns the next number. Requires fewer than `groups` calls before.
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
  // Ranks in groups of one value each. Each of the highest ranks is a group.
  std::vector<double> logits_;
  std::vector<double> weights_;
  std::vector<double> values_;
  std::uint64_t taken_ = 0;
  // For all lower ranks, their number and the sum of their values plus a half.
  std::vector<double> ranks_below_;
  std::vector<double> sums_below_;
};

}  // namespace dynmo::tensor
