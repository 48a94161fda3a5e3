// SPDX-License-Identifier: Apache-2.0
// The decisions of a controller on joining and leaving ranks, and its state for another rank.
#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "dynmo/control/controller.h"
#include "dynmo/control/state_json_impl.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/pack.h"

namespace dynmo::control {

Expected<Decision> Controller::vacate(const Boundary& now, const std::vector<Rank>& kept) {
  const auto costs = this->costs(now.known);
  if (!costs) {
    return make_error(ErrorCode::kBadInput, "nothing was measured yet: wanted a step or two first");
  }
  const cost::Cluster ranks = speeds_.slowed(now.cluster);
  DYNMO_ASSIGN(Decision decision,
               control::vacate(input(Cause::kKnown, now, ranks, *costs), kept, options_.policy));
  pending_.ranks = true;
  remember(Cause::kKnown, now, *costs, decision);
  // The next boundary looks whether fewer of the remaining ranks suffice.
  if (options_.policy.rank_use == RankUse::kFewest) pending_.known = pending_.ranks = true;
  return decision;
}

Expected<AfterLoss> Controller::after_loss(const Boundary& now) {
  AfterLoss after;
  std::optional<Error> fault;
  const auto costs = this->costs(now.known);
  if (costs) {
    const cost::Cluster ranks = speeds_.slowed(now.cluster);
    auto found = control::after_loss(input(Cause::kLost, now, ranks, *costs), options_.policy);
    if (!found && found.error().code != ErrorCode::kInfeasible) return found.error();
    if (found) {
      after.decision = *std::move(found);
      remember(Cause::kLost, now, *costs, after.decision);
      pending_.known = pending_.ranks = options_.policy.rank_use == RankUse::kFewest ||
                                        options_.policy.balancer != plan::Balancer::kOptimal ||
                                        now.plan.schedule != after.decision.plan.schedule;
      return after;
    }
    after.fault = found.error().message;
  }
  const cost::ModelCost even{std::vector<cost::LayerCost>(now.known.layers.size())};
  DYNMO_ASSIGN(
      const std::vector<int> cut,
      plan::balance(plan::Balancer::kUniform, {{even, now.cluster, options_.micro_batches}}));
  after.decision.migrate = true;
  after.decision.plan =
      plan::make_plan(cut, schedule::ScheduleKind::k1F1B, now.plan.generation + 1);
  after.decision.why = kRanksLost;
  after.decision.reason = fmt::format("move {} to {}, the even cut, as ranks were lost",
                                      to_string(now.plan), to_string(after.decision.plan));
  return after;
}

std::optional<Release> Controller::release(const plan::Plan& plan, std::int64_t step) {
  std::vector<Rank> at_work = plan::ranks_at_work(plan);
  if (at_work != idle_.at_work || !idle_.since) idle_ = {.at_work = at_work, .since = step};
  const std::int64_t idle_steps = step - *idle_.since;
  if (std::ssize(at_work) == plan.ranks || idle_steps < options_.release_after) return std::nullopt;
  if (at_work.front() != Rank(0)) at_work.insert(at_work.begin(), Rank(0));
  // The lowest ranks stay until min_ranks is reached.
  for (Rank rank; rank.value < plan.ranks && std::ssize(at_work) < options_.min_ranks;
       ++rank.value) {
    const auto place = std::lower_bound(at_work.begin(), at_work.end(), rank);
    if (place == at_work.end() || *place != rank) at_work.insert(place, rank);
  }
  if (std::ssize(at_work) == plan.ranks) return std::nullopt;
  idle_.since = step;  // if refused, returned again after the same time
  return Release{.kept = std::move(at_work), .idle_steps = idle_steps};
}

void Controller::ranks_changed(const std::vector<std::optional<Rank>>& before) {
  profiler_.ranks_changed(before);
  speeds_.ranks_changed(before);
  std::map<Rank, Rank> now;
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (before[i]) now.emplace(*before[i], Rank(static_cast<std::int32_t>(i)));
  }
  if (now.size() < before.size()) pending_.known = pending_.ranks = true;
  const auto gone = [&](Rank rank) { return !now.contains(rank); };
  if (pending_.found && pending_.found->rank) {
    if (gone(*pending_.found->rank)) {
      pending_.found.reset();
    } else {
      pending_.found->rank = now.at(*pending_.found->rank);
    }
  }
  if (pending_.speed && gone(pending_.speed->rank)) pending_.speed.reset();
  if (pending_.speed) pending_.speed->rank = now.at(pending_.speed->rank);
  if (std::ranges::any_of(drift_.stages, gone, &plan::PlanStage::rank)) {
    drift_.stages.clear();  // a plan that was not carried out
    drift_.shares.clear();
  }
  for (plan::PlanStage& stage : drift_.stages) stage.rank = now.at(stage.rank);
  idle_ = {};
}

template <typename Self, typename Visit>
void Controller::fields(Self& self, Visit visit) {
  visit("charges", self.charges_);
  visit("observed", self.observed_);
  visit("speeds", self.speeds_);
  visit("pending", self.pending_);
  visit("lasting", self.lasting_);
  visit("drift", self.drift_);
  visit("forgone", self.forgone_);
  visit("budget", self.budget_);
  visit("idle", self.idle_);
}

Json Controller::state() const {
  Json json = {{"profiler", profiler_.state()}};
  fields(*this, [&](const char* key, const auto& field) { json[key] = to_state(field); });
  return json;
}

Expected<void> Controller::restore(const Json& state) {
  try {
    DYNMO_TRY(profiler_.restore(state.at("profiler")));
    fields(*this, [&](const char* key, auto& field) { from_state(state.at(key), field); });
  } catch (const Json::exception& fault) {
    return make_error(ErrorCode::kInternal, "state of the controller: {}", fault.what());
  }
  if (!speeds_.fits(profiler_.known().layers.size())) {
    return make_error(ErrorCode::kInternal, "state of the controller: speeds of other layers");
  }
  if (drift_.shares.size() == drift_.stages.size()) return {};
  return make_error(ErrorCode::kInternal, "state of the controller: {} shares of {} stages",
                    drift_.shares.size(), drift_.stages.size());
}

}  // namespace dynmo::control
