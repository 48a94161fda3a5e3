// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/balance.h"
#include "dynmo/plan/refine.h"
#include "dynmo/plan/search_impl.h"

namespace dynmo::plan::internal {
namespace {

using schedule::ScheduleKind;

void append_cuts(std::vector<Template>& made, const SearchProblem& problem, ScheduleKind kind,
                 int stages_per_rank) {
  const std::string schedule = stages_per_rank > 2
                                   ? fmt::format("{}-{}", schedule::name(kind), stages_per_rank)
                                   : std::string(schedule::name(kind));
  const auto append = [&](Balancer balancer, const Plan* from, std::string_view remark) {
    const BalanceProblem asked{.model = problem.model,
                               .cluster = problem.cluster,
                               .micro_batches = problem.micro_batches,
                               .schedule = kind,
                               .stages_per_rank = stages_per_rank,
                               .current = from};
    auto counts = balance(balancer, asked);
    if (!counts) return;
    if (balancer == Balancer::kOptimal && refines(kind)) {
      counts = refined(*counts, asked);
      if (!counts) return;
    }
    Plan plan = make_plan(*counts, placement(balancer, asked), problem.cluster.size(), kind);
    made.push_back({fmt::format("{}/{}{}", schedule, name(balancer), remark), std::move(plan)});
  };
  for (const Balancer balancer : balancers()) {
    // Whole blocks are what others run, never better than half ones.
    if (balancer == Balancer::kBlocks || balancer == Balancer::kSearch) continue;
    append(balancer, nullptr, "");
  }
  if (problem.current == nullptr) return;
  // Diffusion ends elsewhere where it starts elsewhere.
  append(Balancer::kDiffusionParameters, problem.current, " from current");
  append(Balancer::kDiffusionTime, problem.current, " from current");
}

}  // namespace

std::vector<Template> templates(const SearchProblem& problem) {
  std::vector<Template> made;
  for (const schedule::KindTraits& kind : schedule::schedule_kinds()) {
    if (kind.layout == schedule::StageLayout::kAny) continue;  // annealed
    append_cuts(made, problem, kind.kind, 2);
    if (kind.layout == schedule::StageLayout::kLoop) append_cuts(made, problem, kind.kind, 4);
  }
  return made;
}

}  // namespace dynmo::plan::internal
