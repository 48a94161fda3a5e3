// SPDX-License-Identifier: Apache-2.0
#pragma once

// The schedule of one step as a value: one ordered list of actions for each rank. The simulator and
// the engine interpret the same Schedule. Neither knows 1F1B.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/units.h"

namespace dynmo::schedule {

enum class ActionKind : std::uint8_t {
  kForward,            // F
  kBackward,           // B = I + W in one
  kInputGradient,      // I
  kWeightGradient,     // W
  kSendActivation,     // SEND_F: this stage's output to the next stage
  kReceiveActivation,  // RECV_F: this stage's input from the previous stage
  kSendGradient,       // SEND_B: gradient of this stage's input to the previous stage
  kReceiveGradient,    // RECV_B: gradient of this stage's output from the next stage
};
[[nodiscard]] bool is_compute(ActionKind kind);

struct Action {
  ActionKind kind = ActionKind::kForward;
  StageId stage;  // stage of the acting rank, also for sends and receives
  MicroBatchId micro_batch;
  friend auto operator<=>(const Action&, const Action&) = default;
};

struct StageShape {
  Rank rank;
  // Set if the stage is entirely inside the frozen prefix. It runs forward only, stashes nothing,
  // and exchanges no gradients. The frozen stages are the first ones.
  bool frozen = false;
  friend bool operator==(const StageShape&, const StageShape&) = default;
};

// The input of a generator. Stages are numbered along the model. A rank may hold none (idle) or
// several.
struct PipelineShape {
  int ranks = 0;
  int micro_batches = 0;
  std::vector<StageShape> stages;
  friend bool operator==(const PipelineShape&, const PipelineShape&) = default;
};

// Limit of (stage, micro-batch) pairs. Below it, positions in a rank's list fit an int.
inline constexpr std::size_t kMaxStageMicroBatches = std::size_t{1} << 27;

// Returns kBadInput if there are no ranks, stages or micro-batches. Also returns it if a stage is
// on no rank, a frozen stage follows a trained one, or there are more than kMaxStageMicroBatches
// pairs.
[[nodiscard]] Expected<void> validate(const PipelineShape& shape);

struct Schedule {
  PipelineShape shape;
  std::vector<std::vector<Action>> ranks;  // actions in order, by rank
  bool lowered = false;                    // has sends and receives (lowering.h)
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

enum class ScheduleKind {
  kGpipe,
  k1F1B,
  kInterleaved,
  kZbH1,
  kZbV,
  // An order made from actual costs. A plan carries it, because it does not follow from a shape
  // alone.
  kAdaptive,
};

// The placement of stages that a kind needs.
enum class StageLayout {
  kOneARank,
  kLoop,  // several times around the ranks
  kV,     // forth and back: ranks r and 2P - 1 - r
  kAny,   // any placement of the plan
};
struct KindTraits {
  ScheduleKind kind;
  std::string_view name;
  StageLayout layout;
};
// Returns every kind, in the order in which planners try them. The first of equal plans is kept.
[[nodiscard]] std::span<const KindTraits> schedule_kinds();
[[nodiscard]] const KindTraits& traits(ScheduleKind kind);

// Returns "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v" or "adaptive".
[[nodiscard]] std::string_view name(ScheduleKind kind);
[[nodiscard]] Expected<ScheduleKind> parse_schedule_kind(std::string_view name);

// The times at which the actions of one step ran. Engine and simulator write the same value, so one
// can be laid over the other.
struct TimedAction {
  Action action;
  Nanoseconds start{0};  // since the start of the step
  Nanoseconds end{0};
};
struct Timeline {
  // Actions by rank, in order of start. Communication is there if its times are known.
  std::vector<std::vector<TimedAction>> ranks;
};

}  // namespace dynmo::schedule
