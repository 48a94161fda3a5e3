// SPDX-License-Identifier: Apache-2.0
#pragma once

// The checker's index of a schedule: the position of every action, and the kinds that each stage
// runs.

#include <optional>
#include <vector>

#include "dynmo/schedule/check.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

[[nodiscard]] inline bool is_send(ActionKind kind) {
  return kind == ActionKind::kSendActivation || kind == ActionKind::kSendGradient;
}

class ActionIndex {
 public:
  static constexpr int kAbsent = -1;

  // Borrows `of`. All positions are absent until placed. Requires a valid shape.
  explicit ActionIndex(const Schedule& of);

  [[nodiscard]] const Schedule& schedule() const { return schedule_; }
  [[nodiscard]] std::size_t stages() const { return kinds_.size(); }
  [[nodiscard]] std::size_t micro_batches() const { return micro_batches_; }

  // Returns whether the stage may run this kind.
  [[nodiscard]] bool may(std::size_t stage, ActionKind kind) const {
    return (kinds_[stage] & bit(kind)) != 0;
  }
  [[nodiscard]] Rank rank_of(StageId stage) const {
    return schedule_.shape.stages[stage.index()].rank;
  }
  [[nodiscard]] Rank rank_of(const Action& action) const { return rank_of(action.stage); }
  // Returns a number that no other possible action has.
  [[nodiscard]] std::size_t slot(const Action& action) const {
    return (action.stage.index() * micro_batches_ + action.micro_batch.index()) * kKinds +
           static_cast<std::size_t>(action.kind);
  }
  [[nodiscard]] int& at(const Action& action) { return at_[slot(action)]; }
  [[nodiscard]] Position position(const Action& action) const {
    return {.rank = rank_of(action), .index = at_[slot(action)]};
  }
  // Returns the positions of one (stage, micro-batch), by kind.
  [[nodiscard]] const int* row(std::size_t stage, std::size_t micro_batch) const {
    return &at_[(stage * micro_batches_ + micro_batch) * kKinds];
  }

 private:
  static constexpr std::size_t kKinds = 8;
  static unsigned bit(ActionKind kind) { return 1U << static_cast<unsigned>(kind); }

  const Schedule& schedule_;
  std::size_t micro_batches_;
  std::vector<unsigned> kinds_;  // by stage
  std::vector<int> at_;          // position in its rank's list, by slot
};

// Checks rule 5 of check.h. Requires a schedule that keeps rules 1 to 4.
[[nodiscard]] std::optional<Fault> find_deadlock(const ActionIndex& index);

}  // namespace dynmo::schedule
