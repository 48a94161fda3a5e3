// SPDX-License-Identifier: Apache-2.0
#include "dynmo/sim/simulate.h"

#include <algorithm>
#include <utility>

#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/step_costs_impl.h"

namespace dynmo::sim {
namespace {

using schedule::Action;
using schedule::ActionKind;
using schedule::Schedule;
using schedule::TimedAction;

constexpr std::int64_t kUnknown = -1;
constexpr std::size_t kNothing = ~std::size_t{0};

// Both ends of one message on a channel.
struct Message {
  std::int64_t posted = kUnknown;   // the later of the ends posted so far
  std::int64_t arrival = kUnknown;  // known once both ends are posted
};

struct RankState {
  std::size_t next = 0;            // first action not replayed
  std::size_t awaited = kNothing;  // message it is blocked on
  std::int64_t clock = 0;          // end of its last compute action
  std::int64_t sends_end = 0;      // arrival of the latest of its sends
  std::int64_t busy = 0;
  std::int64_t stash = 0;
  std::int64_t peak_stash = 0;
};

// Without contention every time is a maximum of sums of earlier ones, so the order in which ranks
// are replayed does not matter: no event queue, each rank runs until it needs a message that is not
// sent yet, and is taken up again when it is.
class Replay {
 public:
  Replay(const Schedule& schedule, const StepCosts& costs, const SimOptions& options)
      : schedule_(schedule),
        costs_(costs),
        record_(options.timeline),
        micro_batches_(static_cast<std::size_t>(schedule.shape.micro_batches)),
        messages_(costs.transfer.size() * micro_batches_),
        ranks_(schedule.ranks.size()),
        spans_(record_ ? schedule.ranks.size() : 0) {}

  // Requires a schedule that the checker accepts: then it always reaches the end.
  SimResult run() {
    for (std::size_t r = ranks_.size(); r-- > 0;) ready_.push_back(r);
    while (!ready_.empty()) {
      const std::size_t rank = ready_.back();
      ready_.pop_back();
      run_rank(rank);
    }
    return summary();
  }

 private:
  [[nodiscard]] std::size_t message_of(int channel, const Action& action) const {
    return static_cast<std::size_t>(channel) * micro_batches_ + action.micro_batch.index();
  }
  [[nodiscard]] std::size_t rank_of(const Action& action) const {
    return schedule_.shape.stages[action.stage.index()].rank.index();
  }

  void run_rank(std::size_t rank) {
    RankState& state = ranks_[rank];
    const std::vector<Action>& list = schedule_.ranks[rank];
    for (; state.next < list.size(); ++state.next) {
      if (!run_action(rank, state, list[state.next])) return;
    }
  }

  // False if the action must wait for a message that is not sent yet.
  bool run_action(std::size_t rank, RankState& state, const Action& action) {
    const StepCosts::Stage& cost = costs_.stages[action.stage.index()];
    switch (action.kind) {
      case ActionKind::kForward:
        if (!await(state, cost.activation_channel, action)) return false;
        state.stash += cost.activation;
        state.peak_stash = std::max(state.peak_stash, state.stash);
        compute(rank, state, action, cost.forward);
        return true;
      case ActionKind::kInputGradient:
        if (!await(state, cost.gradient_channel, action)) return false;
        compute(rank, state, action, cost.input_gradient);
        return true;
      case ActionKind::kBackward:
        if (!await(state, cost.gradient_channel, action)) return false;
        compute(rank, state, action, cost.input_gradient + cost.weight_gradient);
        state.stash -= cost.activation;
        return true;
      case ActionKind::kWeightGradient:
        compute(rank, state, action, cost.weight_gradient);
        state.stash -= cost.activation;
        return true;
      case ActionKind::kSendActivation:
      case ActionKind::kSendGradient:
        send(rank, state, action);
        return true;
      case ActionKind::kReceiveActivation:
      case ActionKind::kReceiveGradient:
        receive(rank, state, action);
        return true;
    }
    return true;
  }

