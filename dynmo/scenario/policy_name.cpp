// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/policy_name.h"

namespace dynmo::scenario {

namespace {

// Removes `prefix` from the beginning of `text`. Returns false if it is not there.
bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

}  // namespace

Expected<Policy> parse_policy(std::string_view name) {
  Policy policy{.name = std::string(name)};
  constexpr std::string_view kDense = "dense:";
  constexpr std::string_view kPack = "+pack";
  std::string_view balancer = name;
  if (take_prefix(balancer, "static:")) {
    if (take_prefix(balancer, kDense)) policy.cut_for = Model::kDense;
  } else if (take_prefix(balancer, kDense)) {
    policy.trained = policy.cut_for = Model::kDense;
  } else if (balancer != "uniform") {
    if (balancer.ends_with(kPack)) {
      balancer.remove_suffix(kPack.size());
      policy.rank_use = control::RankUse::kFewest;
    }
    policy.replanning = Replanning::kAutonomous;
  }
  const auto parsed = plan::parse_balancer(balancer);
  if (!parsed) {
    return make_error(ErrorCode::kBadInput, "policy '{}': {}", name, parsed.error().message);
  }
  policy.balancer = *parsed;
  return policy;
}

}  // namespace dynmo::scenario
