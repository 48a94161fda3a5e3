// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "dynmo/scenario/score_impl.h"

namespace dynmo::scenario {

void Score::spend(double TimeSpent::*part, double seconds, const RanksHeld& ranks) {
  result_.time.*part += seconds;
  sums_.rank_seconds += seconds * static_cast<double>(ranks.in_use) * ranks.replicas;
  sums_.held_seconds += seconds * static_cast<double>(ranks.present) * ranks.replicas;
  sums_.offered_seconds += seconds * static_cast<double>(ranks.offered) * ranks.replicas;
}

void Score::count_move(std::int64_t layers, double bytes) {
  result_.layers_moved += layers;
  result_.bytes_moved += bytes;
  ++result_.migrations;
}

void Score::count(const StepMeasure& measure, double micro_batches, bool at_end,
                  const RanksHeld& ranks) {
  spend(&TimeSpent::train_s, measure.step_s, ranks);
  result_.micro_batches += micro_batches;
  unsaved_.train_s += measure.step_s;
  unsaved_.micro_batches += micro_batches;
  ++unsaved_.steps;
  ++sums_.executed;
  sums_.step_time += measure.step_s;
  sums_.weighted_bubble += measure.bubble * measure.step_s;
  sums_.imbalance += measure.imbalance;
  sums_.ideal += measure.ideal_step_s;
  if (at_end) {
    sums_.end_step_time += measure.step_s;
    sums_.end_ideal += measure.ideal_step_s;
    ++sums_.end_steps;
  }
  if (!measure.fits) ++result_.steps_over_memory;
}

std::int64_t Score::go_back() {
  const Unsaved lost = std::exchange(unsaved_, {});
  result_.time.train_s -= lost.train_s;
  result_.time.lost_s += lost.train_s;
  result_.micro_batches -= lost.micro_batches;
  result_.steps_lost += lost.steps;
  return lost.steps;
}

RunResult Score::finished(std::int64_t steps, std::int64_t tokens_per_micro_batch) && {
  const double total = result_.time.total_s();
  const auto executed = static_cast<double>(sums_.executed);
  result_.tokens = result_.micro_batches * static_cast<double>(tokens_per_micro_batch);
  result_.step_time_s = result_.time.train_s / static_cast<double>(steps);
  result_.bubble = sums_.step_time > 0 ? sums_.weighted_bubble / sums_.step_time : 0;
  result_.imbalance = sums_.imbalance / executed;
  result_.ideal_step_time_s = sums_.ideal / executed;
  const auto end_steps = static_cast<double>(sums_.end_steps);
  result_.end = {.step_time_s = sums_.end_step_time / end_steps,
                 .ideal_step_time_s = sums_.end_ideal / end_steps};
  result_.average_ranks = total > 0 ? sums_.rank_seconds / total : 0;
  result_.gpu_hours_saved = (sums_.offered_seconds - sums_.held_seconds) / 3600;
  return std::move(result_);
}

}  // namespace dynmo::scenario