  // Moves the rank's clock to the arrival on the channel, if there is one; false if that is not
  // known yet.
  bool await(RankState& state, int channel, const Action& action) {
    if (channel == StepCosts::kNoChannel) return true;
    const std::size_t message = message_of(channel, action);
    const std::int64_t arrival = messages_[message].arrival;
    if (arrival == kUnknown) {
      state.awaited = message;
      return false;
    }
    state.clock = std::max(state.clock, arrival);
    return true;
  }

  void compute(std::size_t rank, RankState& state, const Action& action, std::int64_t duration) {
    const std::int64_t start = state.clock;
    state.clock += duration;
    state.busy += duration;
    if (record_) span(rank, action, start, state.clock);
  }

  void send(std::size_t rank, RankState& state, const Action& action) {
    const Action receive = peer(action);
    const std::size_t receiver = rank_of(receive);
    const int on = schedule::channel(action);
    RankState& other = ranks_[receiver];
    if (post(state, on, action)) complete(state, on, action, rank, receiver);
    if (other.awaited != message_of(on, action)) return;
    other.awaited = kNothing;
    ready_.push_back(receiver);
  }

  void receive(std::size_t rank, RankState& state, const Action& action) {
    const Action send = peer(action);
    const std::size_t sender = rank_of(send);
    const int on = schedule::channel(action);
    if (post(state, on, action)) complete(ranks_[sender], on, send, sender, rank);
  }

  // Posts one end at the rank's clock. True if it is the second: then the transfer starts.
  bool post(const RankState& state, int channel, const Action& action) {
    Message& message = messages_[message_of(channel, action)];
    const bool second = message.posted != kUnknown;
    message.posted = std::max(message.posted, state.clock);
    return second;
  }

  void complete(RankState& sender_state, int channel, const Action& send, std::size_t sender,
                std::size_t receiver) {
    Message& message = messages_[message_of(channel, send)];
    message.arrival = message.posted + costs_.transfer[static_cast<std::size_t>(channel)];
    sender_state.sends_end = std::max(sender_state.sends_end, message.arrival);
    if (!record_) return;
    span(sender, send, message.posted, message.arrival);
    span(receiver, peer(send), message.posted, message.arrival);
  }

  void span(std::size_t rank, const Action& action, std::int64_t start, std::int64_t end) {
    spans_[rank].push_back(
        {.action = action, .start = Nanoseconds{start}, .end = Nanoseconds{end}});
  }

  SimResult summary() {
    SimResult result;
    std::int64_t end = 0;
    std::int64_t update = 0;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      end = std::max({end, ranks_[r].clock, ranks_[r].sends_end});
      update = std::max(update, costs_.update[r]);
    }
    result.step_time = Nanoseconds{end + update};
    double idle = 0;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const Nanoseconds busy{ranks_[r].busy + costs_.update[r]};
      result.ranks.push_back({.busy = busy,
                              .idle = result.step_time - busy,
                              .peak_activation = Bytes{ranks_[r].peak_stash},
                              .peak_memory = Bytes{costs_.state[r] + ranks_[r].peak_stash}});
      idle += static_cast<double>(result.ranks.back().idle.count());
    }
    const double whole = static_cast<double>(result.step_time.count());
    if (whole > 0) result.bubble = idle / (whole * static_cast<double>(ranks_.size()));
    for (std::vector<TimedAction>& spans : spans_) {
      std::stable_sort(spans.begin(), spans.end(), [](const TimedAction& a, const TimedAction& b) {
        return a.start < b.start;
      });
    }
    result.timeline.ranks = std::move(spans_);
    return result;
  }

  const Schedule& schedule_;
  const StepCosts& costs_;
  const bool record_;
  const std::size_t micro_batches_;
  std::vector<Message> messages_;  // by channel, then micro-batch
  std::vector<RankState> ranks_;
  std::vector<std::size_t> ready_;
  std::vector<std::vector<TimedAction>> spans_;
};

}  // namespace

Expected<SimResult> simulate(const Schedule& lowered, std::span<const StageCost> stages,
                             const cost::Cluster& cluster, SimOptions options) {
  if (const auto fault = find_fault(lowered)) {
    return Error{ErrorCode::kBadInput, fault->message};
  }
  DYNMO_ASSIGN(const StepCosts costs, step_costs(lowered.shape, stages, cluster));
  return Replay(lowered, costs, options).run();
}

}  // namespace dynmo::sim
