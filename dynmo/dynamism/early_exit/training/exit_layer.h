// SPDX-License-Identifier: Apache-2.0
#pragma once

// An exit: a half block followed by a separate head, where tokens with a sure prediction leave the
// model. Their loss is computed here. Later layers see only the other tokens, which do not attend
// to exited ones. Whether a token leaves depends on its own row alone. So the result for the
// beginning of a text does not depend on the rest.
//
// The method follows EE-LLM (Chen et al., 2024) and CALM (Schuster et al., 2022), with two
// differences. Tokens leave in training, too. And the classifier learns whether the exit's own head
// is right: the last layer's prediction is not known here.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/model/layer.h"

namespace dynmo::dynamism {

struct ExitOptions {
  std::int64_t hidden = 0;
  std::int64_t vocabulary = 0;
  double head_init_std = 0.02;  // of the initial values of the head
  ExitConfidence confidence = ExitConfidence::kGap;
  // Weight of the loss of staying tokens at the exit. Exited tokens have weight 1. Output::loss
  // does not include it, since that is the loss of the model's predictions.
  double loss = 0.1;
  bool counts = true;       // confidences are counted even if no token can leave
  std::int64_t slices = 1;  // layers that share the head
};

// Returns `inner` with an exit behind it. Its state has inner's parameters and buffers, and then
// the exit's: an RMS norm, a head, the classifier's. The buffer kThreshold is the confidence from
// which a token leaves. At kNeverLeaves or above no token leaves. Then the exit computes nothing
// unless something learns from it.
[[nodiscard]] std::shared_ptr<const model::Layer> exit_layer(
    std::shared_ptr<const model::Layer> inner, const ExitOptions& options);
// Like exit_layer(), in options.slices layers, so that an exit does not limit a pipeline by the
// time of one layer. The layers are a chain like that of a head in slices (model/head_slice.h). The
// first layer has `inner`, the norm and some rows of the head. Rows leave at the last layer.
//
// A tensor of 2 x hidden + 6 fp32 numbers a token passes between them, in both directions. It has
// inner's output, the normed values, the log-sum-exp, the target's score and the two best scores.
// The last two are whether the best is right, and the similarity. Parameters have the names of the
// whole exit. Those of the head also have its rows in the name.
[[nodiscard]] std::vector<std::shared_ptr<const model::Layer>> exit_layers(
    std::shared_ptr<const model::Layer> inner, const ExitOptions& options);

inline constexpr float kNeverLeaves = 2;
inline constexpr const char* kThreshold = "exit.threshold";
// Returns whether rows leave behind the layer. If an exit is in slices, all its layers have the
// threshold's buffer, and the last one has the exit.
[[nodiscard]] bool has_exit(const model::Layer& layer);
[[nodiscard]] bool has_threshold(const model::Layer& layer);
// Sets the threshold. Requires a state of a layer with a threshold.
void set_threshold(model::LayerState& state, float threshold);
// Returns the state, of any layer, with which no token leaves. The argument keeps its threshold.
[[nodiscard]] model::LayerState without_leaving(model::LayerState state);

// The last figures of a layer with an exit, of one micro-batch.
enum ExitFigure {
  kExitRows,    // rows in
  kExitLeft,    // rows that left
  kExitLoss,    // sum over all rows that the head has scored
  kExitScored,  // rows that the head has scored
  kExitRight,   // rows that it predicts correctly
  kExitCounts,  // the first of kExitBins counts of confidences
};
inline constexpr int kExitBins = 64;
inline constexpr int kExitFigures = kExitCounts + kExitBins;
// Returns the bin of a confidence. Bins are finer near 0 and 1: two for each octave of the
// distance.
[[nodiscard]] int exit_bin(double confidence);
// Returns the number of confidences in each bin, fp64. Does not wait for a device.
[[nodiscard]] at::Tensor exit_bin_counts(const at::Tensor& confidence_N);
// Returns the threshold that `share` of the counted confidences exceed, by linear interpolation
// within a bin. Returns kNeverLeaves if the share, or the count, is 0.
[[nodiscard]] float threshold_for(const std::vector<double>& counts, double share);

}  // namespace dynmo::dynamism
