// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/balance.h"
#include "dynmo/plan/search_impl.h"

namespace dynmo::plan::internal {

std::vector<Template> templates(const SearchProblem& problem) {
  using schedule::ScheduleKind;
  std::vector<Template> made;
  for (const ScheduleKind kind : {ScheduleKind::k1F1B, ScheduleKind::kGpipe}) {
    for (const Balancer balancer :
         {Balancer::kUniform, Balancer::kParameters, Balancer::kTime, Balancer::kOptimal}) {
      const auto counts =
          balance(balancer, {problem.model, problem.cluster, problem.micro_batches, kind});
      if (!counts) continue;
      made.push_back(
          {fmt::format("{}/{}", schedule::name(kind), name(balancer)), make_plan(*counts, kind)});
    }
  }
  return made;
}

}  // namespace dynmo::plan::internal
