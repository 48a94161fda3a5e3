// SPDX-License-Identifier: Apache-2.0
#pragma once

// Parts of place.h: bytes that an order keeps on their rank, and the order of many ranks.

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/plan.h"

namespace dynmo::plan {

// Bytes of a position's layers that are already on a rank, or none without a plan in force.
class KeptBytes {
 public:
  KeptBytes(const Plan& plan, const Plan* current, const cost::ModelCost& model);
  [[nodiscard]] std::int64_t at(std::size_t position, std::size_t rank) const;
  // Returns the ranks that have layers of a position, with the bytes.
  [[nodiscard]] const std::map<std::size_t, std::int64_t>& of(std::size_t position) const {
    return rows_[position];
  }

 private:
  std::vector<std::map<std::size_t, std::int64_t>> rows_;
};

// Returns the rank of each position. Ranks of equal speed and memory are exchanged so that
// message_time_s() of the plan's messages falls. On a tie, it chooses fewer moved bytes.
[[nodiscard]] std::vector<Rank> order_by_messages(const Plan& plan, const BalanceProblem& problem);

}  // namespace dynmo::plan
