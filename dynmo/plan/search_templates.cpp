// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "dynmo/plan/balance.h"
#include "dynmo/plan/cuts_impl.h"
#include "dynmo/plan/memory_ladder_impl.h"
#include "dynmo/plan/search_impl.h"

namespace dynmo::plan::internal {
namespace {

using schedule::ScheduleKind;

std::string_view remark_of(const Trial& trial, Recompute choice) {
  if (choice != Recompute::kAuto || trial.what == CutFor::kPlain) return "";
  if (trial.rungs_below) return " for less memory";
  return trial.what == CutFor::kWhole ? " for all recomputed" : " for the least recomputed";
}

void append_cuts(Templates& templates, const SearchProblem& problem, Recompute choice,
                 ScheduleKind kind, int stages_per_rank) {
  const std::string schedule = stages_per_rank > 2
                                   ? fmt::format("{}-{}", schedule::name(kind), stages_per_rank)
                                   : std::string(schedule::name(kind));
  const auto append = [&](Balancer balancer, const Plan* from, std::string_view remark) {
    std::vector<Plan> of_rungs;
    for (const Trial& trial : trials(balancer, choice, kind)) {
      if (trial.last_resort && !of_rungs.empty()) continue;
      const cost::Cluster cluster =
          trial.rungs_below ? at_rung(problem.cluster, *trial.rungs_below) : problem.cluster;
      const BalanceProblem asked{.model = problem.model,
                                 .cluster = cluster,
                                 .micro_batches = problem.micro_batches,
                                 .schedule = kind,
                                 .stages_per_rank = stages_per_rank,
                                 .current = from};
      auto cut = make_cut(trial.what, balancer, asked);
      if (!cut) {
        templates.refusals.push_back(cut.error());
        continue;
      }
      Plan plan = make_plan(cut->counts, placement(balancer, asked), problem.cluster.size(), kind);
      if (trial.rungs_below) {
        if (std::find(of_rungs.begin(), of_rungs.end(), plan) != of_rungs.end()) continue;
        of_rungs.push_back(plan);
      }
      templates.made.push_back(
          {fmt::format("{}/{}{}{}", schedule, name(balancer), remark, remark_of(trial, choice)),
           std::move(plan), trial.what == CutFor::kPlain});
    }
  };
  for (const Balancer balancer : balancers()) {
    // Whole blocks are what others run, never better than half ones.
    if (balancer == Balancer::kBlocks || balancer == Balancer::kSearch) continue;
    if (balancer == Balancer::kVPair && !takes_v(kind)) continue;
    append(balancer, nullptr, "");
  }
  if (problem.current == nullptr) return;
  // Diffusion ends elsewhere where it starts elsewhere.
  append(Balancer::kDiffusionParameters, problem.current, " from current");
  append(Balancer::kDiffusionTime, problem.current, " from current");
}

}  // namespace

Templates templates(const SearchProblem& problem, const SearchOptions& options) {
  Templates found;
  for (const schedule::KindTraits& kind : schedule::schedule_kinds()) {
    if (kind.layout == schedule::StageLayout::kAny) continue;  // annealed
    if (options.schedule && *options.schedule != kind.kind) continue;
    append_cuts(found, problem, options.recompute, kind.kind, 2);
    if (kind.layout == schedule::StageLayout::kLoop) {
      append_cuts(found, problem, options.recompute, kind.kind, 4);
    }
  }
  return found;
}

}  // namespace dynmo::plan::internal
