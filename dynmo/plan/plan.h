// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rank of every layer, as a value. It has a contiguous cut of the layers into stages, the rank
// of each stage, the schedule kind, and the generation. A rank without a stage is idle, so packing
// is just another plan.

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::plan {

struct LayerRange {
  LayerId first;
  int count = 0;
  [[nodiscard]] int end() const { return first.value + count; }
  [[nodiscard]] bool contains(LayerId layer) const { return layer >= first && layer.value < end(); }
  friend bool operator==(const LayerRange&, const LayerRange&) = default;
};

struct PlanStage {
  Rank rank;
  LayerRange layers;
  friend bool operator==(const PlanStage&, const PlanStage&) = default;
};

struct Plan {
  int ranks = 0;
  std::vector<PlanStage> stages;  // contiguous, non-empty, in order of the layers
  schedule::ScheduleKind schedule = schedule::ScheduleKind::k1F1B;
  Generation generation = 0;
  // kAdaptive only: by rank, the compute actions of a step in order (F, and I and W or B). They are
  // for a fixed number of micro-batches. A frozen stage runs only its F. A stage that was frozen
  // when the order was made may train again. It runs its I and W at the end.
  std::vector<std::vector<schedule::Action>> order = {};

  [[nodiscard]] int layers() const { return stages.empty() ? 0 : stages.back().layers.end(); }
  [[nodiscard]] Rank owner(LayerId layer) const;  // requires layer < layers()
  [[nodiscard]] std::vector<int> stages_of(Rank rank) const;
  friend bool operator==(const Plan&, const Plan&) = default;
};

// Makes a plan with one stage a rank: stage i of counts[i] layers is on rank i. A count of 0 leaves
// the rank idle.
[[nodiscard]] Plan make_plan(const std::vector<int>& counts, schedule::ScheduleKind schedule,
                             Generation generation = 0);

// Makes a plan whose stage i of counts[i] layers is on placement[i], a rank below `ranks`. Stages
// without layers are omitted, and neighbours on one rank become one stage.
[[nodiscard]] Plan make_plan(const std::vector<int>& counts, const std::vector<Rank>& placement,
                             int ranks, schedule::ScheduleKind schedule, Generation generation = 0);

// Returns the plan with rank r renamed to name[r]. An adaptive order is moved with its rank.
// Requires a permutation of the ranks.
[[nodiscard]] Plan renamed(const Plan& plan, std::span<const Rank> name);

// Checks a plan. Returns kBadInput for gaps, overlaps, empty stages, a rank out of range, or layers
// that do not cover `layers`.
[[nodiscard]] Expected<void> validate(const Plan& plan, int layers);

// Returns the digest of the canonical text of all fields. Ranks compare it before they act.
[[nodiscard]] Digest digest(const Plan& plan);

// Returns the shape for a schedule generator. The first `frozen_layers` layers are the frozen
// prefix.
[[nodiscard]] schedule::PipelineShape shape_of(const Plan& plan, int micro_batches,
                                               int frozen_layers);

// Returns the compute actions of the plan: its order, or the schedule of its kind for its shape.
// Returns kBadInput as make_schedule() does, or if an order is for other micro-batches or stages.
[[nodiscard]] Expected<schedule::Schedule> schedule_of(const Plan& plan, int micro_batches,
                                                       int frozen_layers);

// Returns the layer counts of the stages, "5|4|4|5".
[[nodiscard]] std::string to_string(const Plan& plan);

// Returns the first and last layer of every stage, "embedding .. blocks.3.attention | blocks.3.mlp
// .. head". If there are more than 8 stages, it shows the first and the last four. Requires a name
// for every layer.
[[nodiscard]] std::string named_cut(const Plan& plan, std::span<const std::string> names);

// Returns "dynmo-plan-1" without values from costs, which plan_json (evaluate.h) adds.
[[nodiscard]] Json to_json(const Plan& plan);
// Parses the plan in a "dynmo-plan-1" document, and ignores its times and memory. An adaptive plan
// has an order for a fixed number of micro-batches. Returns kBadInput with file and JSON pointer,
// or the error of validate().
[[nodiscard]] Expected<Plan> parse_plan(const Json& json, std::string_view origin);
[[nodiscard]] Expected<Plan> read_plan(const std::filesystem::path& path);

}  // namespace dynmo::plan
