// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <functional>
#include <queue>
#include <utility>

#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/replay_impl.h"

namespace dynmo::sim {
namespace {

using schedule::Action;
using schedule::ActionKind;
using schedule::Schedule;
using schedule::TimedAction;

constexpr std::int64_t kUnknown = -1;
constexpr std::size_t kNothing = ~std::size_t{0};
constexpr std::size_t kKinds = static_cast<std::size_t>(ActionKind::kReceiveGradient) + 1;

// The times of one message's two ends. Small, because a replay processes millions of them.
class Message {
 public:
  std::int64_t free_arrival = 0;  // time of its send if messages were free and immediate

  [[nodiscard]] bool has_arrived() const { return time_ >= 0; }
  [[nodiscard]] bool is_posted() const { return time_ < kUnknown; }
  [[nodiscard]] std::int64_t arrival() const { return time_; }
  // Returns the latest time at which an end was posted. Valid until the message arrives.
  [[nodiscard]] std::int64_t posted() const { return kUnknown - 1 - time_; }
  void post(std::int64_t time) {
    time_ = kUnknown - 1 - (is_posted() ? std::max(posted(), time) : time);
  }
  void arrive(std::int64_t time) { time_ = time; }

 private:
  std::int64_t time_ = kUnknown;  // of the arrival; before it, encodes posted()
};

// Returns an odd number of cache lines for a channel. Ranks process the micro-batches together, so
// the messages of one then use different sets of the cache.
std::size_t padded(std::size_t micro_batches) {
  constexpr std::size_t kInALine = 64 / sizeof(Message);
  return ((micro_batches / kInALine + 1) | 1) * kInALine;
}

struct RankState {
  std::size_t next = 0;            // first action not replayed
  std::size_t awaited = kNothing;  // message that blocks it
  std::int64_t clock = 0;          // end of its last compute action
  std::int64_t free_clock = 0;     // the same if messages were free and immediate
  std::int64_t sends_end = 0;      // latest arrival of its sends
  std::int64_t reductions_end = 0;
  std::int64_t busy = 0;
  std::int64_t stash = 0;
  std::int64_t peak_stash = 0;
};

// The time from which each network card is free.
struct NodeState {
  std::int64_t egress_free = 0;
  std::int64_t ingress_free = 0;
};

// Returns the send of a channel and micro-batch, the inverse of schedule::channel().
Action send_on(std::size_t channel, std::size_t micro_batch) {
  const bool gradient = channel % 2 == 1;
  return {.kind = gradient ? ActionKind::kSendGradient : ActionKind::kSendActivation,
          .stage = StageId(static_cast<std::int32_t>(channel / 2 + (gradient ? 1 : 0))),
          .micro_batch = MicroBatchId(static_cast<std::int32_t>(micro_batch))};
}

// Runs each rank until it needs a message that has not arrived, and again when it has. A message
// that does not queue has an arrival once both ends are posted. All times are then maxima and sums
// of earlier ones, so the order in which ranks run does not matter.
//
// Messages that queue for network cards are ordered by the time at which both ends were posted
// (then channel, then micro-batch). They wait until no rank can run. Then the earliest starts. No
// later message can precede it: the rank that posts it waits for a queued message, which arrives
// after the earliest one has started.
class Replay {
 public:
  Replay(const Schedule& schedule, const StepCosts& costs, const SimOptions& options)
      : schedule_(schedule),
        costs_(costs),
        records_{.spans = options.timeline, .memory = options.memory},
        micro_batches_(static_cast<std::size_t>(schedule.shape.micro_batches)),
        messages_a_channel_(padded(micro_batches_)),
        messages_(costs.channels.size() * messages_a_channel_),
        ranks_(schedule.ranks.size()),
        nodes_(costs.nodes),
        channels_(costs.stages.size()) {
    for (std::size_t s = 0; s < channels_.size(); ++s) {
      for (std::size_t kind = 0; kind < kKinds; ++kind) {
        const Action action{.kind = static_cast<ActionKind>(kind),
                            .stage = StageId(static_cast<std::int32_t>(s)),
                            .micro_batch = MicroBatchId{0}};
        if (!is_compute(action.kind)) channels_[s][kind] = schedule::channel(action);
      }
    }
    result_.timeline.ranks.resize(records_.spans ? ranks_.size() : 0);
    result_.memory.resize(records_.memory ? ranks_.size() : 0);
    for (std::size_t r = 0; r < result_.memory.size(); ++r) record_memory(r, 0, 0);
  }

