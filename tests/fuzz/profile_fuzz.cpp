// SPDX-License-Identifier: Apache-2.0
// A profile that is taken reads back as it was written, and the planner takes it.
#include "dynmo/cost/files.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

constexpr int kMaxLayers = 64;  // that are planned; more takes time and shows nothing new

void plan_it(const cost::ModelCost& model) {
  const cost::Cluster cluster = cost::equal_ranks(2);
  for (const plan::Balancer balancer : {plan::Balancer::kTime, plan::Balancer::kOptimal}) {
    const auto counts = plan::balance(balancer, {{model, cluster, 3}});
    if (!counts) {
      (void)refused(counts.error());
      continue;
    }
    const auto evaluation = plan::evaluate(plan::make_plan(*counts, schedule::ScheduleKind::k1F1B),
                                           {model, cluster, 3});
    if (!evaluation) (void)refused(evaluation.error());
  }
}

}  // namespace

Outcome run_target(std::string_view text) {
  const auto json = parse_json(text, "profile.json");
  if (!json) return refused(json.error());
  const auto model = cost::parse_profile(*json, "profile.json");
  if (!model) return refused(model.error());
  const auto again = cost::parse_profile(cost::profile_json(*model), "again");
  DYNMO_CHECK(again.has_value() && *again == *model, "a profile that reads back, got {}",
              cost::profile_json(*model).dump());
  if (model->size() <= kMaxLayers) plan_it(*model);
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  cost::ModelCost model;
  for (int i = 0; i < 3; ++i) {
    model.layers.push_back({.name = fmt::format("layer{}", i),
                            .forward_s = 1e-3 * (i + 1),
                            .backward_input_s = 2e-3,
                            .backward_weight_s = 1e-3,
                            .update_s = 1e-4 * i,
                            .parameter_bytes = Bytes{4096},
                            .gradient_bytes = Bytes{4096},
                            .optimizer_bytes = Bytes{8192},
                            .copy_bytes = Bytes{},
                            .activation_bytes = Bytes{65536},
                            .boundary_bytes = Bytes{1024},
                            .frozen = i == 0});
  }
  return {cost::profile_json(model).dump(),
          R"({"format": "dynmo-profile-1", "layers": [
               {"forward_s": 1, "backward_input_s": 0, "backward_weight_s": 0.5}]})"};
}

}  // namespace dynmo::fuzz
