// SPDX-License-Identifier: Apache-2.0
#pragma once

// A block of a decoder that works on some tokens of each sequence (Raposo et al., "Mixture-of-
// depths: dynamically allocating compute in transformer-based language models", 2024): those C that
// its router scores highest, by select_top. The other rows pass, bit for bit. With the scores
// s = w . x, in fp32, and the block's two halves as a function g on the chosen rows X alone, at the
// positions that they had,
//   x_i' = x_i + sigmoid(s_i) (g(X)_i - x_i)   for chosen rows i.
// The paper multiplies by s_i; its sigmoid is never negative, so that a row which the predictor
// chooses against its score does not lose what the block adds.
//
// Which scores are the highest of a text depends on all of it. So a predictor, an MLP of one hidden
// layer on x, learns with the run whether a row is among them: binary cross entropy, in fp32, whose
// gradient ends at x. In Pass::kGeneration its rows are chosen: those whose logit is above 0.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/model/layer.h"

namespace dynmo::dynamism {

// Sums over the rows of a micro-batch: rows, those that were chosen, those that the predictor would
// choose, those that it is right about, and its cross entropy in nats.
enum DepthsFigure {
  kRows,
  kChosenRows,
  kPredictedRows,
  kRightRows,
  kPredictorLoss,
  kDepthsFigures
};
[[nodiscard]] std::vector<std::string> depths_figures();

// One layer in the place of the halves of a block, `hidden` wide. Its parameters are those of
// attention, of the MLP, and of router and predictor, which are not pruned. The MLP may be one of
// experts, which are given the chosen rows; its buffers are the layer's, and its figures come
// before depths_figures.
// Requires 0 < capacity <= 1.
[[nodiscard]] std::shared_ptr<const model::Layer> routed_block(
    std::string name, std::shared_ptr<const model::Layer> attention,
    std::shared_ptr<const model::Layer> mlp, std::int64_t hidden, double capacity);

}  // namespace dynmo::dynamism
