// SPDX-License-Identifier: Apache-2.0
// The runs of a pipeline that train nothing: measuring and validation.
#include <chrono>
#include <utility>
#include <vector>

#include "dynmo/core/median.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/runtime/measure.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/runtime/update.h"

namespace dynmo::runtime {

Expected<void> Pipeline::measure_links() {
  if (device_messages_.transport() == nullptr) {  // else not on this transport
    DYNMO_ASSIGN(times_.message_s,
                 message_time_s(grid_.pipeline(), control(transport::Control::kPing),
                                options_.boundary_shape, options_.boundary_type));
  }
  if (grid_.replicas() > 1) {
    DYNMO_ASSIGN(times_.reduction_bytes_per_s,
                 reduction_bytes_per_s(grid_.peers(), state_.layers, options_.staging));
  }
  return {};
}

Expected<void> Pipeline::measure(const Batches& batches, int steps) {
  DYNMO_TRY(ask_sources_first());
  DYNMO_TRY(device_messages_.open(grid_, program_, options_.lane));
  for (int i = 0; i < steps; ++i) {
    // The first step warms up caches and allocators. Its memory is metered, but not its time.
    StepInput input = round_input(program_.training, batches, 0);
    input.meter_stashes = i == 0;
    DYNMO_ASSIGN(StepOutput output, run_round(input));
    DYNMO_TRY(measure_links());
    measure_updates(state_.layers, options_.optimizer, options_.staging.device, times_);
    const auto begin = std::chrono::steady_clock::now();
    begun_.emplace();
    begun_->output = std::move(output);
    begun_->complete = true;
    const auto exchanged = exchange_figures();
    begun_.reset();  // an error, too, leaves no step to finish
    if (!exchanged) return exchanged.error();
    state_.spares.clear();
    make_room(*exchanged);
    times_.overhead_s = seconds_since(begin);
    decisions_.observe(step_of(*exchanged), state_.plan, state_.frozen_layers);
    if (i == 0) decisions_.forget_times();
  }
  return choose_recomputed();
}

Expected<void> Pipeline::go_on() {
  // Some ranks may have changed layers for the next step. Then copies of a layer in two replicas
  // would differ, and their gradients could not be added.
  if (state_.asked) DYNMO_TRY(ask_sources_first());
  DYNMO_TRY(measure_links());
  return choose_recomputed();
}

Expected<double> Pipeline::validate(const Batches& batches, model::Pass pass) {
  // After a loss the layers are those of the last step, and do not change before the next one.
  if (!asked_.goes_on) DYNMO_TRY(ask_sources_first());
  DYNMO_TRY(device_messages_.open(grid_, program_, options_.lane));
  RankStats own;
  for (int round = 0; round < options_.accumulation; ++round) {
    StepInput input = round_input(program_.validation, batches, round);
    input.frozen_layers = static_cast<int>(model_.size());
    input.pass = pass;
    DYNMO_ASSIGN(const StepOutput output, run_round(input));
    for (const auto& [layer, losses] : output.losses) {
      auto& all = own.layers[layer].losses;
      all.insert(all.end(), losses.begin(), losses.end());
    }
  }
  DYNMO_ASSIGN(const Exchange exchanged,
               exchange(grid_, control(transport::Control::kLoss), state_.plan, model_,
                        options_.accumulation * options_.micro_batches, own));
  return mean(exchanged.losses);
}

Expected<void> Pipeline::use(const control::Profiler& measured) {
  DYNMO_TRY(ask_sources_first());
  decisions_.use(measured);
  return choose_recomputed();
}

}  // namespace dynmo::runtime
