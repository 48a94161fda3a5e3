// SPDX-License-Identifier: Apache-2.0
#pragma once

// The numbers of a step, in one list. Measurements of a rank (runtime::StepReport) have these
// facts, and so do records (StepRecord), histories (RunHistory) and summaries (RunSummary). JSON,
// sums, means and lines of the report follow the list. For one more number, add a field and a line
// here, and a value where it is measured.

#include <array>
#include <cstddef>
#include <string_view>
#include <variant>

#include "dynmo/core/fields.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"

namespace dynmo::observe {

// Numbers that a rank does not know are NaN, and null in JSON. Only the rank of the last stage
// knows the loss, for example.
struct StepFacts {
  double loss = 0;         // mean of the step's micro-batches
  double step_s = 0;       // this rank's clock, from the first action to the end of the update
  double predicted_s = 0;  // by replay of the plan before the step; 0: no costs yet
  double busy_s = 0;       // of this rank: compute, and the update of the step before
  double idle_s = 0;       // of this rank: step_s - busy_s, 0 or more
  int frozen_layers = 0;   // of the model
  double imbalance = 0;    // max / mean - 1 of busy_s, over the ranks that have layers
  double bubble = 0;       // 1 - mean of busy_s / time between the exchanges of two steps
  Bytes memory_bytes;      // resident
  double profile_s = 0;    // spent by this rank beside the step on profiling,
  double plan_s = 0;       // planning
  double migrate_s = 0;    // and moving
  int moved_layers = 0;    // of the model, before this step
  Bytes moved_bytes;
  double reduction_s = 0;    // of this rank: gradients summed over replicas, not hidden by compute
  double checkpoint_s = 0;   // of this rank: pause for checkpoints since the step before
  Bytes sent_bytes;          // by this rank since the end of the step before
  double update_s = 0;       // of this rank: the optimizer's update of its layers
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  // The most that this rank's tensors have taken so far on its device, by libtorch's allocator. 0
  // on a CPU.
  Bytes device_memory_bytes;
  friend bool operator==(const StepFacts&, const StepFacts&) = default;
};

// The form of a fact in the summary of a run.
enum class OverSteps { kNothing, kMean, kSum, kMax };

// Selects whether a fact of 0 is written.
enum class Zeros { kWritten, kLeftOut };

using FactField = std::variant<double StepFacts::*, int StepFacts::*, Bytes StepFacts::*>;

// Selects numbers of the run, which are equal on all ranks, or of one rank.
enum class MetricOf { kRun, kRank };

struct StepFact {
  std::string_view name;  // in records and summaries
  FactField field;
  MetricOf of = MetricOf::kRun;
  OverSteps over_steps = OverSteps::kNothing;
  // The label of its line in the report of a run, or "" if it has no separate line.
  std::string_view report_label = {};
  std::string_view tag = {};  // TensorBoard's; "": dynmo/NAME
  Zeros zeros = Zeros::kWritten;
};

inline constexpr auto kStepFacts = std::to_array<StepFact>({
    {"loss", &StepFacts::loss, MetricOf::kRun, OverSteps::kNothing, "",
     "loss_metrics/global_avg_loss"},
    {"step_s", &StepFacts::step_s, MetricOf::kRank},
    {"predicted_s", &StepFacts::predicted_s},
    {"busy_s", &StepFacts::busy_s, MetricOf::kRank},
    {"idle_s", &StepFacts::idle_s, MetricOf::kRank},
    {"frozen_layers", &StepFacts::frozen_layers},
    {"imbalance", &StepFacts::imbalance, MetricOf::kRun, OverSteps::kMean},
    {"bubble", &StepFacts::bubble, MetricOf::kRun, OverSteps::kMean},
    {"memory_bytes", &StepFacts::memory_bytes, MetricOf::kRank},
    {"profile_s", &StepFacts::profile_s, MetricOf::kRank, OverSteps::kSum},
    {"plan_s", &StepFacts::plan_s, MetricOf::kRank, OverSteps::kSum},
    {"migrate_s", &StepFacts::migrate_s, MetricOf::kRank, OverSteps::kSum},
    {"moved_layers", &StepFacts::moved_layers, MetricOf::kRun, OverSteps::kSum},
    {"moved_bytes", &StepFacts::moved_bytes, MetricOf::kRun, OverSteps::kSum},
    {"reduction_s", &StepFacts::reduction_s, MetricOf::kRank, OverSteps::kSum},
    {"checkpoint_s", &StepFacts::checkpoint_s, MetricOf::kRank, OverSteps::kSum},
    {"sent_bytes", &StepFacts::sent_bytes, MetricOf::kRank},
    {"update_s", &StepFacts::update_s, MetricOf::kRank, OverSteps::kSum, "updates"},
    {"gradient_norm", &StepFacts::gradient_norm, MetricOf::kRun, OverSteps::kNothing, "",
     "grad_norm"},
    {"learning_rate", &StepFacts::learning_rate, MetricOf::kRun, OverSteps::kNothing, "", "lr"},
    {"device_memory_bytes", &StepFacts::device_memory_bytes, MetricOf::kRank, OverSteps::kMax,
     "device mem", "", Zeros::kLeftOut},
});

inline constexpr Limits kWholeFact{.min = 0, .wanted = "a whole number from 0 to 2^31 - 1"};

// Selects the facts of an object in JSON: all of a step, or those that a run has (OverSteps).
enum class FactsOf { kStep, kRun };
// Lists the facts as fields (core/fields.h). An absent fact is read as 0.
template <typename Facts>
void list_facts(Facts& facts, FactsOf of, auto& visit) {
  for (const StepFact& fact : kStepFacts) {
    if (of == FactsOf::kRun && fact.over_steps == OverSteps::kNothing) continue;
    const char* key = fact.name.data();
    if (const auto* number = std::get_if<double StepFacts::*>(&fact.field)) {
      visit.optional_measured(key, facts.**number);
    } else if (const auto* count = std::get_if<int StepFacts::*>(&fact.field)) {
      visit.optional(key, facts.**count, kWholeFact);
    } else if (fact.zeros == Zeros::kLeftOut) {
      visit.left_out(key, facts.*std::get<Bytes StepFacts::*>(fact.field), Bytes{0});
    } else {
      visit.optional(key, facts.*std::get<Bytes StepFacts::*>(fact.field));
    }
  }
}

// Adds to `sums` the facts of a step that have this `over_steps`. With kMax, `sums` keeps the
// larger value.
void add_facts(StepFacts& sums, const StepFacts& step, OverSteps over_steps);
// Divides the facts with OverSteps::kMean by `steps`.
void make_means(StepFacts& sums, std::size_t steps);

[[nodiscard]] inline double balancing_s(const StepFacts& step) {
  return step.profile_s + step.plan_s + step.migrate_s;
}

}  // namespace dynmo::observe
