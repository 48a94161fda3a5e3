// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/propose.h"

#include <array>
#include <optional>
#include <utility>

#include "dynmo/plan/balance_impl.h"
#include "dynmo/plan/diffusion.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

constexpr std::array kTemplates = {ScheduleKind::k1F1B, ScheduleKind::kGpipe,
                                   ScheduleKind::kInterleaved, ScheduleKind::kZbH1,
                                   ScheduleKind::kZbV};

bool same_but_generation(const Plan& a, const Plan& b) {
  return a.ranks == b.ranks && a.stages == b.stages && a.schedule == b.schedule &&
         a.order == b.order;
}

void number(Plan& plan, const Plan* current) {
  plan.generation = 0;
  if (current == nullptr) return;
  plan.generation = current->generation + (same_but_generation(plan, *current) ? 0 : 1);
}

// The balancer's cut under a schedule kind that a shape alone makes.
Expected<Proposal> by_template(Balancer balancer, const BalanceProblem& problem) {
  Proposal proposal;
  std::vector<int> counts;
  if (balancer == Balancer::kDiffusionParameters || balancer == Balancer::kDiffusionTime) {
    DYNMO_ASSIGN(const Diffusion diffusion, diffuse(balancer, problem));
    counts = diffusion.counts;
    proposal.rounds = diffusion.rounds;
    proposal.rounds_bound = diffusion_bound(static_cast<int>(counts.size()), problem.model.size());
  } else {
    DYNMO_ASSIGN(counts, balance(balancer, problem));
  }
  proposal.plan =
      make_plan(counts, placement(balancer, problem), problem.cluster.size(), problem.schedule);
  number(proposal.plan, problem.current);
  DYNMO_ASSIGN(proposal.evaluation,
               evaluate(proposal.plan, problem.model, problem.cluster, problem.micro_batches));
  proposal.winner = fmt::format("{} {}", name(balancer), schedule::name(problem.schedule));
  DYNMO_TRY(require_memory(proposal.plan, proposal.evaluation, problem.cluster, proposal.winner));
  return proposal;
}

Expected<Proposal> best_template(Balancer balancer, const BalanceProblem& problem) {
  std::optional<Proposal> best;
  std::optional<Error> refusal;
  int candidates = 0;
  for (const ScheduleKind kind : kTemplates) {
    if (balancer == Balancer::kVPair && kind != ScheduleKind::kZbV) continue;
    BalanceProblem one = problem;
    one.schedule = kind;
    auto proposal = by_template(balancer, one);
    if (!proposal) {
      // Of several refusals the one about memory tells the user more than one about a shape.
      if (!refusal || refusal->code == ErrorCode::kBadInput) refusal = proposal.error();
      continue;
    }
    ++candidates;
    if (!best || proposal->evaluation.step_time_s < best->evaluation.step_time_s) {
      best = std::move(*proposal);
    }
  }
  if (!best) return *refusal;
  best->candidates = candidates;
  return *std::move(best);
}

}  // namespace

Expected<void> require_memory(const Plan& plan, const Evaluation& evaluation,
                              const cost::Cluster& cluster, std::string_view what) {
  std::optional<std::size_t> worst;
  Bytes excess;
  for (std::size_t r = 0; r < cluster.ranks.size(); ++r) {
    const Bytes peak = evaluation.result.ranks[r].peak_memory;
    if (peak <= cluster.ranks[r].memory || peak - cluster.ranks[r].memory <= excess) continue;
    worst = r;
    excess = peak - cluster.ranks[r].memory;
  }
  if (!worst) return {};
  const Bytes has = cluster.ranks[*worst].memory;
  const Bytes peak = evaluation.result.ranks[*worst].peak_memory;
  return make_error(ErrorCode::kInfeasible,
                    "the {} plan {} takes {} bytes ({}) on rank {}, which has {} bytes ({}): give "
                    "it that much, use more ranks, the optimal or search balancer, or a schedule "
                    "with fewer micro-batches in flight",
                    what, to_string(plan), peak.value, format_bytes(peak), *worst, has.value,
                    format_bytes(has));
}

Expected<Proposal> propose(Balancer balancer, const BalanceProblem& problem,
                           const ProposeOptions& options) {
  if (options.schedules == ScheduleChoice::kBest && balancer != Balancer::kSearch) {
    return best_template(balancer, problem);
  }
  return by_template(balancer, problem);
}

}  // namespace dynmo::plan
