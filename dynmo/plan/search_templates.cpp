// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/balance.h"
#include "dynmo/plan/search_impl.h"

namespace dynmo::plan::internal {
namespace {

using schedule::ScheduleKind;

constexpr Balancer kBalancers[] = {Balancer::kUniform,       Balancer::kParameters,
                                   Balancer::kTime,          Balancer::kDiffusionParameters,
                                   Balancer::kDiffusionTime, Balancer::kOptimal,
                                   Balancer::kVPair};

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
    const auto counts = balance(balancer, asked);
    if (!counts) return;
    Plan plan = make_plan(*counts, placement(balancer, asked), problem.cluster.size(), kind);
    made.push_back({fmt::format("{}/{}{}", schedule, name(balancer), remark), std::move(plan)});
  };
  for (const Balancer balancer : kBalancers) append(balancer, nullptr, "");
  if (problem.current == nullptr) return;
  // Diffusion ends elsewhere where it starts elsewhere.
  append(Balancer::kDiffusionParameters, problem.current, " from current");
  append(Balancer::kDiffusionTime, problem.current, " from current");
}

}  // namespace

std::vector<Template> templates(const SearchProblem& problem) {
  std::vector<Template> made;
  for (const ScheduleKind kind : {ScheduleKind::k1F1B, ScheduleKind::kGpipe, ScheduleKind::kZbH1,
                                  ScheduleKind::kZbV, ScheduleKind::kInterleaved}) {
    append_cuts(made, problem, kind, 2);
  }
  append_cuts(made, problem, ScheduleKind::kInterleaved, 4);
  return made;
}

}  // namespace dynmo::plan::internal
