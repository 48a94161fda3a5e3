// SPDX-License-Identifier: Apache-2.0
#include "dynmo/sim/step_timer.h"

#include <algorithm>
#include <utility>

#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/step_costs_impl.h"

namespace dynmo::sim {
namespace {

using schedule::Action;
using schedule::ActionKind;

constexpr std::uint32_t kNotYet = ~std::uint32_t{0};

// The actions at whose ends a message is sent and its receive posted.
struct MessageEnds {
  std::uint32_t sent = kNotYet;
  std::uint32_t posted = kNotYet;
  std::size_t waiting = kNotYet;  // rank that is blocked until both are known
};

// Visits the actions in an order in which every message is known before the action that awaits it.
// A rank runs until it needs an unknown message, and again once it is known.
class Sorter {
 public:
  explicit Sorter(const schedule::Schedule& schedule)
      : schedule_(schedule),
        micro_batches_(static_cast<std::size_t>(schedule.shape.micro_batches)),
        messages_(static_cast<std::size_t>(channel_count(schedule.shape)) * micro_batches_),
        next_(schedule.ranks.size(), 0),
        last_(schedule.ranks.size(), 0) {}

  // Calls visit(rank, action, number of the action before on the rank, message or null, its
  // channel) for every compute action. visit returns the action's number. Returns false if ranks
  // wait for each other.
  template <typename Visit>
  [[nodiscard]] bool run(Visit visit) {
    for (std::size_t r = next_.size(); r-- > 0;) ready_.push_back(r);
    while (!ready_.empty()) {
      const std::size_t rank = ready_.back();
      ready_.pop_back();
      while (next_[rank] < schedule_.ranks[rank].size() && step(rank, visit)) ++next_[rank];
    }
    for (std::size_t r = 0; r < next_.size(); ++r) {
      if (next_[r] < schedule_.ranks[r].size()) return false;
    }
    return true;
  }

 private:
  [[nodiscard]] MessageEnds& message(const Action& communication) {
    return messages_[static_cast<std::size_t>(schedule::channel(communication)) * micro_batches_ +
                     communication.micro_batch.index()];
  }

  template <typename Visit>
  bool step(std::size_t rank, Visit& visit) {
    const Action& action = schedule_.ranks[rank][next_[rank]];
    if (!is_compute(action.kind)) {
      MessageEnds& ends = message(action);
      const bool sends =
          action.kind == ActionKind::kSendActivation || action.kind == ActionKind::kSendGradient;
      (sends ? ends.sent : ends.posted) = last_[rank];
      if (ends.sent != kNotYet && ends.posted != kNotYet && ends.waiting != kNotYet) {
        ready_.push_back(std::exchange(ends.waiting, kNotYet));
      }
      return true;
    }
    const auto receive = schedule::receive_for(schedule_.shape, action);
    if (!receive) {
      last_[rank] = visit(rank, action, last_[rank], nullptr, 0);
      return true;
    }
    MessageEnds& ends = message(*receive);
    if (ends.sent == kNotYet || ends.posted == kNotYet) {
      ends.waiting = rank;
      return false;
    }
    last_[rank] = visit(rank, action, last_[rank], &ends, schedule::channel(*receive));
    return true;
  }

  const schedule::Schedule& schedule_;
  std::size_t micro_batches_;
  std::vector<MessageEnds> messages_;  // by channel, then micro-batch
  std::vector<std::size_t> next_;      // by rank: position in its list
  std::vector<std::uint32_t> last_;    // by rank: its last compute action
  std::vector<std::size_t> ready_;
};

}  // namespace

Expected<StepTimer> StepTimer::make(schedule::Schedule lowered) {
  DYNMO_ASSIGN(CheckedSchedule checked, CheckedSchedule::make(std::move(lowered)));
  StepTimer timer(std::move(checked));
  if (!timer.sort()) {
    return Error{ErrorCode::kBadInput, find_fault(timer.schedule()).value().message};
  }
  return timer;
}

bool StepTimer::sort() {
  const schedule::PipelineShape& shape = schedule().shape;
  const auto no_channel = static_cast<std::uint32_t>(channel_count(shape));
  Sorter sorter(schedule());
  return sorter.run([&](std::size_t rank, const Action& action, std::uint32_t before,
                        const MessageEnds* message, int channel) {
    const auto stage = static_cast<std::uint32_t>(action.stage.index());
    Compute compute{.before = before,
                    .channel = no_channel,
                    .duration = static_cast<std::uint32_t>(stage * kDurations +
                                                           static_cast<std::size_t>(action.kind))};
    if (message != nullptr) {
      compute.sent = message->sent;
      compute.posted = message->posted;
      compute.channel = static_cast<std::uint32_t>(channel);
    }
    actions_.push_back(compute);
    const auto number = static_cast<std::uint32_t>(actions_.size());
    const bool ends_stash =
        action.kind == ActionKind::kWeightGradient || action.kind == ActionKind::kBackward;
    if (ends_stash && action.micro_batch.value + 1 == shape.micro_batches) {
      reductions_.push_back({number, static_cast<std::uint32_t>(rank), stage});
    }
    return number;
  });
}

Expected<Nanoseconds> StepTimer::step_time(std::span<const StageCost> stages,
                                           const cost::Cluster& cluster) {
  static_assert(static_cast<std::size_t>(ActionKind::kForward) == 0 &&
                static_cast<std::size_t>(ActionKind::kWeightGradient) + 1 == kDurations);
  DYNMO_ASSIGN(const StepCosts costs, step_costs(schedule().shape, stages, cluster));
  transfers_.clear();
  for (const StepCosts::Channel& channel : costs.channels) {
    if (channel.queues) {
      DYNMO_ASSIGN(const SimResult result, simulate(checked_, stages, cluster));
      return result.step_time;
    }
    transfers_.push_back(channel.transfer);
  }
  transfers_.push_back(0);
  durations_.clear();
  for (const StepCosts::Stage& stage : costs.stages) {
    durations_.insert(
        durations_.end(),
        {costs.action + stage.forward, costs.action + stage.input_gradient + stage.weight_gradient,
         costs.action + stage.input_gradient, costs.action + stage.weight_gradient});
  }
  ends_.resize(actions_.size() + 1);
  ends_[0] = 0;
  std::int64_t last = 0;  // a message arrives before the end of the action that awaits it
  for (std::size_t i = 0; i < actions_.size(); ++i) {
    const Compute& action = actions_[i];
    const std::int64_t arrival =
        std::max(ends_[action.sent], ends_[action.posted]) + transfers_[action.channel];
    const std::int64_t end = std::max(ends_[action.before], arrival) + durations_[action.duration];
    ends_[i + 1] = end;
    last = std::max(last, end);
  }
  std::vector<std::int64_t> reduced(schedule().ranks.size(), 0);
  for (const Reduction& reduction : reductions_) {
    std::int64_t& end = reduced[reduction.rank];
    end = std::max(end, ends_[reduction.after]) + costs.stages[reduction.stage].reduction;
    last = std::max(last, end);
  }
  return Nanoseconds{last + *std::max_element(costs.update.begin(), costs.update.end())};
}

}  // namespace dynmo::sim
