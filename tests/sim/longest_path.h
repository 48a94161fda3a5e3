// SPDX-License-Identifier: Apache-2.0
#pragma once

// The oracle of replays without shared network cards.

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "dynmo/schedule/text.h"
#include "tests/sim/problems.h"

namespace dynmo::sim::testing {

using schedule::Action;
using schedule::ActionKind;

// When an action ends, by recursion over what it waits for, with the costs in a way of
// its own. Follows the lists backwards, where the simulator runs them forwards.
class LongestPath {
 public:
  LongestPath(const Schedule& schedule, const std::vector<StageCost>& costs, const Cluster& cluster)
      : schedule_(schedule), costs_(costs), cluster_(cluster) {
    for (const auto& list : schedule.ranks) {
      for (std::size_t i = 0; i < list.size(); ++i) index_[to_string(list[i])] = i;
    }
  }

  std::int64_t step_time() {
    std::int64_t latest = 0;
    std::int64_t update = 0;
    for (std::size_t r = 0; r < schedule_.ranks.size(); ++r) {
      const std::vector<Action>& list = schedule_.ranks[r];
      std::int64_t end = clock(r, list.size());
      for (const Action& a : list) {
        if (a.kind == ActionKind::kSendActivation)
          end = std::max(end, passed("F", a.stage.value, a));
        if (a.kind == ActionKind::kSendGradient) {
          end = std::max(end, passed("B", a.stage.value - 1, a));
        }
      }
      end = std::max(end, reductions_end(r));
      latest = std::max(latest, end);
      update = std::max(update, updates(r));
    }
    return latest + update;
  }

  // Counts the stash at each simulated instant: the start of every F.
  std::int64_t peak_stash(std::size_t rank) {
    std::int64_t peak = 0;
    std::int64_t held = 0;
    for (const Action& a : schedule_.ranks[rank]) {
      const std::size_t s = a.stage.index();
      const std::int64_t bytes = schedule_.shape.stages[s].frozen ? 0 : costs_[s].activation.value;
      if (a.kind == ActionKind::kForward) held += bytes;
      if (a.kind == ActionKind::kBackward || a.kind == ActionKind::kWeightGradient) held -= bytes;
      peak = std::max(peak, held);
    }
    return peak;
  }

  // The clock of a rank before the action at `index`: the end of the compute action before it.
  std::int64_t clock(std::size_t rank, std::size_t index) {
    for (std::size_t i = index; i-- > 0;) {
      if (is_compute(schedule_.ranks[rank][i].kind)) return end(rank, i);
    }
    return 0;
  }

  std::int64_t end(std::size_t rank, std::size_t index) {
    const Action& a = schedule_.ranks[rank][index];
    const std::string key = to_string(a);
    if (const auto known = ends_.find(key); known != ends_.end()) return known->second;
    std::int64_t start = clock(rank, index);
    const int s = a.stage.value;
    if (a.kind == ActionKind::kForward && s > 0 && rank_of(s - 1) != rank_of(s)) {
      start = std::max(start, passed("F", s - 1, a));
    }
    const bool last = a.stage.index() + 1 == schedule_.shape.stages.size();
    const bool gradient = a.kind == ActionKind::kBackward || a.kind == ActionKind::kInputGradient;
    if (gradient && !last && rank_of(s + 1) != rank_of(s)) {
      start = std::max(start, passed("B", s, a));
    }
    return ends_[key] = start + duration(a);
  }

 private:
  std::size_t rank_of(int stage) const {
    return schedule_.shape.stages[static_cast<std::size_t>(stage)].rank.index();
  }
  std::int64_t scaled(Nanoseconds time, std::size_t rank) const {
    return std::llround(static_cast<double>(time.count()) / cluster_.ranks[rank].speed);
  }
  std::int64_t duration(const Action& a) const {
    const StageCost& cost = costs_[a.stage.index()];
    const std::size_t rank = rank_of(a.stage.value);
    std::int64_t time = 0;
    if (a.kind == ActionKind::kForward) time += scaled(cost.forward, rank);
    if (a.kind != ActionKind::kForward && a.kind != ActionKind::kWeightGradient) {
      time += scaled(cost.input_gradient, rank);
    }
    if (a.kind == ActionKind::kBackward || a.kind == ActionKind::kWeightGradient) {
      time += scaled(cost.weight_gradient, rank);
    }
    return time;
  }
  // The stages of the rank in the order in which their last weight gradients end.
  std::int64_t reductions_end(std::size_t rank) {
    std::int64_t time = 0;
    for (std::size_t i = 0; i < schedule_.ranks[rank].size(); ++i) {
      const Action& a = schedule_.ranks[rank][i];
      const bool weights = a.kind == ActionKind::kBackward || a.kind == ActionKind::kWeightGradient;
      if (!weights || a.micro_batch.value + 1 != schedule_.shape.micro_batches) continue;
      time = std::max(time, end(rank, i)) + costs_[a.stage.index()].reduction.count();
    }
    return time;
  }
  std::int64_t updates(std::size_t rank) const {
    std::int64_t time = 0;
    for (std::size_t s = 0; s < costs_.size(); ++s) {
      const schedule::StageShape& stage = schedule_.shape.stages[s];
      if (stage.rank.index() == rank && !stage.frozen) time += scaled(costs_[s].update, rank);
    }
    return time;
  }

  // Arrival of the message of a's micro-batch over the boundary behind stage `low`: "F" or "B".
  std::int64_t passed(const std::string& direction, int low, const Action& a) {
    const bool forward = direction == "F";
    const int from = forward ? low : low + 1;
    const int to = forward ? low + 1 : low;
    const auto posted = [&](int stage, const char* verb) {
      const std::string key = fmt::format("{}{}_{}{}", stage, verb, direction, a.micro_batch);
      return clock(rank_of(stage), index_.at(key));
    };
    const bool same_node = cluster_.ranks[rank_of(from)].node == cluster_.ranks[rank_of(to)].node;
    const cost::Link& link = same_node ? cluster_.inside_node : cluster_.between_nodes;
    const double bytes = static_cast<double>(costs_[static_cast<std::size_t>(low)].boundary.value);
    const double seconds = link.latency_s + bytes / link.bandwidth_bytes_per_s;
    return std::max(posted(from, "SEND"), posted(to, "RECV")) + std::llround(seconds * 1e9);
  }

  const Schedule& schedule_;
  const std::vector<StageCost>& costs_;
  const Cluster& cluster_;
  std::map<std::string, std::size_t> index_;
  std::map<std::string, std::int64_t> ends_;
};

}  // namespace dynmo::sim::testing
