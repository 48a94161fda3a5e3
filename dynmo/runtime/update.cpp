// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/update.h"

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <utility>

#include "dynmo/runtime/device_clock.h"

namespace dynmo::runtime {
namespace {

model::LayerState copy_of(const model::LayerState& state) {
  model::LayerState copy = state;
  for (model::Parameter& parameter : copy.parameters) {
    for (at::Tensor* tensor : {&parameter.value, &parameter.gradient, &parameter.first_moment,
                               &parameter.second_moment, &parameter.compute_copy}) {
      if (tensor->defined()) *tensor = tensor->clone();
    }
  }
  return copy;
}

}  // namespace

void update_layers(LayerStates& states, const model::AdamWOptions& optimizer, double clip_factor,
                   Update update, at::Device device, RankTimes& times) {
  const auto clock = std::make_shared<DeviceClock>(device);
  std::map<LayerId, std::pair<DeviceClock::Mark, DeviceClock::Mark>> marks;
  for (auto& [id, state] : states) {
    if (state.frozen) continue;
    const DeviceClock::Mark begin = clock->mark();
    if (update == Update::kSkip) {
      model::zero_gradients(state);
    } else {
      model::update(state, optimizer, clip_factor);
    }
    marks[id] = {begin, clock->mark()};
  }
  times.read_update = [clock, marks = std::move(marks), end = clock->mark()](RankTimes& to) {
    for (const auto& [id, mark] : marks) to.update_s[id] = clock->seconds(mark.first, mark.second);
    to.update_total_s = clock->seconds(clock->start(), end);
  };
  if (device.is_cpu()) read_update_times(times);
}

void read_update_times(RankTimes& times) {
  if (times.read_update) std::exchange(times.read_update, {})(times);
}

void measure_updates(LayerStates& states, const model::AdamWOptions& optimizer, at::Device device,
                     RankTimes& times) {
  for (auto& [id, state] : states) {
    if (state.frozen) continue;
    model::zero_gradients(state);
    model::LayerState copy = copy_of(state);
    DeviceClock clock(device);
    model::update(copy, optimizer);
    const DeviceClock::Mark end = clock.mark();
    clock.finish();
    times.update_s[id] = clock.seconds(clock.start(), end);
  }
}

}  // namespace dynmo::runtime
