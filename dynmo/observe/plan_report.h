// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plan as text. Parts are the stages as a table, the step beside other plans, the ranks' waiting
// times, and the pipeline as a picture.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/traffic.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/observe/picture.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/question/advice.h"
#include "dynmo/plan/question/question.h"
#include "dynmo/plan/recompute.h"

namespace dynmo::observe {

// Another plan for the same model, to compare with.
struct Compared {
  std::string name;  // "uniform 1f1b", "plan in force"
  plan::Evaluation evaluation;
  bool fits = true;  // within the memory of its ranks
};

// The names that a program gives the keys of advice. A value follows them.
struct AdviceWords {
  std::map<plan::AdviceKey, std::string> keys;
  std::string hour = "rank-hour";
};

struct PlanReport {
  const cost::ModelCost& model;
  const cost::Cluster& cluster;
  int micro_batches = 1;
  const plan::Plan& plan;
  const plan::Evaluation& evaluation;  // its timeline, if any, is drawn
  std::string made_by;                 // "search: adaptive/wave-6 of 61 candidates"
  std::vector<Compared> compared;      // imbalance is compared with the first one
  std::optional<plan::Migration> migration;
  plan::LayerSet recomputed = {};  // layers; `model` has their costs with recomputation
  // Share of each rank's memory that stays free, which the cluster does not include.
  double head_room = 0;
  std::string links = {};    // source of the cluster's links, "those of h100 inside a node"
  std::string costs = {};    // source of the model's costs, if not a profile
  double tokens = 0;         // of a micro-batch; 0: not known
  TrafficRows traffic = {};  // messages of the first replica's ranks, those of the moves included
  std::optional<plan::Advice> advice = {};
  AdviceWords words = {};
  std::optional<plan::JoinedHead> joined_head = {};
};

// Returns the cut as text, "embedding .. blocks.2 | blocks.3 .. head", for `dynmo plan` and `dynmo
// train`. If attention and MLP of a block are separate layers, the text says so.
[[nodiscard]] std::string cut_text(const plan::Plan& plan, std::vector<std::string> names);

// Makes the report of an answer, beside the plan in force and an even cut under 1F1B. The report
// refers to both arguments.
[[nodiscard]] PlanReport report_of(const plan::Question& question, const plan::Answer& answer);

// Returns lines of text, each ending with a newline. Shows at most 64 stages, the first and the
// last ones. Requires an evaluation of the same plan.
[[nodiscard]] std::string plan_report(const PlanReport& report, const PictureOptions& options = {});

// Returns two or three sentences, one on each line. `tokens` are those of a step; 0: not known.
[[nodiscard]] std::string advice_text(const plan::Advice& advice, double tokens,
                                      const AdviceWords& words);

}  // namespace dynmo::observe
