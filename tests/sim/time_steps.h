// SPDX-License-Identifier: Apache-2.0
#pragma once

// The oracle of replays with shared network cards: looks at every rank, message and queue in every
// nanosecond. For small times; durations and transfers worked out in a way of its own.

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/schedule/text.h"
#include "tests/sim/problems.h"

namespace dynmo::sim::testing {

class TimeSteps {
 public:
  explicit TimeSteps(const Problem& problem)
      : problem_(problem), ranks_(problem.schedule.ranks.size()) {}

  std::int64_t step_time() {
    for (now_ = 0; !done(); ++now_) {
      while (run_ranks() || start_queued() || join_queues()) {
      }
    }
    std::int64_t end = 0;
    for (const auto& [id, message] : messages_) end = std::max(end, message.arrival);
    std::int64_t update = 0;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      end = std::max({end, ranks_[r].until, ranks_[r].reduced});
      std::int64_t sum = 0;
      for (std::size_t s = 0; s < problem_.costs.size(); ++s) {
        const schedule::StageShape& stage = problem_.schedule.shape.stages[s];
        if (stage.rank.index() == r && !stage.frozen) sum += scaled(problem_.costs[s].update, r);
      }
      update = std::max(update, sum);
    }
    return end + update;
  }

  // When an action ended, by its text.
  [[nodiscard]] const std::map<std::string, std::int64_t>& ends() const { return ends_; }

 private:
  // (boundary, 0 activation or 1 gradient, micro-batch): as many as the tie rule looks at.
  using Id = std::tuple<int, int, int>;
  struct Message {
    int ends_posted = 0;
    bool moving = false;  // has joined its queues, or has started where there are none
    bool started = false;
    std::int64_t arrival = -1;
    std::int64_t off_cards = -1;
  };
  struct RankState {
    std::size_t next = 0;
    bool computing = false;
    std::int64_t until = 0;
    std::int64_t reduced = 0;
  };

