// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "dynmo/plan/cuts_impl.h"
#include "dynmo/plan/diffusion.h"
#include "dynmo/plan/refine.h"

namespace dynmo::plan::internal {
namespace {

Expected<MadeCut> cut_of(Balancer balancer, const BalanceProblem& problem) {
  MadeCut made;
  if (balancer == Balancer::kDiffusionParameters || balancer == Balancer::kDiffusionTime) {
    DYNMO_ASSIGN(Diffusion diffusion, diffuse(balancer, problem));
    made.counts = std::move(diffusion.counts);
    made.rounds = diffusion.rounds;
    made.rounds_bound = diffusion_bound(static_cast<int>(made.counts.size()), problem.model.size());
    return made;
  }
  DYNMO_ASSIGN(made.counts, balance(balancer, problem));
  if (balancer == Balancer::kOptimal && refines(problem.schedule)) {
    DYNMO_ASSIGN(made.counts, refined(made.counts, problem));
  }
  return made;
}

}  // namespace

std::vector<CutFor> cuts_for(Balancer balancer, Recompute choice) {
  if (choice == Recompute::kNone) return {CutFor::kPlain};
  if (choice == Recompute::kWhole) return {CutFor::kWhole};
  if (balancer != Balancer::kOptimal && balancer != Balancer::kVPair) {
    return {CutFor::kPlain, CutFor::kWhole};
  }
  return {CutFor::kPlain, CutFor::kWhole, CutFor::kLeast};
}

Expected<MadeCut> make_cut(CutFor what, Balancer balancer, const BalanceProblem& problem) {
  const bool counts = what == CutFor::kWhole && balancer == Balancer::kOptimal;
  const cost::ModelCost model = what == CutFor::kWhole && !counts
                                    ? recomputed(problem.model, all_layers(problem.model))
                                    : problem.model;
  return cut_of(balancer, {{model, problem.cluster, problem.micro_batches},
                           problem.schedule,
                           problem.stages_per_rank,
                           problem.current,
                           what == CutFor::kLeast ? Recompute::kAuto
                           : counts               ? Recompute::kWhole
                                                  : Recompute::kNone});
}

}  // namespace dynmo::plan::internal
