// SPDX-License-Identifier: Apache-2.0
#include <span>

#include "dynmo/plan/balance.h"
#include "dynmo/plan/cuts_impl.h"
#include "dynmo/plan/search_impl.h"

namespace dynmo::plan::internal {
namespace {

using schedule::ScheduleKind;

std::string_view remark_of(CutFor what, Recompute choice) {
  if (choice != Recompute::kAuto || what == CutFor::kPlain) return "";
  return what == CutFor::kWhole ? " for all recomputed" : " for the least recomputed";
}

// Returns the actions that may be replayed for the cuts of one kind.
std::int64_t replays_of(const SearchOptions& options) {
  constexpr std::int64_t kActions = 200;  // an eighth of an evaluation (search.h)
  return options.evaluations * kActions;
}

// Appends the best cut by replay, from the balancers' cuts as starts. It does not recompute.
void append_replayed(Templates& templates, const SearchProblem& problem, ScheduleKind kind,
                     const std::string& schedule, const std::vector<Rank>& placement,
                     std::span<const std::vector<int>> starts, std::int64_t max_actions) {
  const auto cut = replayed_cut({problem.costs(), kind, placement, max_actions}, starts);
  if (!cut || !*cut) return;  // the refusals of the starts say why
  templates.made.push_back(
      {schedule + "/replayed", make_plan(**cut, placement, problem.cluster.size(), kind), true});
}

void append_cuts(Templates& templates, const SearchProblem& problem, const SearchOptions& options,
                 ScheduleKind kind, int stages_per_rank) {
  const Recompute choice = options.recompute;
  std::vector<std::vector<int>> starts;
  std::vector<Rank> ranks;
  const std::string schedule = stages_per_rank > 2
                                   ? fmt::format("{}-{}", schedule::name(kind), stages_per_rank)
                                   : std::string(schedule::name(kind));
  const auto append = [&](Balancer balancer, const Plan* from, std::string_view remark) {
    const BalanceProblem asked{problem.costs(), kind, stages_per_rank, from};
    for (const CutFor what : cuts_for(balancer, choice)) {
      auto cut = make_cut(what, balancer, asked);
      if (!cut) {
        templates.refusals.push_back(cut.error());
        continue;
      }
      std::vector<Rank> placed = placement(balancer, asked);
      Plan plan = make_plan(cut->counts, placed, problem.cluster.size(), kind);
      if (what == CutFor::kPlain) {
        starts.push_back(cut->counts);
        ranks = std::move(placed);
      }
      templates.made.push_back(
          {fmt::format("{}/{}{}{}", schedule, name(balancer), remark, remark_of(what, choice)),
           std::move(plan), what == CutFor::kPlain});
    }
  };
  for (const Balancer balancer : balancers()) {
    // Cuts between whole blocks are never better than those between half blocks.
    if (balancer == Balancer::kBlocks || balancer == Balancer::kSearch) continue;
    if (balancer == Balancer::kVPair && !takes_v(kind)) continue;
    append(balancer, nullptr, "");
  }
  if (problem.current != nullptr) {
    // Diffusion from another start may end at another cut.
    append(Balancer::kDiffusionParameters, problem.current, " from current");
    append(Balancer::kDiffusionTime, problem.current, " from current");
  }
  if (options.replays_cuts && !starts.empty()) {
    append_replayed(templates, problem, kind, schedule, ranks, starts, replays_of(options));
  }
}

}  // namespace

Templates templates(const SearchProblem& problem, const SearchOptions& options) {
  Templates found;
  for (const schedule::KindTraits& kind : schedule::schedule_kinds()) {
    if (kind.layout == schedule::StageLayout::kAny) continue;  // annealed
    if (options.schedule && *options.schedule != kind.kind) continue;
    append_cuts(found, problem, options, kind.kind, 2);
    if (kind.layout == schedule::StageLayout::kLoop) {
      append_cuts(found, problem, options, kind.kind, 4);
    }
  }
  return found;
}

}  // namespace dynmo::plan::internal
