// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <tuple>

#include "dynmo/core/check.h"
#include "dynmo/kernels/select_top.h"

namespace dynmo::kernels {
namespace {

constexpr double kLargest = 1e30;
constexpr double kNoWay = -std::numeric_limits<double>::infinity();

// The move of a token from one expert to another. Ties go to the first token.
struct Move {
  double gain;
  std::int64_t token;
  friend bool operator<(const Move& a, const Move& b) {
    return std::tie(a.gain, b.token) < std::tie(b.gain, a.token);
  }
};

class Assigner {
 public:
  Assigner(std::span<const double> scores, std::size_t experts, std::size_t top_k)
      : experts_(experts), top_k_(top_k), scores_(scores.begin(), scores.end()) {
    for (double& score : scores_) {
      score = std::isnan(score) ? -kLargest : std::clamp(score, -kLargest, kLargest);
    }
    const std::size_t tokens = scores_.size() / experts_;
    room_.assign(experts_, (tokens * top_k_ + experts_ - 1) / experts_);
    has_.assign(scores_.size(), false);
    moves_.resize(experts_ * experts_);
  }

  std::vector<std::int32_t> run() {
    const std::size_t tokens = scores_.size() / experts_;
    for (std::size_t token = 0; token < tokens; ++token) {
      for (std::size_t slot = 0; slot < top_k_; ++slot) place(token);
    }
    std::vector<std::int32_t> chosen;
    chosen.reserve(tokens * top_k_);
    for (std::size_t i = 0; i < has_.size(); ++i) {
      if (has_[i]) chosen.push_back(static_cast<std::int32_t>(i % experts_));
    }
    return chosen;
  }

 private:
  // Returns the best possible move from one expert to another. The queue drops moves that are
  // impossible now. They are pushed again when they become possible (see give).
  const Move* best(std::size_t from, std::size_t to) {
    auto& moves = moves_[from * experts_ + to];
    while (!moves.empty()) {
      const auto token = static_cast<std::size_t>(moves.top().token);
      if (has_[token * experts_ + from] && !has_[token * experts_ + to]) return &moves.top();
      moves.pop();
    }
    return nullptr;
  }

  void push(std::size_t token, std::size_t from, std::size_t to) {
    moves_[from * experts_ + to].push(
        {.gain = scores_[token * experts_ + to] - scores_[token * experts_ + from],
         .token = static_cast<std::int64_t>(token)});
  }

  void give(std::size_t token, std::size_t expert) {
    has_[token * experts_ + expert] = true;
    for (std::size_t other = 0; other < experts_; ++other) {
      if (!has_[token * experts_ + other]) push(token, expert, other);
    }
  }

  void take(std::size_t token, std::size_t expert) {
    has_[token * experts_ + expert] = false;
    for (std::size_t other = 0; other < experts_; ++other) {
      if (other != expert && has_[token * experts_ + other]) push(token, other, expert);
    }
  }

  // Gives the token one more expert, by the path of largest gain that ends at an expert with room.
  // No cycle has a gain, because the assignment so far is the best for its tokens.
  void place(std::size_t token) {
    std::vector<double> gain(experts_, kNoWay);
    std::vector<std::size_t> before(experts_, experts_);
    for (std::size_t e = 0; e < experts_; ++e) {
      if (!has_[token * experts_ + e]) gain[e] = scores_[token * experts_ + e];
    }
    for (std::size_t round = 1; round < experts_; ++round) {
      bool better = false;
      for (std::size_t from = 0; from < experts_; ++from) {
        // A path ends at an expert with room, because a longer one never gains more.
        if (gain[from] == kNoWay || room_[from] > 0) continue;
        for (std::size_t to = 0; to < experts_; ++to) {
          const Move* move = from == to ? nullptr : best(from, to);
          if (move == nullptr || !(gain[from] + move->gain > gain[to])) continue;
          // A cycle could only gain by rounding.
          if (leads_to(before, from, to)) continue;
          gain[to] = gain[from] + move->gain;
          before[to] = from;
          better = true;
        }
      }
      if (!better) break;
    }
    std::size_t end = experts_;
    for (std::size_t e = 0; e < experts_; ++e) {
      if (room_[e] > 0 && gain[e] != kNoWay && (end == experts_ || gain[e] > gain[end])) end = e;
    }
    DYNMO_CHECK(end < experts_, "an expert with room for token {}", token);
    --room_[end];
    while (before[end] < experts_) {
      const std::size_t from = before[end];
      const Move* move = best(from, end);
      DYNMO_CHECK(move != nullptr, "a token to move from expert {} to {}", from, end);
      const auto moved = static_cast<std::size_t>(move->token);
      take(moved, from);
      give(moved, end);
      end = from;
    }
    give(token, end);
  }

  // Returns whether the path to `end` passes `expert`.
  bool leads_to(const std::vector<std::size_t>& before, std::size_t end, std::size_t expert) const {
    for (std::size_t e = end; e < experts_; e = before[e]) {
      if (e == expert) return true;
    }
    return false;
  }

  std::size_t experts_;
  std::size_t top_k_;
  std::vector<double> scores_;
  std::vector<std::size_t> room_;                 // of each expert
  std::vector<bool> has_;                         // by token and expert
  std::vector<std::priority_queue<Move>> moves_;  // by the two experts
};

}  // namespace

std::vector<std::int32_t> balanced_assignment(std::span<const double> scores, std::int64_t experts,
                                              std::int64_t top_k) {
  DYNMO_CHECK(top_k >= 1 && top_k <= experts && std::ssize(scores) % experts == 0,
              "rows of {} scores and 1 to as many experts a token, got {} and {}", experts,
              scores.size(), top_k);
  return Assigner(scores, static_cast<std::size_t>(experts), static_cast<std::size_t>(top_k)).run();
}

}  // namespace dynmo::kernels
