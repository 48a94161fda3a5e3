// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "dynmo/schedule/action_index_impl.h"
#include "dynmo/schedule/lowering.h"

namespace dynmo::schedule {
namespace {

using enum ActionKind;

// Replays rendezvous messages without times. Runs every rank until it blocks, and again once its
// message is sent. The time is linear, because a rank blocks at most once for each message.
class Replay {
 public:
  explicit Replay(const ActionIndex& index)
      : index_(index),
        next_(index.schedule().ranks.size(), 0),
        awaited_(index.schedule().ranks.size(), kNothing),
        sent_(2 * index.stages() * padded(index.micro_batches()), 0) {}

  std::optional<Fault> run() {
    for (std::size_t r = next_.size(); r-- > 0;) ready_.push_back(r);
    while (!ready_.empty()) {
      const std::size_t rank = ready_.back();
      ready_.pop_back();
      run_rank(rank);
    }
    for (std::size_t r = 0; r < next_.size(); ++r) {
      if (awaited_[r] != kNothing) return deadlock(r);
    }
    return std::nullopt;
  }

 private:
  static constexpr std::size_t kNothing = ~std::size_t{0};

  void run_rank(std::size_t rank) {
    const std::vector<Action>& list = index_.schedule().ranks[rank];
    for (; next_[rank] < list.size(); ++next_[rank]) {
      const Action& action = list[next_[rank]];
      if (is_send(action.kind)) {
        wake(action);
      } else if (is_compute(action.kind) && !arrived(action)) {
        awaited_[rank] = message(awaited_send(action));
        return;
      }
    }
  }

  // Returns an odd number of cache lines, so that messages of one micro-batch use different sets of
  // the cache.
  static std::size_t padded(std::size_t micro_batches) {
    constexpr std::size_t kLine = 64;
    return ((micro_batches / kLine + 1) | 1) * kLine;
  }

  // Returns the number of a message, which no other one has.
  [[nodiscard]] std::size_t message(const Action& send) const {
    const std::size_t gradient = send.kind == kSendGradient ? 1 : 0;
    return (2 * send.stage.index() + gradient) * padded(index_.micro_batches()) +
           send.micro_batch.index();
  }

  void wake(const Action& send) {
    const std::size_t sent = message(send);
    sent_[sent] = 1;
    const std::int32_t stage = send.stage.value + (send.kind == kSendActivation ? 1 : -1);
    const std::size_t receiver = index_.rank_of(StageId{stage}).index();
    if (awaited_[receiver] != sent) return;
    awaited_[receiver] = kNothing;
    ready_.push_back(receiver);
  }

  // Returns whether the message of a compute action has passed. Its receive is posted (rule 3), so
  // that holds once it is sent.
  [[nodiscard]] bool arrived(const Action& compute) const {
    const ActionKind receive = compute.kind == kForward ? kReceiveActivation : kReceiveGradient;
    if (compute.kind == kWeightGradient || !index_.may(compute.stage.index(), receive)) return true;
    return sent_[message(awaited_send(compute))] != 0;
  }

  // Returns the send that a compute action waits for.
  [[nodiscard]] static Action awaited_send(const Action& compute) {
    const bool forward = compute.kind == kForward;
    return {.kind = forward ? kSendActivation : kSendGradient,
            .stage = StageId{compute.stage.value + (forward ? -1 : 1)},
            .micro_batch = compute.micro_batch};
  }

  // Returns the cycle of ranks that wait for one another. Every blocked rank waits for a send of
  // another blocked rank, so following them reaches it.
  [[nodiscard]] Fault deadlock(std::size_t rank) const {
    std::vector<bool> seen(next_.size(), false);
    for (; !seen[rank]; rank = blocker(rank)) seen[rank] = true;
    Fault fault{"deadlock: ", {}};
    const std::size_t first = rank;
    do {
      const Action& stuck = index_.schedule().ranks[rank][next_[rank]];
      fault.message += fmt::format("{}{} on rank {} waits for {}", fault.marked.empty() ? "" : ", ",
                                   to_string(stuck), rank, to_string(awaited_send(stuck)));
      fault.marked.push_back(
          {Rank(static_cast<std::int32_t>(rank)), static_cast<int>(next_[rank])});
      rank = blocker(rank);
    } while (rank != first);
    fault.message += "; want one of these sends made before its rank waits";
    return fault;
  }

  [[nodiscard]] std::size_t blocker(std::size_t rank) const {
    return index_.rank_of(awaited_send(index_.schedule().ranks[rank][next_[rank]])).index();
  }

  const ActionIndex& index_;
  std::vector<std::size_t> next_;     // by rank: first action that is not done
  std::vector<std::size_t> awaited_;  // by rank: the message that blocks it
  std::vector<char> sent_;            // by message: smaller than the position of its send
  std::vector<std::size_t> ready_;
};

}  // namespace

std::optional<Fault> find_deadlock(const ActionIndex& index) { return Replay(index).run(); }

}  // namespace dynmo::schedule
