// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/pack.h"
#include "dynmo/scenario/replay_impl.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::scenario {

void StepReplayer::set_grid(Grid grid) {
  grid_ = std::move(grid);
  last_.reset();
}

Expected<void> StepReplayer::prepare(const plan::Plan& plan, const cost::ModelCost& model) {
  const int frozen = model.frozen_layers();
  if (plan_ && *plan_ == plan && frozen_ == frozen) return {};
  // Checks all that does not change with the costs, and that costs are of a sane unit.
  DYNMO_TRY(plan::evaluate(plan, {model, grid_.planned, micro_batches_}));
  DYNMO_ASSIGN(const schedule::Schedule compute, plan::schedule_of(plan, micro_batches_, frozen));
  lowered_ = schedule::lower(compute);
  plan_ = plan;
  frozen_ = frozen;
  last_.reset();
  return {};
}

// The update of a step starts when the last rank of any replica has its gradients reduced. A
// reduction starts when the last replica of its stage is done. Both are maxima, so the step of the
// whole job is the longest step of any replica.
Expected<const StepMeasure*> StepReplayer::step(const plan::Plan& plan,
                                                const cost::ModelCost& model,
                                                const plan::LayerSet& again, Timelines timelines) {
  const bool keep = timelines == Timelines::kKept;
  DYNMO_TRY(prepare(plan, model));
  const bool same = last_ && model_ == model && again_ == again;
  if (same && (!keep || !last_->timeline.ranks.empty())) return &*last_;
  DYNMO_TRY(cost::validate(model, micro_batches_));
  const cost::ModelCost run = plan::recomputed(model, again);
  const std::vector<sim::StageCost> costs = plan::stage_costs(plan, run, grid_.planned);
  std::vector<Bytes> peaks;
  if (!again.empty()) {
    DYNMO_ASSIGN(peaks, plan::peak_memory(plan, model, micro_batches_, again));
  }
  StepMeasure measure{.ideal_step_s = plan::ideal_step_s({run, grid_.planned, micro_batches_}),
                      .positions = static_cast<int>(plan::ranks_at_work(plan).size())};
  double busy = 0;
  double most_work = 0;  // of a rank, / its speed
  double work = 0;
  for (const ReplicaKind& kind : grid_.kinds) {
    DYNMO_ASSIGN(sim::SimResult result,
                 sim::simulate(lowered_, costs, kind.cluster, {.timeline = keep}));
    const double step_s = to_seconds(result.step_time);
    for (const sim::RankUsage& rank : result.ranks) busy += to_seconds(rank.busy) * kind.count;
    for (std::size_t r = 0; r < peaks.size(); ++r) result.ranks[r].peak_memory = peaks[r];
    for (const double time : plan::rank_times_s(plan, {run, kind.cluster, micro_batches_})) {
      most_work = std::max(most_work, time);
      work += time * kind.count;
    }
    measure.fits = measure.fits && plan::fits_memory(result, kind.cluster);
    if (step_s < measure.step_s) continue;
    measure.step_s = step_s;
    measure.timeline = std::move(result.timeline);
  }
  const int ranks = measure.positions * grid_.replicas;
  const double whole = measure.step_s * measure.positions * grid_.replicas;
  measure.bubble = whole > 0 ? 1 - busy / whole : 0;
  measure.imbalance = work > 0 ? most_work * ranks / work - 1 : 0;
  model_ = model;
  again_ = again;
  last_ = std::move(measure);
  return &*last_;
}

}  // namespace dynmo::scenario