  [[nodiscard]] bool done() const {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].next < problem_.schedule.ranks[r].size()) return false;
    }
    return std::all_of(messages_.begin(), messages_.end(),
                       [](const auto& entry) { return entry.second.started; });
  }

  bool run_ranks() {
    bool moved = false;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      while (advance(r)) moved = true;
    }
    return moved;
  }

  bool advance(std::size_t r) {
    RankState& rank = ranks_[r];
    const std::vector<schedule::Action>& list = problem_.schedule.ranks[r];
    if (rank.next == list.size()) return false;
    const schedule::Action& a = list[rank.next];
    if (rank.computing) {
      if (rank.until > now_) return false;
      rank.computing = false;
      ++rank.next;
      finish(rank, a);
      return true;
    }
    if (!is_compute(a.kind)) {
      ++messages_[id_of(a)].ends_posted;
      ++rank.next;
      return true;
    }
    if (!has_input(a)) return false;
    rank.computing = true;
    rank.until = now_ + duration(a, r);
    return true;
  }

  void finish(RankState& rank, const schedule::Action& a) {
    ends_[to_string(a)] = now_;
    const bool weights = a.kind == schedule::ActionKind::kBackward ||
                         a.kind == schedule::ActionKind::kWeightGradient;
    if (!weights || a.micro_batch.value + 1 != problem_.schedule.shape.micro_batches) return;
    rank.reduced = std::max(rank.reduced, now_) + problem_.costs[a.stage.index()].reduction.count();
  }

  bool has_input(const schedule::Action& a) {
    const int s = a.stage.value;
    const bool forward = a.kind == schedule::ActionKind::kForward;
    if (a.kind == schedule::ActionKind::kWeightGradient) return true;
    const int boundary = forward ? s - 1 : s;
    if (boundary < 0 || boundary + 1 == static_cast<int>(problem_.costs.size())) return true;
    if (rank_of(boundary) == rank_of(boundary + 1)) return true;
    const auto found = messages_.find({boundary, forward ? 0 : 1, a.micro_batch.value});
    return found != messages_.end() && found->second.started && found->second.arrival <= now_;
  }

  // A message leaves both cards when it is off them; the first of both its queues starts.
  bool start_queued() {
    bool moved = false;
    for (auto* queues : {&egress_, &ingress_}) {
      for (auto& [node, queue] : *queues) {
        while (!queue.empty() && messages_[queue.front()].started &&
               messages_[queue.front()].off_cards <= now_) {
          queue.pop_front();
          moved = true;
        }
      }
    }
    for (auto& [node, queue] : egress_) {
      if (queue.empty() || messages_[queue.front()].started) continue;
      const Id id = queue.front();
      if (ingress_[nodes_of(id).second].front() != id) continue;
      start(id);
      moved = true;
    }
    return moved;
  }

  // One message a call, the lowest first; messages without queues start at once.
  bool join_queues() {
    for (auto& [id, message] : messages_) {
      if (message.ends_posted < 2 || message.moving) continue;
      message.moving = true;
      const auto [from, to] = nodes_of(id);
      if (from == to || std::isinf(problem_.cluster.nic_bandwidth_bytes_per_s)) {
        start(id);
      } else {
        egress_[from].push_back(id);
        ingress_[to].push_back(id);
      }
      return true;
    }
    return false;
  }

  void start(const Id& id) {
    const auto [from, to] = nodes_of(id);
    const Cluster& cluster = problem_.cluster;
    const cost::Link& link = from == to ? cluster.inside_node : cluster.between_nodes;
    const double bytes = static_cast<double>(
        problem_.costs[static_cast<std::size_t>(std::get<0>(id))].boundary.value);
    const double card = from == to ? 0 : bytes / cluster.nic_bandwidth_bytes_per_s;
    const double seconds = link.latency_s + std::max(bytes / link.bandwidth_bytes_per_s, card);
    Message& message = messages_[id];
    message.started = true;
    message.arrival = now_ + std::llround(seconds * 1e9);
    message.off_cards = now_ + std::llround(card * 1e9);
  }

  static Id id_of(const schedule::Action& a) {
    switch (a.kind) {
      case schedule::ActionKind::kSendActivation:
        return {a.stage.value, 0, a.micro_batch.value};
      case schedule::ActionKind::kReceiveActivation:
        return {a.stage.value - 1, 0, a.micro_batch.value};
      case schedule::ActionKind::kSendGradient:
        return {a.stage.value - 1, 1, a.micro_batch.value};
      default:
        return {a.stage.value, 1, a.micro_batch.value};
    }
  }
  [[nodiscard]] std::size_t rank_of(int stage) const {
    return problem_.schedule.shape.stages[static_cast<std::size_t>(stage)].rank.index();
  }
  [[nodiscard]] std::pair<int, int> nodes_of(const Id& id) const {
    const int low = problem_.cluster.ranks[rank_of(std::get<0>(id))].node;
    const int high = problem_.cluster.ranks[rank_of(std::get<0>(id) + 1)].node;
    return std::get<1>(id) == 0 ? std::pair{low, high} : std::pair{high, low};
  }
  [[nodiscard]] std::int64_t scaled(Nanoseconds time, std::size_t rank) const {
    return std::llround(static_cast<double>(time.count()) / problem_.cluster.ranks[rank].speed);
  }
  [[nodiscard]] std::int64_t duration(const schedule::Action& a, std::size_t rank) const {
    const StageCost& cost = problem_.costs[a.stage.index()];
    switch (a.kind) {
      case schedule::ActionKind::kForward:
        return scaled(cost.forward, rank);
      case schedule::ActionKind::kInputGradient:
        return scaled(cost.input_gradient, rank);
      case schedule::ActionKind::kWeightGradient:
        return scaled(cost.weight_gradient, rank);
      default:
        return scaled(cost.input_gradient, rank) + scaled(cost.weight_gradient, rank);
    }
  }

  const Problem& problem_;
  std::int64_t now_ = 0;
  std::vector<RankState> ranks_;
  std::map<Id, Message> messages_;
  std::map<int, std::deque<Id>> egress_;  // by node; the first is on the card, or will be
  std::map<int, std::deque<Id>> ingress_;
  std::map<std::string, std::int64_t> ends_;
};

}  // namespace dynmo::sim::testing
