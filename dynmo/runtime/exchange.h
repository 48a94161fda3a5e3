// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ranks exchange their figures at the end of a step: one message from each to all, after which
// they know the same and can decide alike. A rank sends its own layers' numbers only; where each
// number stands follows from plan and model, which all ranks have.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/control/decisions.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/model/layer.h"
#include "dynmo/plan/plan.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// One rank's part.
struct RankStats {
  struct Layer {
    cost::LayerSample sample;
    double squared_norm = 0;           // of the gradients
    std::vector<double> figures = {};  // of the step
    std::vector<double> losses = {};   // by micro-batch of the replica
    double rows = 0;  // behind it, mean over the micro-batches, of models where rows leave
  };
  std::map<LayerId, Layer> layers;  // that it owns
  double busy_s = 0;
  double overhead_s = 0;  // of the step before, beside its schedule and update
  double plan_s = 0;
  double migrate_s = 0;
  double action_overhead_s = 0;  // of its actions, beside layers and waiting
  double actions = 0;
  double message_s = 0;  // here and below 0: not measured by this rank
  double reduction_bytes_per_s = 0;
  double asks = 0;     // 1: this rank has something to tell all before the next step
  double refuses = 0;  // a layer whose copy is not what was sent (background_move.h) + 1; 0: none
};

// The whole, equal on all ranks.
struct Exchange {
  std::vector<cost::LayerSample> layers;  // means over the replicas
  std::vector<double> squared_norms;      // of the gradients, by layer
  // For each layer, its figures added up over the replicas in their order: as many as
  // Layer::figures() names.
  std::vector<std::vector<double>> figures;
  std::vector<double> losses;  // by micro-batch of the step: sums over the layers that have one
  // For each layer, the rows behind it, mean over the micro-batches. Empty where no layer drops
  // rows.
  std::vector<double> rows;
  std::vector<double> busy_s;  // by rank of the group
  cost::StepSample overhead;
  double plan_s = 0;  // largest of any rank
  double migrate_s = 0;
  bool asked = false;  // by any rank
  // `refuses` of the first rank that has refused a copy; 0: none has.
  std::int64_t refused = 0;
  friend bool operator==(const Exchange&, const Exchange&) = default;
};

// Called by all ranks with the plan of the step; `micro_batches` of a replica. Numbers that a layer
// here does not give are 0; more than the model names are refused by a check.
[[nodiscard]] Expected<Exchange> exchange(const transport::Grid& grid, transport::Tag tag,
                                          const plan::Plan& plan, const model::Model& model,
                                          int micro_batches, const RankStats& own);

// Whether it has the numbers of every layer of the model and every rank.
[[nodiscard]] bool fits(const Exchange& exchanged, const model::Model& model,
                        const transport::Axes& axes);

// The exchange as bytes, bit for bit, for a rank that did not get it.
[[nodiscard]] std::string pack(const Exchange& exchanged);
// kBadInput: other bytes.
[[nodiscard]] Expected<Exchange> parse_exchange(std::string_view bytes);

// Returns the values that the controller decides by.
[[nodiscard]] inline control::ExchangedStep step_of(const Exchange& exchanged) {
  return {.layers = exchanged.layers,
          .overhead = exchanged.overhead,
          .plan_s = exchanged.plan_s,
          .migrate_s = exchanged.migrate_s};
}

}  // namespace dynmo::runtime
