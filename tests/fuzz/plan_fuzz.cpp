// SPDX-License-Identifier: Apache-2.0
// A plan that is taken has a digest, and is replayed against costs or refused.
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/plan.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

constexpr int kMost = 64;  // layers and ranks of a plan that is replayed

cost::ModelCost model_of(int layers) {
  cost::LayerCost layer;
  layer.forward_s = layer.backward_input_s = layer.backward_weight_s = 1e-3;
  layer.activation_bytes = Bytes{1024};
  cost::ModelCost model;
  model.layers.assign(static_cast<std::size_t>(layers), layer);
  return model;
}

}  // namespace

Outcome run_target(std::string_view text) {
  const auto json = parse_json(text, "plan.json");
  if (!json) return refused(json.error());
  const auto plan = plan::parse_plan(*json, "plan.json");
  if (!plan) return refused(plan.error());
  (void)plan::digest(*plan);
  if (plan->layers() > kMost || plan->ranks > kMost) return Outcome::kTaken;
  const cost::ModelCost model = model_of(plan->layers());
  const auto evaluation = plan::evaluate(*plan, {model, cost::equal_ranks(plan->ranks), 4});
  if (!evaluation) {
    (void)refused(evaluation.error());
    return Outcome::kTaken;
  }
  const auto again =
      plan::parse_plan(plan::plan_json(*plan, *evaluation, model, "search"), "again");
  DYNMO_CHECK(again.has_value() && *again == *plan, "a plan that reads back, got {}", text);
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  std::vector<std::string> texts;
  for (const auto kind : {schedule::ScheduleKind::k1F1B, schedule::ScheduleKind::kGpipe}) {
    const plan::Plan plan = plan::make_plan({2, 1, 0, 3}, kind, 7);
    const cost::ModelCost model = model_of(plan.layers());
    const auto evaluation = plan::evaluate(plan, {model, cost::equal_ranks(plan.ranks), 4});
    texts.push_back(plan::plan_json(plan, *evaluation, model, "time").dump());
  }
  return texts;
}

}  // namespace dynmo::fuzz
