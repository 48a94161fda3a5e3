// SPDX-License-Identifier: Apache-2.0
#pragma once

// The schedule of one step as a value: one ordered list of actions a rank. The simulator and the
// engine interpret the same Schedule; neither knows 1F1B.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"

namespace dynmo::schedule {

enum class ActionKind : std::uint8_t {
  kForward,            // F
  kBackward,           // B = I + W in one
  kInputGradient,      // I
  kWeightGradient,     // W
  kSendActivation,     // SEND_F: this stage's output to the next stage
  kReceiveActivation,  // RECV_F: this stage's input from the stage before
  kSendGradient,       // SEND_B: gradient of this stage's input to the stage before
  kReceiveGradient,    // RECV_B: gradient of this stage's output from the next stage
};
[[nodiscard]] bool is_compute(ActionKind kind);

struct Action {
  ActionKind kind = ActionKind::kForward;
  StageId stage;  // the stage of the rank that runs the action, also for sends and receives
  MicroBatchId micro_batch;
  friend auto operator<=>(const Action&, const Action&) = default;
};

struct StageShape {
  Rank rank;
  // Wholly inside the frozen prefix: forward only, nothing stashed, no gradient arrives or leaves.
  // The frozen stages are the first ones.
  bool frozen = false;
  friend bool operator==(const StageShape&, const StageShape&) = default;
};

// A generator takes its input from this struct. Stages are numbered along the model; a rank may
// hold none (idle) or several.
struct PipelineShape {
  int ranks = 0;
  int micro_batches = 0;
  std::vector<StageShape> stages;
  friend bool operator==(const PipelineShape&, const PipelineShape&) = default;
};

// More (stage, micro-batch) pairs than a step can have: positions in a rank's list stay an int.
inline constexpr std::size_t kMaxStageMicroBatches = std::size_t{1} << 27;

// kBadInput: no ranks, stages or micro-batches, a stage on no rank, a frozen stage behind a trained
// one, more than kMaxStageMicroBatches.
[[nodiscard]] Expected<void> validate(const PipelineShape& shape);

struct Schedule {
  PipelineShape shape;
  std::vector<std::vector<Action>> ranks;  // actions in order, by rank
  bool lowered = false;                    // sends and receives inserted (lowering.h)
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

enum class ScheduleKind {
  kGpipe,
  k1F1B,
  kInterleaved,
  kZbH1,
  kZbV,
  kAdaptive,  // an order made from actual costs: a plan carries it, no shape alone gives it
};

// Where a kind wants its stages.
enum class StageLayout {
  kOneARank,
  kLoop,  // several times around the ranks
  kV,     // there and back: ranks r and 2P - 1 - r
  kAny,   // wherever the plan has them
};
struct KindTraits {
  ScheduleKind kind;
  std::string_view name;
  StageLayout layout;
};
// Every kind, in the order in which planners try them: of equal plans the first stays.
[[nodiscard]] std::span<const KindTraits> schedule_kinds();
[[nodiscard]] const KindTraits& traits(ScheduleKind kind);

// "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "adaptive".
[[nodiscard]] std::string_view name(ScheduleKind kind);
[[nodiscard]] Expected<ScheduleKind> parse_schedule_kind(std::string_view name);

}  // namespace dynmo::schedule
