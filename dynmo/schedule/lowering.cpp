// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/lowering.h"

#include "dynmo/core/check.h"
#include "dynmo/schedule/text.h"

namespace dynmo::schedule {
namespace {

// The kinds of messages of each stage, stored because every action asks for them.
class Messages {
 public:
  explicit Messages(const PipelineShape& shape) : has_(shape.stages.size()) {
    for (std::size_t s = 0; s < has_.size(); ++s) {
      const StageId stage(static_cast<std::int32_t>(s));
      for (const ActionKind kind : {ActionKind::kSendActivation, ActionKind::kReceiveActivation,
                                    ActionKind::kSendGradient, ActionKind::kReceiveGradient}) {
        has_[s] |= exchanges(shape, kind, stage) ? 1U << static_cast<unsigned>(kind) : 0U;
      }
    }
  }

  void append_receive(std::vector<Action>& list, const Action& compute) const {
    append(list, compute, ActionKind::kReceiveActivation, ActionKind::kReceiveGradient);
  }
  void append_send(std::vector<Action>& list, const Action& compute) const {
    append(list, compute, ActionKind::kSendActivation, ActionKind::kSendGradient);
  }

 private:
  void append(std::vector<Action>& list, const Action& compute, ActionKind activation,
              ActionKind gradient) const {
    if (compute.kind == ActionKind::kWeightGradient) return;
    const ActionKind kind = compute.kind == ActionKind::kForward ? activation : gradient;
    if ((has_[compute.stage.index()] >> static_cast<unsigned>(kind) & 1U) == 0) return;
    list.push_back({.kind = kind, .stage = compute.stage, .micro_batch = compute.micro_batch});
  }

  std::vector<unsigned> has_;  // by stage, a bit for each kind
};

std::vector<Action> lower_rank(const Messages& messages, const std::vector<Action>& compute) {
  std::vector<Action> lowered;
  lowered.reserve(3 * compute.size());
  if (!compute.empty()) messages.append_receive(lowered, compute.front());
  for (std::size_t i = 0; i < compute.size(); ++i) {
    DYNMO_CHECK(is_compute(compute[i].kind), "a compute-only schedule, got {}",
                to_string(compute[i]));
    if (i + 1 < compute.size()) messages.append_receive(lowered, compute[i + 1]);
    lowered.push_back(compute[i]);
    messages.append_send(lowered, compute[i]);
  }
  return lowered;
}

std::optional<Action> message(const PipelineShape& shape, ActionKind kind, const Action& compute) {
  if (!exchanges(shape, kind, compute.stage)) return std::nullopt;
  return Action{.kind = kind, .stage = compute.stage, .micro_batch = compute.micro_batch};
}

}  // namespace

Schedule lower(const Schedule& compute) {
  DYNMO_CHECK(!compute.lowered, "a compute-only schedule, got a lowered one");
  Schedule lowered{.shape = compute.shape, .ranks = {}, .lowered = true};
  const Messages messages(compute.shape);
  for (const std::vector<Action>& list : compute.ranks) {
    lowered.ranks.push_back(lower_rank(messages, list));
  }
  return lowered;
}

int channel(const Action& communication) {
  const int stage = communication.stage.value;
  switch (communication.kind) {
    case ActionKind::kSendActivation:
      return 2 * stage;
    case ActionKind::kReceiveActivation:
      return 2 * (stage - 1);
    case ActionKind::kSendGradient:
      return 2 * (stage - 1) + 1;
    case ActionKind::kReceiveGradient:
      return 2 * stage + 1;
    default:
      break;
  }
  DYNMO_CHECK(false, "a send or receive, got {}", to_string(communication));
  return -1;
}

int channel_count(const PipelineShape& shape) {
  return shape.stages.empty() ? 0 : 2 * (static_cast<int>(shape.stages.size()) - 1);
}

Action peer(const Action& communication) {
  Action other = communication;
  switch (communication.kind) {
    case ActionKind::kSendActivation:
      other.kind = ActionKind::kReceiveActivation;
      ++other.stage.value;
      return other;
    case ActionKind::kReceiveActivation:
      other.kind = ActionKind::kSendActivation;
      --other.stage.value;
      return other;
    case ActionKind::kSendGradient:
      other.kind = ActionKind::kReceiveGradient;
      --other.stage.value;
      return other;
    case ActionKind::kReceiveGradient:
      other.kind = ActionKind::kSendGradient;
      ++other.stage.value;
      return other;
    default:
      break;
  }
  DYNMO_CHECK(false, "a send or receive, got {}", to_string(communication));
  return other;
}

bool exchanges(const PipelineShape& shape, ActionKind communication, StageId stage) {
  if (is_compute(communication)) return false;
  const StageId other =
      peer({.kind = communication, .stage = stage, .micro_batch = MicroBatchId{0}}).stage;
  if (other.value < 0 || other.index() >= shape.stages.size()) return false;
  const StageShape& here = shape.stages[stage.index()];
  const StageShape& there = shape.stages[other.index()];
  const bool gradient =
      communication == ActionKind::kSendGradient || communication == ActionKind::kReceiveGradient;
  return here.rank != there.rank && !(gradient && (here.frozen || there.frozen));
}

std::optional<Action> receive_for(const PipelineShape& shape, const Action& compute) {
  switch (compute.kind) {
    case ActionKind::kForward:
      return message(shape, ActionKind::kReceiveActivation, compute);
    case ActionKind::kBackward:
    case ActionKind::kInputGradient:
      return message(shape, ActionKind::kReceiveGradient, compute);
    default:
      return std::nullopt;
  }
}

std::optional<Action> send_of(const PipelineShape& shape, const Action& compute) {
  switch (compute.kind) {
    case ActionKind::kForward:
      return message(shape, ActionKind::kSendActivation, compute);
    case ActionKind::kBackward:
    case ActionKind::kInputGradient:
      return message(shape, ActionKind::kSendGradient, compute);
    default:
      return std::nullopt;
  }
}

}  // namespace dynmo::schedule
