// SPDX-License-Identifier: Apache-2.0
#pragma once

// The oracle of the checker: plays a lowered schedule, as its ranks would, in sweeps over all ranks
// with everything that happened kept in sets and maps of words. Shares no code with the checker,
// and knows its rules only as "what would go wrong".

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule::testing {

class BruteForce {
 public:
  explicit BruteForce(const Schedule& schedule)
      : plan_(schedule), cursor_(schedule.ranks.size(), 0) {}

  // Whether the step ends with every result that a step must have.
  bool completes() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t r = 0; r < cursor_.size(); ++r) {
        if (cursor_[r] == plan_.ranks[r].size()) continue;
        const Outcome outcome = play(static_cast<int>(r), plan_.ranks[r][cursor_[r]]);
        if (outcome == Outcome::kWrong) return false;
        if (outcome == Outcome::kWait) continue;
        ++cursor_[r];
        moved = true;
      }
    }
    return all_done();
  }

  // After completes(): where the rank stopped in its list.
  std::size_t stopped_at(Rank rank) const { return cursor_[rank.index()]; }

 private:
  enum class Outcome { kDone, kWait, kWrong };
  using Key = std::pair<std::string, int>;      // what ("F", "dx", "dw", a posted end), stage
  using Channel = std::pair<std::string, int>;  // "activation" or "gradient", the earlier stage

  int owner(int stage) const {
    return plan_.shape.stages.at(static_cast<std::size_t>(stage)).rank.value;
  }
  bool trained(int stage) const {
    return !plan_.shape.stages.at(static_cast<std::size_t>(stage)).frozen;
  }
  int stages() const { return static_cast<int>(plan_.shape.stages.size()); }
  bool exists(const std::string& what, int stage, int m) const {
    const auto found = made_.find({what, stage});
    return found != made_.end() && found->second.count(m) > 0;
  }
  Outcome make(const std::string& what, int stage, int m) {
    return made_[{what, stage}].insert(m).second ? Outcome::kDone : Outcome::kWrong;
  }

  // The value that stage `from` made and `to` uses, on the rank of `to`.
  Outcome use(const std::string& what, const Channel& channel, int from, int to, int m) {
    if (owner(from) == owner(to)) return exists(what, from, m) ? Outcome::kDone : Outcome::kWrong;
    const std::vector<int>& posted = receives_[channel];
    const auto mine = std::find(posted.begin(), posted.end(), m);
    if (mine == posted.end()) return Outcome::kWrong;  // nobody asked for it
    const auto k = static_cast<std::size_t>(mine - posted.begin());
    const std::vector<int>& sent = sends_[channel];
    if (sent.size() <= k) return Outcome::kWait;
    return sent[k] == m ? Outcome::kDone : Outcome::kWrong;  // the wrong message arrived
  }

  Outcome post(std::map<Channel, std::vector<int>>& posts, const Channel& channel, int m) {
    std::vector<int>& list = posts[channel];
    if (std::count(list.begin(), list.end(), m) > 0) return Outcome::kWrong;
    list.push_back(m);
    return Outcome::kDone;
  }

  Outcome forward(int s, int m) {
    const Outcome input = s == 0 ? Outcome::kDone : use("F", {"activation", s - 1}, s - 1, s, m);
    return input == Outcome::kDone ? make("F", s, m) : input;
  }

  Outcome input_gradient(int s, int m) {
    if (!trained(s) || !exists("F", s, m)) return Outcome::kWrong;
    const Outcome above =
        s + 1 == stages() ? Outcome::kDone : use("dx", {"gradient", s}, s + 1, s, m);
    return above == Outcome::kDone ? make("dx", s, m) : above;
  }

  Outcome weight_gradient(int s, int m) {
    // Summed in order: micro-batch m is the m-th.
    const bool next = static_cast<int>(made_[{"dw", s}].size()) == m;
    return next && exists("dx", s, m) ? make("dw", s, m) : Outcome::kWrong;
  }

  // Sends and receives between stages `low` and low + 1.
  Outcome message(const Action& a, int low, bool gradient, bool send) {
    const int s = a.stage.value;
    const int m = a.micro_batch.value;
    if (low < 0 || low + 1 >= stages() || owner(low) == owner(low + 1)) return Outcome::kWrong;
    if (gradient && !trained(low)) return Outcome::kWrong;
    if (send && !exists(gradient ? "dx" : "F", s, m)) return Outcome::kWrong;
    return post(send ? sends_ : receives_, {gradient ? "gradient" : "activation", low}, m);
  }

  Outcome play(int rank, const Action& a) {
    const int s = a.stage.value;
    const int m = a.micro_batch.value;
    if (s < 0 || s >= stages() || owner(s) != rank) return Outcome::kWrong;
    if (m < 0 || m >= plan_.shape.micro_batches) return Outcome::kWrong;
    switch (a.kind) {
      case ActionKind::kForward:
        return forward(s, m);
      case ActionKind::kInputGradient:
        return input_gradient(s, m);
      case ActionKind::kWeightGradient:
        if (whole_.count({s, m}) > 0) return Outcome::kWrong;  // after a B
        return weight_gradient(s, m);
      case ActionKind::kBackward: {
        const Outcome outcome = input_gradient(s, m);
        if (outcome != Outcome::kDone) return outcome;
        whole_.insert({s, m});
        return weight_gradient(s, m);
      }
      case ActionKind::kSendActivation:
        return message(a, s, false, true);
      case ActionKind::kReceiveActivation:
        return message(a, s - 1, false, false);
      case ActionKind::kSendGradient:
        return message(a, s - 1, true, true);
      case ActionKind::kReceiveGradient:
        return message(a, s, true, false);
    }
    return Outcome::kWrong;
  }

  bool all_done() const {
    for (std::size_t r = 0; r < cursor_.size(); ++r) {
      if (cursor_[r] != plan_.ranks[r].size()) return false;  // stuck
    }
    const auto all = static_cast<std::size_t>(plan_.shape.micro_batches);
    for (int s = 0; s < stages(); ++s) {
      for (const std::string what : {"F", "dx", "dw"}) {
        if (what != "F" && !trained(s)) continue;
        const auto found = made_.find({what, s});
        if (found == made_.end() || found->second.size() != all) return false;
      }
    }
    return sends_ == receives_;  // every message has both ends, in one order
  }

  const Schedule& plan_;
  std::vector<std::size_t> cursor_;
  std::map<Key, std::set<int>> made_;
  std::set<std::pair<int, int>> whole_;  // (stage, micro-batch) whose backward was whole
  std::map<Channel, std::vector<int>> sends_;
  std::map<Channel, std::vector<int>> receives_;
};

inline bool brute_force_accepts(const Schedule& schedule) {
  return BruteForce(schedule).completes();
}

}  // namespace dynmo::schedule::testing
