// SPDX-License-Identifier: Apache-2.0
#pragma once

// Exchanges the figures of all ranks at the end of a step, with one message from each rank to all.
// Then all ranks know the same and decide alike. A rank sends only its own layers' numbers. The
// position of each number follows from plan and model, which all ranks have.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/control/decisions.h"
#include "dynmo/control/step_stats.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/model/layer.h"
#include "dynmo/plan/plan.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// The figures of one rank.
struct RankStats {
  struct Layer {
    cost::LayerSample sample;
    double squared_norm = 0;           // of the gradients
    std::vector<double> figures = {};  // of the step
    std::vector<double> losses = {};   // by micro-batch of the replica
    // Rows of its output, mean over the micro-batches, in models whose rows leave.
    double rows = 0;
  };
  std::map<LayerId, Layer> layers;  // layers that it owns
  control::RankFigures figures;
  // 1 if this rank has something to tell all ranks before the next step.
  double asks = 0;
  // Id + 1 of a layer whose copy differs from the original (background_move.h), or 0.
  double refuses = 0;
};

// The figures of all ranks, equal on all ranks.
struct Exchange {
  std::vector<cost::LayerSample> layers;  // means over the replicas
  std::vector<double> squared_norms;      // of the gradients, by layer
  // For each layer, its figures in the order of Layer::figures(), summed over the replicas in their
  // order.
  std::vector<std::vector<double>> figures;
  // Sums over the layers that have a loss, by micro-batch of the step.
  std::vector<double> losses;
  // For each layer, the rows of its output, mean over the micro-batches. Empty if no layer drops
  // rows.
  std::vector<double> rows;
  std::vector<double> busy_s;  // by rank of the group
  control::StepStats stats;
  bool asked = false;  // by any rank
  // `refuses` of the first rank that has refused a copy, or 0.
  std::int64_t refused = 0;
  friend bool operator==(const Exchange&, const Exchange&) = default;
};

// Exchanges the figures. All ranks call it with the plan of the step. `micro_batches` is the number
// of a replica. Numbers that a layer does not have are 0. Fails a check if a layer has more numbers
// than the model names. Fails with kPeerLost.
[[nodiscard]] Expected<Exchange> exchange(const transport::Grid& grid, transport::Tag tag,
                                          const plan::Plan& plan, const model::Model& model,
                                          int micro_batches, const RankStats& own);

// Returns whether `exchanged` has the numbers of every layer of the model and of every rank.
[[nodiscard]] bool fits(const Exchange& exchanged, const model::Model& model,
                        const transport::Axes& axes);

// Returns the exchange as bytes, bit for bit, for a rank that did not receive it.
[[nodiscard]] std::string pack(const Exchange& exchanged);
// Parses the bytes of pack(). Returns kBadInput for any other bytes.
[[nodiscard]] Expected<Exchange> parse_exchange(std::string_view bytes);

// Returns the part of the exchange by which the controller decides.
[[nodiscard]] inline control::ExchangedStep step_of(const Exchange& exchanged) {
  return {.layers = exchanged.layers, .stats = exchanged.stats};
}

}  // namespace dynmo::runtime
