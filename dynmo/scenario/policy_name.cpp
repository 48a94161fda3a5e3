// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/policy_name.h"

namespace dynmo::scenario {

Expected<Policy> parse_policy(std::string_view name) {
  constexpr std::string_view kStatic = "static:";
  Policy policy{.name = std::string(name)};
  constexpr std::string_view kPack = "+pack";
  std::string_view balancer = name;
  if (balancer.starts_with(kStatic)) {
    balancer.remove_prefix(kStatic.size());
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
