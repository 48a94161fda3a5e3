// SPDX-License-Identifier: Apache-2.0
#pragma once

// A question for a plan with everything that the answer depends on, and the answer as a document.
// `dynmo plan` and the Python package ask the same question in the same words, so that both give
// the same answer.

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
#include "dynmo/cost/transformer.h"
#include "dynmo/plan/advice.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/propose.h"
#include "dynmo/plan/question/emit.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/plan/traffic.h"

namespace dynmo::plan {

struct Question {
  cost::ModelCost model;
  cost::Cluster cluster;  // its memory is without the head-room
  double head_room = 0;   // share of every rank's memory that stays free
  std::string links;      // where those of the cluster come from; empty: from the user
  std::string costs;      // where the layers' come from; empty: a profile
  std::string device;     // by whose formulas they are; empty: measured
  double tokens = 0;      // of a micro-batch; 0: not known
  int micro_batches = 32;
  Balancer balancer = Balancer::kSearch;
  std::optional<schedule::ScheduleKind> schedule;  // none: the best of all
  Recompute recompute = Recompute::kNone;
  std::optional<Plan> from;  // the plan in force
  bool pack = false;         // onto as few ranks as `slack` allows
  double slack = 0;
  bool place = false;  // ranks may take any position, so that the step is shortest
  std::int64_t evaluations = ProposeOptions{}.evaluations;
  // A shape has its slices and the costs with others. A profile's head is divided evenly.
  std::int64_t head_slices = 1;
  std::function<Expected<cost::ModelCost>(std::int64_t slices)> sliced = {};
  std::optional<EmitForm> form;  // only plans that it can say
  // Blocks are joined, but slices of the head are not: to say what joining those costs.
  std::optional<cost::ModelCost> with_slices;
};

// The costs of a shape by formulas, at the utilization of `device`. Layers are recomputed where
// memory asks for it (kAuto). Errors as transformer_costs.
[[nodiscard]] Expected<void> set_shape(Question& question, const cost::TransformerShape& shape,
                                       const cost::Device& device);
// The same for layers that were counted elsewhere, of micro-batches of `tokens`.
[[nodiscard]] Expected<void> set_work(Question& question, const std::vector<cost::LayerWork>& work,
                                      double tokens, const cost::Device& device);

// The share of a device's memory that stays free unless the user says otherwise: libraries, buffers
// and fragmentation have to fit, too, and formulas and presets leave them out.
inline constexpr double kDeviceHeadRoom = 0.1;

// Equal ranks. `memory` of none is the device's, or unlimited without a device; the links of a
// device are those inside a node. A head-room of none is kDeviceHeadRoom of a device's memory, else
// 0. Requires ranks >= 1.
void set_ranks(Question& question, int ranks, std::optional<Bytes> memory,
               const std::optional<cost::Device>& device, std::optional<double> head_room);

// The ranks of a cluster file; a head-room of none is 0.
void set_cluster(Question& question, cost::Cluster cluster, std::optional<double> head_room);

// Sets what moves on its own: "half" keeps the model's layers, "block" joins them to whole blocks
// and a whole head. None is "block" if the question's form takes whole blocks, else "half". Call it
// before set_from(). kBadInput: another name.
[[nodiscard]] Expected<void> set_granularity(Question& question, std::optional<std::string> name);

// The plan in force, on as many ranks as are offered. kBadInput with `origin`: other layers than
// the model's, a rank that is not offered, an order that cannot run.
[[nodiscard]] Expected<void> set_from(Question& question, Plan from, std::string_view origin);

// The lowered order of a plan that has one of its own and cannot run; none for other plans.
[[nodiscard]] std::optional<schedule::Schedule> broken_order(const Plan& plan,
                                                             const Question& question);

// kBadInput naming the field: numbers out of range.
[[nodiscard]] Expected<void> validate(const Question& question);

// The head has slices, which are joined.
struct JoinedHead {
  int slices = 0;
  double step_time_s = 0;         // of the plan
  double sliced_step_time_s = 0;  // with slices that ranks may share; 0: no such plan was found
};

struct Answer {
  Proposal proposal;
  cost::ModelCost costs;  // with its layers recomputed
  Evaluation evaluation;  // with its timeline
  Migration migration;    // from the plan in force
  TrafficRows traffic;    // messages that the first replica's ranks send in a step and to move
  std::optional<Advice> advice;
  std::optional<JoinedHead> joined_head;
  Json document;  // "dynmo-plan-1" (docs/formats.md)
};

// Errors as `propose`, `pack` and, with a form, `check_emit`. Requires a valid question.
[[nodiscard]] Expected<Answer> answer(const Question& question);

// The answer's plan for emit(), with the layers that it places. It refers to both.
[[nodiscard]] EmitProblem emit_problem(const Question& question, const Answer& answer);

}  // namespace dynmo::plan
