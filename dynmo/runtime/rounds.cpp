// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/rounds.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace dynmo::runtime {

void append(StepOutput& step, StepOutput round, int first) {
  if (step.start_ns == 0) {
    step = std::move(round);
    return;
  }
  step.seconds += round.seconds;
  step.waiting_s += round.waiting_s;
  for (const auto& [layer, losses] : round.losses) {
    auto& all = step.losses[layer];
    all.insert(all.end(), losses.begin(), losses.end());
  }
  for (const auto& [layer, figures] : round.figures) {
    auto& sums = step.figures[layer];
    for (std::size_t k = 0; k < figures.size(); ++k) sums.at(k) += figures[k];
  }
  for (const auto& [layer, rows] : round.rows) {
    auto& all = step.rows[layer];
    all.insert(all.end(), rows.begin(), rows.end());
  }
  for (const auto& [layer, bytes] : round.stash_bytes) {
    step.stash_bytes[layer] = std::max(step.stash_bytes[layer], bytes);
  }
  for (const auto& [layer, times] : round.layer_times) {
    auto& all = step.layer_times[layer];
    all.insert(all.end(), times.begin(), times.end());
  }
  const Nanoseconds later{round.start_ns - step.start_ns};
  const auto append_to = [&](std::vector<schedule::TimedAction>& all,
                             const std::vector<schedule::TimedAction>& more) {
    for (schedule::TimedAction timed : more) {
      timed.action.micro_batch = MicroBatchId(first + timed.action.micro_batch.value);
      timed.start += later;
      timed.end += later;
      all.push_back(timed);
    }
  };
  append_to(step.actions, round.actions);
  append_to(step.messages, round.messages);
}

}  // namespace dynmo::runtime