  ReplayResult run() {
    for (std::size_t r = ranks_.size(); r-- > 0;) ready_.push_back(r);
    for (run_ready(); !queue_.empty(); run_ready()) {
      const std::size_t message = queue_.top().second;
      queue_.pop();
      take_turn(message);
    }
    for (const RankState& rank : ranks_) {
      result_.is_stuck |= rank.awaited != kNothing;
      result_.ranks.push_back({.end = std::max({rank.clock, rank.sends_end, rank.reductions_end}),
                               .free_end = rank.free_clock,
                               .busy = rank.busy,
                               .peak_stash = rank.peak_stash});
    }
    for (std::vector<TimedAction>& spans : result_.timeline.ranks) {
      std::stable_sort(spans.begin(), spans.end(), [](const TimedAction& a, const TimedAction& b) {
        return a.start < b.start;
      });
    }
    return std::move(result_);
  }

 private:
  [[nodiscard]] std::size_t message_of(int channel, const Action& action) const {
    return static_cast<std::size_t>(channel) * messages_a_channel_ + action.micro_batch.index();
  }

  [[nodiscard]] int channel_of(const Action& communication) const {
    return channels_[communication.stage.index()][static_cast<std::size_t>(communication.kind)];
  }

  void run_ready() {
    while (!ready_.empty()) {
      const std::size_t rank = ready_.back();
      ready_.pop_back();
      run_rank(rank);
    }
  }

  void run_rank(std::size_t rank) {
    RankState& state = ranks_[rank];
    const std::vector<Action>& list = schedule_.ranks[rank];
    for (; state.next < list.size(); ++state.next) {
      if (!run_action(rank, state, list[state.next])) return;
    }
  }

  // Runs an action. Returns false if it must wait for a message that has not arrived.
  bool run_action(std::size_t rank, RankState& state, const Action& action) {
    const StepCosts::Stage& cost = costs_.stages[action.stage.index()];
    switch (action.kind) {
      case ActionKind::kForward:
        if (!await(state, cost.activation_channel, action)) return false;
        add_stash(rank, state, cost.activation);
        compute(rank, state, action, cost.forward);
        return true;
      case ActionKind::kInputGradient:
        if (!await(state, cost.gradient_channel, action)) return false;
        compute(rank, state, action, cost.input_gradient);
        return true;
      case ActionKind::kBackward:
        if (!await(state, cost.gradient_channel, action)) return false;
        compute(rank, state, action, cost.input_gradient + cost.weight_gradient);
        end_weight_gradient(rank, state, action, cost);
        return true;
      case ActionKind::kWeightGradient:
        compute(rank, state, action, cost.weight_gradient);
        end_weight_gradient(rank, state, action, cost);
        return true;
      case ActionKind::kSendActivation:
      case ActionKind::kSendGradient:
        send(state, action);
        return true;
      case ActionKind::kReceiveActivation:
      case ActionKind::kReceiveGradient:
        post(state, message_of(channel_of(action), action));
        return true;
    }
    return true;
  }

  // Advances the rank's clock to the arrival on the channel, if there is one. Returns false if the
  // arrival is not known yet.
  bool await(RankState& state, int channel, const Action& action) {
    if (channel == StepCosts::kNoChannel) return true;
    const std::size_t index = message_of(channel, action);
    const Message& message = messages_[index];
    if (!message.has_arrived()) {
      state.awaited = index;
      return false;
    }
    state.clock = std::max(state.clock, message.arrival());
    state.free_clock = std::max(state.free_clock, message.free_arrival);
    return true;
  }

  void compute(std::size_t rank, RankState& state, const Action& action, std::int64_t duration) {
    const std::int64_t start = state.clock + costs_.action;
    state.clock = start + duration;
    state.free_clock += costs_.action + duration;
    state.busy += duration;
    if (records_.spans) record_span(rank, action, start, state.clock);
  }

