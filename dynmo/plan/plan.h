// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where every layer runs, as a value: a contiguous cut of the layers into stages, the rank of each
// stage, the schedule kind, and the generation. A rank without a stage is idle, so packing is just
// another plan.

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
  // kAdaptive only: by rank, the compute actions of a step in order (F, and I and W or B), for the
  // number of micro-batches it was made for. A frozen stage runs its F and nothing else of it; one
  // that was frozen when the order was made and trains again runs its I and W at the end.
  std::vector<std::vector<schedule::Action>> order = {};

  [[nodiscard]] int layers() const { return stages.empty() ? 0 : stages.back().layers.end(); }
  [[nodiscard]] Rank owner(LayerId layer) const;  // requires layer < layers()
  [[nodiscard]] std::vector<int> stages_of(Rank rank) const;
  friend bool operator==(const Plan&, const Plan&) = default;
};

// One stage a rank, stage i of counts[i] layers on rank i; a count of 0 leaves the rank idle.
[[nodiscard]] Plan make_plan(const std::vector<int>& counts, schedule::ScheduleKind schedule,
                             Generation generation = 0);

// Stage i of counts[i] layers on placement[i], a rank below `ranks`. Stages of no layers are left
// out, and neighbours on one rank become one stage.
[[nodiscard]] Plan make_plan(const std::vector<int>& counts, const std::vector<Rank>& placement,
                             int ranks, schedule::ScheduleKind schedule, Generation generation = 0);

// The plan with rank r called name[r]; an adaptive order goes with its rank. Requires a permutation
// of the ranks.
[[nodiscard]] Plan renamed(const Plan& plan, std::span<const Rank> name);

// kBadInput: gaps, overlaps, empty stages, a rank out of range, not all of `layers` covered.
[[nodiscard]] Expected<void> validate(const Plan& plan, int layers);

// The digest of the canonical text of all fields; ranks compare it before they act.
[[nodiscard]] Digest digest(const Plan& plan);

// The shape a schedule generator wants; the first `frozen_layers` layers are the frozen prefix.
[[nodiscard]] schedule::PipelineShape shape_of(const Plan& plan, int micro_batches,
                                               int frozen_layers);

// The compute actions that the plan runs: its order, or what its schedule kind makes of its shape.
// kBadInput as make_schedule says, or where an order is for other micro-batches or other stages.
[[nodiscard]] Expected<schedule::Schedule> schedule_of(const Plan& plan, int micro_batches,
                                                       int frozen_layers);

// Layer counts a stage, "5|4|4|5".
[[nodiscard]] std::string to_string(const Plan& plan);

// The first and last layer of every stage, "embedding .. blocks.3.attention | blocks.3.mlp ..
// head"; of more than 8 stages the first and the last four. Requires a name for every layer.
[[nodiscard]] std::string named_cut(const Plan& plan, std::span<const std::string> names);

// "dynmo-plan-1" without what follows from costs, which plan_json (evaluate.h) adds.
[[nodiscard]] Json to_json(const Plan& plan);
// The plan in such a document (of plan_json, too): what it says of times and
// memory is passed over. An adaptive plan has its order, for as many micro-batches as
// it was made for. kBadInput with file and JSON pointer, or with what `validate` says.
[[nodiscard]] Expected<Plan> parse_plan(const Json& json, std::string_view origin);
[[nodiscard]] Expected<Plan> read_plan(const std::filesystem::path& path);

}  // namespace dynmo::plan
