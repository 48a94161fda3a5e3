// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/rank_times.h"

#include <algorithm>

#include "dynmo/control/profiler.h"
#include "dynmo/runtime/ties.h"

namespace dynmo::runtime {
namespace {

double busy_time(const std::vector<schedule::TimedAction>& actions) {
  double sum = 0;
  for (const auto& timed : actions) sum += to_seconds(timed.end - timed.start);
  return sum;
}

// Returns the seconds of a rank's actions outside of layers and waiting.
double action_overhead_s(const StepOutput& output) {
  double layers = 0;
  for (const auto& [layer, times] : output.layer_times) {
    for (const cost::LayerTime& time : times) {
      layers += time.forward_s + time.input_gradient_s + time.weight_gradient_s;
    }
  }
  return output.seconds - output.waiting_s - layers;
}

cost::LayerSample layer_sample(LayerId id, const StepOutput& output, const RankTimes& times,
                               const plan::LayerSet& recomputed) {
  cost::LayerSample sample;
  const auto found = output.layer_times.find(id);
  if (found != output.layer_times.end()) sample.time = control::mean_time(found->second);
  if (const auto update = times.update_s.find(id); update != times.update_s.end()) {
    sample.update_s = update->second;
  }
  // The second forward and the smaller stash belong to the plan, not to the layer's cost.
  if (std::binary_search(recomputed.begin(), recomputed.end(), id)) {
    sample.time.input_gradient_s =
        std::max(0.0, sample.time.input_gradient_s - sample.time.forward_s);
    return sample;
  }
  const auto stash = output.stash_bytes.find(id);
  if (stash != output.stash_bytes.end()) sample.stash_bytes = stash->second;
  return sample;
}

std::vector<double> numbers_of(LayerId id, const std::map<LayerId, std::vector<double>>& numbers) {
  const auto found = numbers.find(id);
  return found == numbers.end() ? std::vector<double>() : found->second;
}

}  // namespace

RankStats own_figures(const LayerStates& states, const StepOutput& output, const RankTimes& times,
                      const plan::LayerSet& recomputed, const std::vector<model::Tie>& ties) {
  RankStats own;
  const auto norm_of = [&](LayerId id, const model::LayerState& state) {
    if (state.frozen) return 0.0;
    const auto found = output.squared_norms.find(id);
    return found != output.squared_norms.end() ? found->second : squared_norm(ties, state);
  };
  for (const auto& [id, state] : states) {
    own.layers[id] = {.sample = layer_sample(id, output, times, recomputed),
                      .squared_norm = norm_of(id, state),
                      .figures = numbers_of(id, output.figures),
                      .losses = numbers_of(id, output.losses)};
  }
  own.figures.busy_s = busy_time(output.actions) - times.reducing_s + times.update_total_s;
  own.figures.overhead_s = times.overhead_s;
  own.figures.action_overhead_s =
      std::max(0.0, action_overhead_s(output) - times.reducing_s - times.moving_s);
  own.figures.actions = static_cast<double>(output.actions.size());
  own.figures.message_s = times.message_s;
  own.figures.reduction_bytes_per_s = times.reduction_bytes_per_s;
  return own;
}

}  // namespace dynmo::runtime
