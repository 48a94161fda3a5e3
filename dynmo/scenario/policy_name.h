// SPDX-License-Identifier: Apache-2.0
#pragma once

// The policies that a comparison can name:
//
//   uniform             the even cut, kept: the baseline
//   static:NAME         the cut of balancer NAME for the first step's costs, kept
//   static:dense:NAME   the cut of balancer NAME for the model without its dynamism, kept
//   dense:NAME          the model without its dynamism under that cut
//   NAME                the autonomous policy (control/policy.h), proposing plans of balancer NAME
//   NAME+pack           the same on the fewest ranks that keep the speed within policy.pack_slack

#include <string>
#include <string_view>

#include "dynmo/control/policy.h"
#include "dynmo/core/expected.h"
#include "dynmo/plan/balance.h"

namespace dynmo::scenario {

enum class Replanning { kNever, kAutonomous };
enum class Model { kDynamic, kDense };  // with its source of dynamism, and without

struct Policy {
  std::string name;
  plan::Balancer balancer = plan::Balancer::kUniform;
  Replanning replanning = Replanning::kNever;
  control::RankUse rank_use = control::RankUse::kAll;
  Model trained = Model::kDynamic;
  Model cut_for = Model::kDynamic;  // costs of the first cut
};

// Parses a policy. Returns kBadInput for an unknown name, with the known ones.
[[nodiscard]] Expected<Policy> parse_policy(std::string_view name);

}  // namespace dynmo::scenario
