// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parts of an exit that are the same for a whole head and a head in slices.

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/early_exit/training/exit_layer.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/model/forwarding_layer.h"
#include "dynmo/model/hand_written.h"

namespace dynmo::dynamism {

inline constexpr double kExitEpsilon = 1e-5;  // of the norm
inline constexpr const char* kExitHead = "exit.head.weight";

[[nodiscard]] std::vector<std::shared_ptr<const model::Layer>> exit_slices(
    std::shared_ptr<const model::Layer> inner, const ExitOptions& options);

inline model::ParameterSpec exit_norm(std::int64_t hidden) {
  return {.name = "exit.norm.weight", .shape = {hidden}, .mean = 1, .weight_decay = false};
}

inline void add_classifier(std::int64_t hidden, std::vector<model::ParameterSpec>& specs) {
  // Starts above 0. With 0 all tokens would have the same confidence, and leave together.
  specs.push_back({.name = "exit.classifier.weight",
                   .shape = {1, hidden},
                   .init_std = 1 / std::sqrt(static_cast<double>(hidden)),
                   .weight_decay = false});
  specs.push_back({.name = "exit.classifier.bias", .shape = {1}, .weight_decay = false});
}

inline model::BufferSpec threshold_buffer() {
  return {.name = kThreshold, .shape = {1}, .initial = kNeverLeaves, .on_host = true};
}

inline void add_exit_figures(std::vector<std::string>& names) {
  for (const char* name : {"rows", "left", "exit_loss", "scored", "right"}) {
    names.emplace_back(name);
  }
  for (int bin = 0; bin < kExitBins; ++bin) names.push_back(fmt::format("confidence_{}", bin));
}

// The work of an exit in a pass.
struct ExitQuestion {
  double threshold = kNeverLeaves;
  bool asks = false;     // confidences are needed
  bool teaches = false;  // staying rows have a loss
  [[nodiscard]] bool never() const { return threshold >= kNeverLeaves; }
};

inline ExitQuestion question_of(const model::Buffer& threshold, model::Pass pass,
                                const ExitOptions& options) {
  const bool training = pass == model::Pass::kTraining;
  ExitQuestion question{.threshold = threshold.value.item<float>()};
  question.asks = !question.never() || (training && options.counts);
  question.teaches = training && options.loss > 0;
  return question;
}

inline at::Tensor indices(const std::vector<std::int64_t>& rows) {
  return at::tensor(rows, at::kLong);
}

inline std::vector<double> doubles(const at::Tensor& numbers) {
  const at::Tensor each = numbers.flatten().to(at::kDouble).contiguous();
  const auto* first = kernels::host_data<const double>(each);
  return {first, first + each.numel()};
}

// Returns the cosine of the input and the output of the half block.
inline at::Tensor similarity(const at::Tensor& x_ND, const at::Tensor& y_ND) {
  const at::ScalarType wide = kernels::accumulation_type(y_ND.scalar_type());
  return at::cosine_similarity(x_ND.to(wide), y_ND.to(wide), 1, 1e-8);
}

// Returns the classifier's probability. `classifier` is the index of its weight, which its bias
// follows.
inline at::Tensor odds(const model::LayerState& state, std::size_t classifier,
                       const at::Tensor& n_ND) {
  const at::Tensor sums_N1 = model::times(state.parameters[classifier], n_ND)
                                 .to(kernels::accumulation_type(n_ND.scalar_type()))
                                 .add_(model::value(state, classifier + 1));
  return at::sigmoid(sums_N1);
}

// A half block with the norm and the first rows of the head of its exit, or all rows. The first own
// parameter is the norm, the second the head. The first own buffer is the threshold.
class HalfBlockWithExit : public model::ForwardingLayer {
 public:
  std::vector<model::BufferSpec> buffers() const override {
    std::vector<model::BufferSpec> buffers = inner().buffers();
    buffers.push_back(threshold_buffer());
    return buffers;
  }

 protected:
  HalfBlockWithExit(std::shared_ptr<const model::Layer> layer, const ExitOptions& options)
      : ForwardingLayer(std::move(layer)),
        options_(options),
        norm_(inner().parameters().size()),
        buffers_(inner().buffers().size()) {}

  [[nodiscard]] const ExitOptions& options() const { return options_; }
  [[nodiscard]] bool classifies() const {
    return options_.confidence == ExitConfidence::kClassifier;
  }
  [[nodiscard]] std::size_t norm() const { return norm_; }
  [[nodiscard]] std::size_t head() const { return norm_ + 1; }
  [[nodiscard]] ExitQuestion question_for(const model::LayerState& state, model::Pass pass) const {
    return question_of(state.buffers[buffers_], pass, options_);
  }
  // Returns the half block's part of `state`, which has `own` more parameters. Tensors are shared.
  // `what` names the layer in errors.
  [[nodiscard]] model::LayerState inner_state(const model::LayerState& state, std::size_t own,
                                              const char* what) const {
    DYNMO_CHECK(state.parameters.size() == norm_ + own && state.buffers.size() > buffers_,
                "the state of {} for {}, got {} parameters and {} buffers", what, name(),
                state.parameters.size(), state.buffers.size());
    model::LayerState part = state;
    part.parameters.resize(norm_);
    part.buffers.resize(buffers_);
    return part;
  }

 private:
  ExitOptions options_;
  std::size_t norm_;
  std::size_t buffers_;
};

}  // namespace dynmo::dynamism
