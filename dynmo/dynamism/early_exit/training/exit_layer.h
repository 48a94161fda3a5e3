// SPDX-License-Identifier: Apache-2.0
#pragma once

// An exit: a half block with a head of its own behind it, where tokens whose prediction is sure
// leave the model. Their loss is taken here; layers behind it see the others only, which do not
// attend to what has left. Whether a token leaves depends on its own row alone, so that what is
// left of a text's beginning does not depend on how it goes on.
//
// After EE-LLM (Chen et al., 2024) and CALM (Schuster et al., 2022), but tokens leave in training,
// too, and the classifier learns whether the exit's own head is right: what the last layer would
// say of a token is not known where it leaves.

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
  // Weight of the loss that tokens which stay have at the exit; those that leave have 1. It is no
  // part of Output::loss, which is that of the model's predictions.
  double loss = 0.1;
  bool counts = true;       // confidences are counted also where none can leave
  std::int64_t slices = 1;  // layers that the head lies in
};

// `inner` with an exit behind it. Its state has inner's parameters and buffers, then the exit's: an
// RMS norm, a head, the classifier's. The buffer kThreshold says from which confidence on a token
// leaves; kNeverLeaves, or more: none does, and nothing of the exit is computed where nothing
// learns of it.
[[nodiscard]] std::shared_ptr<const model::Layer> exit_layer(
    std::shared_ptr<const model::Layer> inner, const ExitOptions& options);
// The same in options.slices layers, a chain as that of a head in slices (model/head_slice.h), so
// that an exit does not bound a pipeline by the time of one layer. The first layer has `inner`, the
// norm and some rows of the head, the last one lets rows go. A tensor of fp32 numbers passes
// between them, twice the hidden ones + 6 a token both ways: inner's output, the normed values, the
// log-sum-exp, the target's score, the two best scores, whether the best is right, the similarity.
// The names of the parameters are those of the whole exit, the head's with its rows.
[[nodiscard]] std::vector<std::shared_ptr<const model::Layer>> exit_layers(
    std::shared_ptr<const model::Layer> inner, const ExitOptions& options);

inline constexpr float kNeverLeaves = 2;
inline constexpr const char* kThreshold = "exit.threshold";
// Whether rows leave behind it. All layers of an exit in slices have the buffer, the last one has
// the exit.
[[nodiscard]] bool has_exit(const model::Layer& layer);
[[nodiscard]] bool has_threshold(const model::Layer& layer);
// Requires a state of a layer with a threshold.
void set_threshold(model::LayerState& state, float threshold);
// The state, of any layer, with which no token leaves. The given one keeps its threshold.
[[nodiscard]] model::LayerState without_leaving(model::LayerState state);

// The last figures of a layer with an exit, of one micro-batch.
enum ExitFigure {
  kExitRows,    // that came
  kExitLeft,    // that left
  kExitLoss,    // of all rows that the head has seen: the sum over them
  kExitScored,  // rows that the head has seen
  kExitRight,   // ... and is right about
  kExitCounts,  // the first of kExitBins counts of confidences
};
inline constexpr int kExitBins = 64;
inline constexpr int kExitFigures = kExitCounts + kExitBins;
// Which bin a confidence falls into. Bins are finer towards 0 and 1: two an octave of the distance.
[[nodiscard]] int exit_bin(double confidence);
// The threshold above which `share` of the counted confidences lie, by linear interpolation within
// a bin; kNeverLeaves where the share, or the count, is 0.
[[nodiscard]] float threshold_for(const std::vector<double>& counts, double share);

}  // namespace dynmo::dynamism
