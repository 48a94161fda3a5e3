// SPDX-License-Identifier: Apache-2.0
#pragma once

// A block of a decoder that works on some tokens of each sequence. (Raposo et al.,
// "Mixture-of-depths: dynamically allocating compute in transformer-based language models", 2024.)
// They are the C tokens with the highest scores of its router, by select_top. The other rows pass
// unchanged, bit for bit. Scores are s = w . x, in fp32. The block's two halves are a function g on
// the chosen rows X alone, at their original positions:
//
//   x_i' = x_i + sigmoid(s_i) (g(X)_i - x_i)   for chosen rows i.
//
// The paper multiplies by s_i. The sigmoid is never negative. So a row that the predictor chooses
// against its score does not lose the block's contribution.
//
// The highest scores of a text depend on all of it. So a predictor learns during the run whether a
// row is among them. It is an MLP of one hidden layer on x. Its loss is binary cross entropy, in
// fp32, whose gradient ends at x. In Pass::kGeneration the predictor chooses rows: those whose
// logit is above 0.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/model/layer.h"

namespace dynmo::dynamism {

// Sums over the rows of a micro-batch. They count all rows, chosen rows, rows that the predictor
// would choose, and rows that it predicts correctly. The last one is its cross entropy in nats.
enum DepthsFigure {
  kRows,
  kChosenRows,
  kPredictedRows,
  kRightRows,
  kPredictorLoss,
  kDepthsFigures
};
[[nodiscard]] std::vector<std::string> depths_figures();

// Returns one layer that replaces the halves of a block, `hidden` wide. Its parameters are those of
// attention, of the MLP, and of router and predictor, which are not pruned. The MLP may be a
// mixture of experts, which gets the chosen rows. The layer has the MLP's buffers, and the MLP's
// figures before depths_figures(). Requires 0 < capacity <= 1.
[[nodiscard]] std::shared_ptr<const model::Layer> routed_block(
    std::string name, std::shared_ptr<const model::Layer> attention,
    std::shared_ptr<const model::Layer> mlp, std::int64_t hidden, double capacity);

}  // namespace dynmo::dynamism