  void add_stash(std::size_t rank, RankState& state, std::int64_t bytes) {
    state.stash += bytes;
    state.peak_stash = std::max(state.peak_stash, state.stash);
    if (records_.memory && bytes != 0) record_memory(rank, state.clock, state.stash);
  }

  void end_weight_gradient(std::size_t rank, RankState& state, const Action& action,
                           const StepCosts::Stage& cost) {
    add_stash(rank, state, -cost.activation);
    // Weight gradients of a stage run in micro-batch order, so this is its last.
    if (action.micro_batch.index() + 1 != micro_batches_) return;
    state.reductions_end = std::max(state.reductions_end, state.clock) + cost.reduction;
  }

  void send(RankState& state, const Action& action) {
    const std::size_t message = message_of(channel_of(action), action);
    messages_[message].free_arrival = state.free_clock;
    post(state, message);
  }

  // Posts one end of a message at the rank's clock. The second end starts the transfer.
  void post(const RankState& state, std::size_t index) {
    Message& message = messages_[index];
    const bool second = message.is_posted();
    message.post(state.clock);
    if (!second) return;
    const StepCosts::Channel& channel = costs_.channels[index / messages_a_channel_];
    if (channel.queues) {
      queue_.emplace(message.posted(), index);
    } else {
      arrive(index, channel, message.posted() + channel.transfer);
    }
  }

  void take_turn(std::size_t index) {
    const StepCosts::Channel& channel = costs_.channels[index / messages_a_channel_];
    NodeState& from = nodes_[channel.egress];
    NodeState& to = nodes_[channel.ingress];
    const std::int64_t start =
        std::max({messages_[index].posted(), from.egress_free, to.ingress_free});
    from.egress_free = to.ingress_free = start + channel.occupancy;
    arrive(index, channel, start + channel.transfer);
  }

  void arrive(std::size_t index, const StepCosts::Channel& channel, std::int64_t time) {
    const std::int64_t posted = messages_[index].posted();
    messages_[index].arrive(time);
    RankState& sender = ranks_[channel.sender];
    RankState& receiver = ranks_[channel.receiver];
    sender.sends_end = std::max(sender.sends_end, time);
    if (records_.spans) record_message(index, channel, posted);
    if (receiver.awaited != index) return;
    receiver.awaited = kNothing;
    ready_.push_back(channel.receiver);
  }

  void record_message(std::size_t index, const StepCosts::Channel& channel, std::int64_t posted) {
    const std::int64_t arrival = messages_[index].arrival();
    const Action send = send_on(index / messages_a_channel_, index % messages_a_channel_);
    record_span(channel.sender, send, posted, arrival);
    record_span(channel.receiver, peer(send), posted, arrival);
  }

  void record_span(std::size_t rank, const Action& action, std::int64_t start, std::int64_t end) {
    result_.timeline.ranks[rank].push_back(
        {.action = action, .start = Nanoseconds{start}, .end = Nanoseconds{end}});
  }

  void record_memory(std::size_t rank, std::int64_t time, std::int64_t stash) {
    result_.memory[rank].push_back(
        {.time = Nanoseconds{time}, .bytes = Bytes{costs_.state[rank] + stash}});
  }

  struct Records {
    bool spans = false;
    bool memory = false;
  };

  const Schedule& schedule_;
  const StepCosts& costs_;
  const Records records_;
  const std::size_t micro_batches_;
  const std::size_t messages_a_channel_;
  std::vector<Message> messages_;  // by channel, then micro-batch, some of none behind
  std::vector<RankState> ranks_;
  std::vector<NodeState> nodes_;
  // Channels of a stage's sends and receives, by kind, stored because every action asks for them.
  std::vector<std::array<int, kKinds>> channels_;
  std::vector<std::size_t> ready_;
  // Messages whose ends are posted and that have not started: (posted, message), the earliest on
  // top. Message numbers are in the order of channels, then micro-batches.
  using Queued = std::pair<std::int64_t, std::size_t>;
  std::priority_queue<Queued, std::vector<Queued>, std::greater<>> queue_;
  ReplayResult result_;
};

}  // namespace

ReplayResult replay(const Schedule& schedule, const StepCosts& costs, const SimOptions& options) {
  return Replay(schedule, costs, options).run();
}

}  // namespace dynmo::sim
