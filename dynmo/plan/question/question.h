// SPDX-License-Identifier: Apache-2.0
#pragma once

// A question for a plan with all data that the answer depends on, and the answer as a document.
// `dynmo plan` and the Python package ask the same questions, so both give the same answer.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/core/traffic.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/device.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/parallelism.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/propose.h"
#include "dynmo/plan/question/advice.h"
#include "dynmo/plan/question/emit.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/plan/traffic.h"

namespace dynmo::plan {

struct Question {
  cost::ModelCost model;
  cost::Cluster cluster;               // its memory excludes the head-room
  double head_room = 0;                // share of every rank's memory that stays free
  std::string links;                   // source of the cluster's links; empty: from the user
  std::string costs;                   // source of the layers' costs; empty: a profile
  std::string device;                  // device of the formulas; empty: measured
  double tokens = 0;                   // of a micro-batch; 0: not known
  cost::Parallelism parallelism = {};  // of formulas
  cost::DecoderShape shape = {};       // of formulas; 0: not known
  int micro_batches = 32;
  Balancer balancer = Balancer::kSearch;
  std::optional<schedule::ScheduleKind> schedule;  // none: the best of all
  int stages_per_rank = 2;                         // of interleaved
  Recompute recompute = Recompute::kNone;
  std::optional<Plan> from;  // the plan in force
  bool pack = false;         // onto the fewest ranks that `slack` allows
  double slack = 0;
  bool place = false;  // ranks may take any position, so that the step is shortest
  std::int64_t evaluations = ProposeOptions{}.evaluations;
  // The slices of a shape's head, and the function for costs with other slices. A profile's head is
  // divided evenly.
  std::int64_t head_slices = 1;
  std::function<Expected<cost::ModelCost>(std::int64_t slices)> sliced = {};
  // The costs of micro-batches that are `times` as large. Absent if costs were measured.
  std::function<Expected<cost::ModelCost>(std::int64_t times)> sized = {};
  std::int64_t micro_batch_size = 1;            // sequences
  std::string size_key = "--micro-batch-size";  // that sets it
  std::string ranks_key = "--ranks";            // that sets their number
  std::string memory_key = "--memory";          // that sets a rank's memory
  std::string room_keys;                        // that make layers smaller; empty: none
  std::optional<EmitForm> form;                 // only plans that it can express
  bool whole_blocks = false;                    // set_granularity() has joined the layers
  // Costs with the slices of the head if blocks are joined, for the cost of joining the slices.
  std::optional<cost::ModelCost> with_slices;
};

// Sets the costs of a shape by formulas, at the utilization of `device`. Layers are recomputed if
// memory requires it (kAuto). Returns the errors of transformer_costs() and parallel_costs(), and
// kBadInput if the devices of a rank cannot have the same number of attention heads.
[[nodiscard]] Expected<void> set_shape(Question& question, const cost::TransformerShape& shape,
                                       const cost::Device& device,
                                       const cost::Parallelism& parallelism = {});
// Like set_shape(), for layers counted by the caller, in micro-batches of `tokens`.
[[nodiscard]] Expected<void> set_work(Question& question, const std::vector<cost::LayerWork>& work,
                                      double tokens, const cost::Device& device,
                                      const cost::Parallelism& parallelism = {});

// The share of a device's memory that stays free by default. Libraries, buffers and fragmentation
// need it, and formulas and presets do not include them.
inline constexpr double kDeviceHeadRoom = 0.1;

// Sets equal ranks. Without `memory`, each has the memory of the device, or unlimited memory
// without a device. Links are those inside a node of the device. Ranks of several devices fill
// nodes, with the links between them. Without a head-room it is kDeviceHeadRoom of a device's
// memory, else 0. Call it after set_shape() or set_work(). Requires ranks >= 1.
void set_ranks(Question& question, int ranks, std::optional<Bytes> memory,
               const std::optional<cost::Device>& device, std::optional<double> head_room);

// Sets the ranks of a cluster file. Without a head-room it is 0. Requires 0 <= head_room < 1.
void set_cluster(Question& question, cost::Cluster cluster, std::optional<double> head_room);

// Sets the layers that move on their own. "half" keeps the model's layers. "block" joins them to
// whole blocks and a whole head. No name means "block" if the question's form takes whole blocks,
// else "half". Call it before set_from(). Returns kBadInput for another name.
[[nodiscard]] Expected<void> set_granularity(Question& question,
                                             const std::optional<std::string>& name);

// Sets the plan in force, on the offered number of ranks. Returns kBadInput with `origin` for other
// layers than the model's, an absent rank, or an order that cannot run.
[[nodiscard]] Expected<void> set_from(Question& question, Plan from, std::string_view origin);

// Returns the lowered order of an adaptive plan that cannot run, or none for other plans.
[[nodiscard]] std::optional<schedule::Schedule> broken_order(const Plan& plan,
                                                             const Question& question);

// The cost of joining the slices of the head.
struct JoinedHead {
  int slices = 0;
  double step_time_s = 0;         // of the plan
  double sliced_step_time_s = 0;  // with slices that ranks may share; 0: no such plan was found
};

struct Answer {
  Proposal proposal;
  cost::ModelCost costs;  // with recomputed layers
  Evaluation evaluation;  // with its timeline
  Migration migration;    // from the plan in force
  TrafficRows traffic;    // messages of the first replica's ranks in a step and for moves
  std::optional<Advice> advice;
  std::optional<JoinedHead> joined_head;
  Json document;  // "dynmo-plan-1" (docs/formats.md)
};

// Answers a question. Returns the errors of propose(), pack() and, with a form, check_emit().
// Requires
// numbers within their limits (asked.h).
[[nodiscard]] Expected<Answer> answer(const Question& question);

// Returns the answer's plan for emit(), with the layers that it places. It refers to both.
[[nodiscard]] EmitProblem emit_problem(const Question& question, const Answer& answer);

}  // namespace dynmo::plan
