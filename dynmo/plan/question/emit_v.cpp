// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "dynmo/cost/blocks.h"
#include "dynmo/plan/question/emit_impl.h"
#include "dynmo/schedule/generate.h"

namespace dynmo::plan::internal {
namespace {

// Returns whether the stages are placed as a V whose middle is one stage.
bool is_open_v(const Plan& plan) {
  if (plan.ranks < 2 || std::ssize(plan.stages) != std::int64_t{2} * plan.ranks - 1) return false;
  std::vector<Rank> ranks = schedule::wave_placement(plan.ranks, 2);
  ranks.erase(ranks.begin() + plan.ranks);
  return std::ranges::equal(plan.stages, ranks, {}, &PlanStage::rank);
}

// Returns the number of layers in the first of two parts of whole modules whose work differs least.
// Returns 0 if there is only one module.
int first_part(const LayerRange& layers, const cost::ModelCost& model) {
  double all_s = 0;
  for (int i = layers.first.value; i < layers.end(); ++i) all_s += cost::work_s(model, i, 1);
  int best = 0;
  double least = std::numeric_limits<double>::infinity();
  double before_s = 0;
  for (int count = 1; count < layers.count; ++count) {
    const std::size_t next = layers.first.index() + static_cast<std::size_t>(count);
    before_s += cost::work_s(model, static_cast<int>(next) - 1, 1);
    const std::string_view module = cost::module_of(model.layers[next].name);
    const double difference = std::abs(all_s - 2 * before_s);
    if (module == cost::module_of(model.layers[next - 1].name) || difference >= least) continue;
    least = difference;
    best = count;
  }
  return best;
}

}  // namespace

Plan with_whole_v(const Plan& plan, const cost::ModelCost& model) {
  Plan whole = plan;
  whole.order.clear();
  if (!is_open_v(plan)) return whole;
  const auto middle = whole.stages.begin() + (plan.ranks - 1);
  const LayerRange layers = middle->layers;
  const int count = first_part(layers, model);
  if (count == 0) return whole;
  middle->layers.count = count;
  whole.stages.insert(middle + 1,
                      {middle->rank, {LayerId{layers.first.value + count}, layers.count - count}});
  return whole;
}

schedule::Schedule with_split_stage(schedule::Schedule order, int stage) {
  const auto middle = order.shape.stages.begin() + stage;
  order.shape.stages.insert(middle + 1, *middle);
  for (std::vector<schedule::Action>& actions : order.ranks) {
    std::vector<schedule::Action> split;
    for (schedule::Action action : actions) {
      if (action.stage.value != stage) {
        if (action.stage.value > stage) action.stage = StageId{action.stage.value + 1};
        split.push_back(action);
        continue;
      }
      schedule::Action second = action;
      second.stage = StageId{stage + 1};
      // A gradient comes from the end of the model, so it passes the second part first.
      const bool forward = action.kind == schedule::ActionKind::kForward;
      split.push_back(forward ? action : second);
      split.push_back(forward ? second : action);
    }
    actions = std::move(split);
  }
  return order;
}

}  // namespace dynmo::plan::internal
