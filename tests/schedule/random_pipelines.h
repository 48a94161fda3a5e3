// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random pipelines for property tests of schedules and of the simulator.

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule::testing {

inline int pick(Rng& rng, int low, int high) {
  return low + static_cast<int>(rng.below(static_cast<std::uint64_t>(high - low + 1)));
}

inline Action action(ActionKind kind, int stage, int micro_batch) {
  return {.kind = kind, .stage = StageId{stage}, .micro_batch = MicroBatchId{micro_batch}};
}

// Stage i on rank i.
inline PipelineShape even_shape(int stages, int micro_batches, int frozen = 0) {
  PipelineShape shape{.ranks = stages, .micro_batches = micro_batches, .stages = {}};
  for (int s = 0; s < stages; ++s) shape.stages.push_back({.rank = Rank{s}, .frozen = s < frozen});
  return shape;
}

// Freezes a prefix of any length in a third of the cases.
inline void freeze_some(Rng& rng, PipelineShape& shape) {
  const int stages = static_cast<int>(shape.stages.size());
  const int frozen = pick(rng, 0, 2) == 0 ? pick(rng, 0, stages) : 0;
  for (int s = 0; s < frozen; ++s) shape.stages[static_cast<std::size_t>(s)].frozen = true;
}

// 1..8 ranks, some of them idle, also between ranks that are not; the ranks of the stages ascend or
// are shuffled; 1..16 micro-batches; a frozen prefix of any length, also all stages.
inline PipelineShape random_shape(Rng& rng) {
  PipelineShape shape{.ranks = pick(rng, 1, 8), .micro_batches = pick(rng, 1, 16), .stages = {}};
  for (int r = 0; r < shape.ranks; ++r) {
    if (pick(rng, 0, 3) > 0) shape.stages.push_back({.rank = Rank{r}});
  }
  if (shape.stages.empty()) shape.stages.push_back({.rank = Rank{pick(rng, 0, shape.ranks - 1)}});
  const int stages = static_cast<int>(shape.stages.size());
  if (pick(rng, 0, 2) == 0) {
    for (int s = stages - 1; s > 0; --s) {
      std::swap(shape.stages[static_cast<std::size_t>(s)].rank,
                shape.stages[static_cast<std::size_t>(pick(rng, 0, s))].rank);
    }
  }
  freeze_some(rng, shape);
  return shape;
}

// `ranks` of `all` in any order.
inline std::vector<Rank> random_ranks(Rng& rng, int ranks, int all) {
  std::vector<Rank> chosen;
  for (int r = 0; r < all; ++r) chosen.emplace_back(r);
  for (int r = 0; r < ranks; ++r) {
    std::swap(chosen[static_cast<std::size_t>(r)],
              chosen[static_cast<std::size_t>(pick(rng, r, all - 1))]);
  }
  chosen.resize(static_cast<std::size_t>(ranks));
  return chosen;
}

struct Pipeline {
  PipelineShape shape;
  ScheduleOptions options = {};
};

// 1..4 laps over 1..5 ranks of up to 6, a group size and a number of micro-batches that suit.
inline Pipeline random_loop(Rng& rng) {
  const int used = pick(rng, 1, 5);
  Pipeline made{.shape = {.ranks = pick(rng, used, 6), .micro_batches = 0, .stages = {}}};
  const std::vector<Rank> ranks = random_ranks(rng, used, made.shape.ranks);
  const int laps = pick(rng, 1, 4);
  for (int lap = 0; lap < laps; ++lap) {
    for (const Rank rank : ranks) made.shape.stages.push_back({.rank = rank});
  }
  const int group = pick(rng, used, 2 * used);
  const int rest = pick(rng, 0, 2) == 0 && group > used ? pick(rng, used, group - 1) : 0;
  made.options.group_size = group == used && pick(rng, 0, 1) == 0 ? 0 : group;
  made.shape.micro_batches = laps == 1 ? pick(rng, 1, 12) : group * pick(rng, 1, 3) + rest;
  freeze_some(rng, made.shape);
  return made;
}

// The V over 1..6 ranks of up to 7, its middle in two stages or in one, some stages left out; one
// rank keeps both of its stages, or is alone.
inline Pipeline random_v(Rng& rng) {
  const int used = pick(rng, 1, 6);
  Pipeline made{
      .shape = {.ranks = pick(rng, used, 7), .micro_batches = pick(rng, 1, 14), .stages = {}}};
  const std::vector<Rank> ranks = random_ranks(rng, used, made.shape.ranks);
  const bool whole_middle = pick(rng, 0, 1) == 0;
  const bool holes = pick(rng, 0, 2) == 0;
  const int kept = pick(rng, 0, std::max(0, used - 2));
  for (int i = 0; i < 2 * used; ++i) {
    const int place = i < used ? i : 2 * used - 1 - i;
    if (whole_middle && i == used) continue;
    if (holes && place != kept && pick(rng, 0, 2) == 0) continue;
    made.shape.stages.push_back({.rank = ranks[static_cast<std::size_t>(place)]});
  }
  freeze_some(rng, made.shape);
  return made;
}

// A pipeline that the kind takes; not of kAdaptive.
inline Pipeline random_pipeline(Rng& rng, ScheduleKind kind) {
  if (kind == ScheduleKind::kInterleaved) return random_loop(rng);
  if (kind == ScheduleKind::kZbV) return random_v(rng);
  return {.shape = random_shape(rng)};
}

inline constexpr std::array kTemplates = {ScheduleKind::kGpipe, ScheduleKind::k1F1B,
                                          ScheduleKind::kInterleaved, ScheduleKind::kZbH1,
                                          ScheduleKind::kZbV};

// Any number of stages on any rank.
inline PipelineShape random_crowded_shape(Rng& rng) {
  PipelineShape shape{.ranks = pick(rng, 1, 5), .micro_batches = pick(rng, 1, 6), .stages = {}};
  const int stages = pick(rng, 1, 9);
  const int frozen = pick(rng, 0, 2) == 0 ? pick(rng, 0, stages) : 0;
  for (int s = 0; s < stages; ++s) {
    shape.stages.push_back({.rank = Rank{pick(rng, 0, shape.ranks - 1)}, .frozen = s < frozen});
  }
  return shape;
}

// A compute-only schedule with an order no template has: repeatedly runs any action whose inputs
// exist, some backwards whole, some as I and later W. It completes because it was made in an order
// in which it ran.
class RandomOrder {
 public:
  RandomOrder(Rng& rng, const PipelineShape& shape)
      : rng_(rng), shape_(shape), progress_(shape.stages.size()) {}

  Schedule make() {
    Schedule schedule{.shape = shape_, .ranks = {}, .lowered = false};
    schedule.ranks.resize(static_cast<std::size_t>(shape_.ranks));
    for (std::vector<Action> ready = candidates(); !ready.empty(); ready = candidates()) {
      const Action& next = ready[rng_.below(ready.size())];
      schedule.ranks[shape_.stages[next.stage.index()].rank.index()].push_back(next);
      Progress& stage = progress_[next.stage.index()];
      stage.forwards += next.kind == ActionKind::kForward ? 1 : 0;
      const bool whole = next.kind == ActionKind::kBackward;
      stage.gradients += whole || next.kind == ActionKind::kInputGradient ? 1 : 0;
      stage.weights += whole || next.kind == ActionKind::kWeightGradient ? 1 : 0;
    }
    return schedule;
  }

 private:
  struct Progress {
    int forwards = 0;
    int gradients = 0;  // B or I
    int weights = 0;    // B or W
  };

  std::vector<Action> candidates() {
    std::vector<Action> ready;
    for (int s = 0; s < static_cast<int>(progress_.size()); ++s) {
      const auto index = static_cast<std::size_t>(s);
      const Progress& here = progress_[index];
      const int arrived = s == 0 ? shape_.micro_batches : progress_[index - 1].forwards;
      if (here.forwards < arrived) ready.push_back(action(ActionKind::kForward, s, here.forwards));
      if (shape_.stages[index].frozen) continue;
      const int returned =
          index + 1 == progress_.size() ? here.forwards : progress_[index + 1].gradients;
      if (here.gradients < std::min(here.forwards, returned)) {
        const bool whole = here.weights == here.gradients && pick(rng_, 0, 1) == 0;
        ready.push_back(
            action(whole ? ActionKind::kBackward : ActionKind::kInputGradient, s, here.gradients));
      }
      if (here.weights < here.gradients) {
        ready.push_back(action(ActionKind::kWeightGradient, s, here.weights));
      }
    }
    return ready;
  }

  Rng& rng_;
  const PipelineShape& shape_;
  std::vector<Progress> progress_;
};

inline Schedule random_schedule(Rng& rng, const PipelineShape& shape) {
  return RandomOrder(rng, shape).make();
}

}  // namespace dynmo::schedule::testing
