// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/early_exit/training/exit_parts_impl.h"
#include "dynmo/dynamism/early_exit/training/learning_slice_impl.h"
#include "dynmo/model/hand_written.h"
#include "dynmo/model/head_slice.h"

namespace dynmo::dynamism {
namespace {

using at::Tensor;
using model::SliceNumbers;
using InputGradient = model::Layer::InputGradient;
using Shape = std::vector<std::int64_t>;

Shape tokens_of(const Tensor& x) {
  return x.sizes().slice(0, static_cast<std::size_t>(x.dim()) - 1).vec();
}

Shape with_width(Shape tokens, std::int64_t width) {
  tokens.push_back(width);
  return tokens;
}

// Returns the rows that the head scores, or an undefined tensor for all rows. Similarity is known
// before the head runs, so if rows that stay have no loss, these are the rows that leave.
Tensor rows_to_score(const ExitQuestion& question, const ExitOptions& options,
                     const Tensor& similarity_N) {
  if (question.teaches || options.confidence != ExitConfidence::kSimilarity) return {};
  if (question.never()) return indices({});
  return (similarity_N.to(at::kDouble) >= question.threshold).nonzero().squeeze(1);
}

// Returns the spec of a parameter in a slice of an exit's head. `parameter` is its index in the
// whole exit.
model::ParameterSpec slice_of_head(const ExitOptions& options, std::int64_t slice,
                                   std::size_t parameter) {
  const cost::HeadRows rows = cost::head_rows(options.vocabulary, options.slices, slice);
  return {
      .name = model::name_of({.matrix = kExitHead, .rows = rows}),
      .shape = {rows.end - rows.begin, options.hidden},
      .init_std = options.head_init_std,
      .piece = model::ParameterSpec::Piece{
          .layers_before = slice, .parameter = parameter, .first = rows.begin * options.hidden}};
}

struct SavedFirst : model::Stash {
  std::unique_ptr<model::Stash> inner;
  Shape tokens;
  Tensor y_ND, inverse_N1;  // of the scored rows; undefined: none
  LearningSlice slice;
  Tensor norm_gradient_D;

  std::optional<Bytes> bytes() const override {
    std::optional<Bytes> total = inner->bytes();
    std::vector<Tensor> own = slice.slice.tensors();
    for (const Tensor& tensor : {y_ND, inverse_N1, norm_gradient_D}) own.push_back(tensor);
    for (const Tensor& tensor : own) {
      if (total && tensor.defined()) *total += Bytes{static_cast<std::int64_t>(tensor.nbytes())};
    }
    return total;
  }
};

// The first slice: the half block, the norm and the first rows of the head.
class FirstExitSlice final : public HalfBlockWithExit {
 public:
  FirstExitSlice(std::shared_ptr<const model::Layer> layer, const ExitOptions& options)
      : HalfBlockWithExit(std::move(layer), options) {}

  std::vector<model::ParameterSpec> parameters() const override {
    std::vector<model::ParameterSpec> specs = inner().parameters();
    specs.push_back(exit_norm(options().hidden));
    specs.push_back(slice_of_head(options(), 0, head()));
    return specs;
  }
  model::Needs needs() const override {
    model::Needs needs = inner().needs();
    needs.targets = true;
    return needs;
  }
  std::int64_t floats_passed() const override { return width_of(options().hidden); }

  model::Output forward(const model::LayerState& state, const model::Hidden& input,
                        const model::LayerContext& context,
                        std::unique_ptr<model::Stash>* stash) const override {
    const at::NoGradGuard no_graph;
    auto saved = std::make_unique<SavedFirst>();
    model::Output output = inner().forward(half_block(state), input, context,
                                           stash == nullptr ? nullptr : &saved->inner);
    saved->tokens = tokens_of(output.hidden.x);
    ExitNumbers numbers{.y_ND = model::rows(output.hidden.x)};
    const Tensor& y_ND = numbers.y_ND;
    const ExitQuestion question = question_for(state, context.pass);
    if (question.asks || question.teaches) {
      if (options().confidence == ExitConfidence::kSimilarity) {
        numbers.similarity_N = similarity(model::rows(input.x), y_ND);
      }
      LearningSlice& slice = saved->slice;
      slice.scored = rows_to_score(question, options(), numbers.similarity_N);
      if (slice.scores_some()) {
        saved->y_ND = some_of(y_ND, slice.scored);
        const auto [n_ND, inverse_N1] =
            kernels::rms_norm(saved->y_ND, model::value(state, norm()), kExitEpsilon);
        saved->inverse_N1 = inverse_N1;
        slice.score(state.parameters[head()], rows(), n_ND,
                    model::targets_of(output.hidden, context), numbers);
      }
    }
    output.hidden.x = pack(numbers, saved->tokens, y_ND.scalar_type());
    if (stash != nullptr) *stash = std::move(saved);
    return output;
  }

  Tensor input_gradient(const model::LayerState& state, model::Stash& stash,
                        const Tensor& output_gradient, InputGradient wanted) const override {
    const at::NoGradGuard no_graph;
    auto& saved = dynamic_cast<SavedFirst&>(stash);
    const at::ScalarType type = model::value(state, head()).scalar_type();
    const ExitNumbers after = unpack(output_gradient, options().hidden);
    Tensor dy_ND = after.y_ND.to(type).contiguous();
    if (saved.y_ND.defined()) {
      const SliceNumbers before = saved.slice.gradient(state.parameters[head()], after.slice);
      const Tensor& scored = saved.slice.scored;
      // If only some rows are scored, they leave, so later layers give them no gradient.
      kernels::NormGradient gradient = kernels::norm_gradient(
          some_of(before.n_ND, scored).to(type).contiguous(), saved.y_ND, saved.inverse_N1,
          model::value(state, norm()), InputGradient::kWanted, scored.defined() ? Tensor() : dy_ND);
      saved.norm_gradient_D = std::move(gradient.weight_D);
      dy_ND = scored.defined() ? dy_ND.index_copy(0, scored, gradient.x_ND) : gradient.x_ND;
    }
    return inner().input_gradient(half_block(state), *saved.inner,
                                  dy_ND.view(with_width(saved.tokens, options().hidden)), wanted);
  }

  void weight_gradient(model::LayerState& state, model::Stash& stash) const override {
    const at::NoGradGuard no_graph;
    auto& saved = dynamic_cast<SavedFirst&>(stash);
    model::LayerState of_inner = half_block(state);
    inner().weight_gradient(of_inner, *saved.inner);
    if (state.frozen || !saved.y_ND.defined()) return;
    const Tensor n_ND = kernels::normed_again(saved.y_ND, saved.inverse_N1,
                                              model::value(state, norm()), kExitEpsilon);
    state.parameters[norm()].gradient.add_(saved.norm_gradient_D);
    saved.slice.add_weight_gradient(state.parameters[head()], n_ND);
  }

 private:
  [[nodiscard]] cost::HeadRows rows() const {
    return cost::head_rows(options().vocabulary, options().slices, 0);
  }
  [[nodiscard]] model::LayerState half_block(const model::LayerState& state) const {
    return inner_state(state, 2, "an exit's first slice");
  }
};

struct SavedExitSlice : model::Saved {
  Shape tokens;
  LearningSlice slice;
  Tensor n_ND;       // of the scored rows; undefined: none
  Tensor weights_N;  // in the last slice: weights of the rows' losses
  Tensor stay;       // ... the rows that stay; undefined: all
  Tensor odds_N1;    // ... gradients of the classifier's sums

  std::vector<Tensor> tensors() const override {
    std::vector<Tensor> all = slice.slice.tensors();
    for (const Tensor& tensor : {n_ND, weights_N, stay, odds_N1}) all.push_back(tensor);
    return all;
  }
};

class ExitSlice final : public model::HandWritten<SavedExitSlice> {
 public:
  ExitSlice(const std::string& block, std::vector<model::ParameterSpec> specs,
            const ExitOptions& options, std::int64_t slice)
      : HandWritten(fmt::format("{}.exit.{} of {}", block, slice, options.slices),
                    std::move(specs)),
        options_(options),
        rows_(cost::head_rows(options.vocabulary, options.slices, slice)),
        is_last_(slice + 1 == options.slices) {}

  std::vector<model::BufferSpec> buffers() const override { return {threshold_buffer()}; }
  std::vector<std::string> figures() const override {
    std::vector<std::string> names;
    if (is_last_) add_exit_figures(names);
    return names;
  }
  model::Needs needs() const override {
    return {.targets = true, .loss = is_last_, .drops_rows = is_last_};
  }
  std::int64_t floats_passed() const override { return is_last_ ? 0 : width_of(options_.hidden); }

 private:
  enum { kHead, kClassifier };  // and the classifier's bias, in the last slice

  model::Output forward(const model::LayerState& state, const model::Hidden& input,
                        const model::LayerContext& context, SavedExitSlice& saved) const override {
    const ExitQuestion question = question_of(state.buffers[0], context.pass, options_);
    saved.tokens = tokens_of(input.x);
    ExitNumbers numbers = unpack(input.x, options_.hidden);
    const at::ScalarType type = model::value(state, kHead).scalar_type();
    if (question.asks || question.teaches) {
      LearningSlice& slice = saved.slice;
      slice.scored = rows_to_score(question, options_, numbers.similarity_N);
      if (slice.scores_some()) {
        saved.n_ND = some_of(numbers.slice.n_ND, slice.scored).to(type).contiguous();
        slice.score(state.parameters[kHead], rows_, saved.n_ND, model::targets_of(input, context),
                    numbers);
      }
    }
    if (is_last_) return leave(state, input, context, question, numbers, saved);
    if (!saved.n_ND.defined()) return {.hidden = input};
    return {.hidden = {pack(numbers, saved.tokens, type), input.rows}};
  }

  // Removes the sure rows, in the last slice.
  model::Output leave(const model::LayerState& state, const model::Hidden& input,
                      const model::LayerContext& context, const ExitQuestion& question,
                      const ExitNumbers& numbers, SavedExitSlice& saved) const {
    const Tensor y_ND = numbers.y_ND.to(model::value(state, kHead).scalar_type()).contiguous();
    const std::int64_t N = y_ND.size(0);
    model::Output output{
        .hidden = {y_ND.view(with_width(saved.tokens, options_.hidden)), input.rows},
        .figures = std::vector<double>(kExitFigures, 0.0)};
    std::vector<double>& own = output.figures;
    own[kExitRows] = static_cast<double>(N);
    const auto tokens = static_cast<double>(context.targets_BT.numel());
    double loss = 0;
    if (question.asks || question.teaches) {
      const std::vector<double> losses = doubles(numbers.slice.log_sum_N - numbers.slice.target_N);
      const std::vector<double> right = doubles(numbers.right_N);
      Tensor odds_N1;
      if (classifies()) odds_N1 = odds(state, kClassifier, saved.n_ND);
      std::vector<double> confidence;
      if (question.asks) confidence = confidences(numbers, odds_N1);
      std::vector<std::int64_t> left;
      std::vector<std::int64_t> stay;
      for (std::size_t n = 0; n < losses.size(); ++n) {
        const bool leaves = !question.never() && confidence[n] >= question.threshold;
        (leaves ? left : stay).push_back(static_cast<std::int64_t>(n));
        if (leaves) loss += losses[n];
        own[kExitLoss] += losses[n];
        own[kExitRight] += right[n];
      }
      for (const double c : confidence) ++own[static_cast<std::size_t>(kExitCounts + exit_bin(c))];
      own[kExitLeft] = static_cast<double>(left.size());
      const Tensor& scored = saved.slice.scored;
      own[kExitScored] = static_cast<double>(scored.defined() ? scored.numel() : N);
      const double share = context.loss_weight / tokens;
      saved.weights_N = at::full({N}, options_.loss * share, numbers.slice.log_sum_N.options());
      saved.weights_N.index_fill_(0, indices(left), share);
      if (classifies()) {
        const Tensor label_N1 = numbers.right_N.unsqueeze(1);
        saved.odds_N1 = (odds_N1 - label_N1).mul_(share);
      }
      if (!left.empty()) {
        saved.stay = indices(stay);
        const Tensor rows_N = input.rows.defined() ? input.rows : at::arange(N, at::kInt);
        output.hidden = {y_ND.index_select(0, saved.stay), rows_N.index_select(0, saved.stay)};
      }
    }
    output.loss = at::scalar_tensor(
        loss / tokens, at::TensorOptions().dtype(kernels::accumulation_type(y_ND.scalar_type())));
    return output;
  }

  [[nodiscard]] bool classifies() const {
    return options_.confidence == ExitConfidence::kClassifier;
  }

  [[nodiscard]] std::vector<double> confidences(const ExitNumbers& numbers,
                                                const Tensor& odds_N1) const {
    if (classifies()) return doubles(odds_N1);
    if (options_.confidence == ExitConfidence::kSimilarity) return doubles(numbers.similarity_N);
    const Tensor& log_sum_N = numbers.slice.log_sum_N;
    return doubles((numbers.best_N - log_sum_N).exp() - (numbers.second_N - log_sum_N).exp());
  }

  Tensor input_gradient(const model::LayerState& state, SavedExitSlice& saved,
                        const Tensor& output_gradient, InputGradient wanted) const override {
    ExitNumbers gradient;
    if (is_last_) {
      Tensor dy_ND = model::rows(output_gradient);
      const at::ScalarType sums = kernels::accumulation_type(dy_ND.scalar_type());
      dy_ND = dy_ND.to(sums);
      if (saved.stay.defined()) {
        gradient.y_ND = at::zeros({saved.weights_N.numel(), options_.hidden}, dy_ND.options());
        gradient.y_ND.index_copy_(0, saved.stay, dy_ND);
      } else {
        gradient.y_ND = dy_ND;
      }
      if (saved.n_ND.defined()) {
        gradient.slice = {
            .n_ND = {}, .log_sum_N = saved.weights_N, .target_N = at::neg(saved.weights_N)};
      }
    } else {
      gradient = unpack(output_gradient, options_.hidden);
    }
    if (saved.n_ND.defined()) {
      gradient.slice = saved.slice.gradient(state.parameters[kHead], gradient.slice);
    }
    const at::ScalarType type = model::value(state, kHead).scalar_type();
    if (saved.odds_N1.defined()) saved.odds_N1 = saved.odds_N1.to(type);
    if (wanted == InputGradient::kNotWanted) return {};
    return pack(gradient, saved.tokens, type);
  }

  void weight_gradient(model::LayerState& state, SavedExitSlice& saved) const override {
    if (!saved.n_ND.defined()) return;
    std::vector<model::Parameter>& p = state.parameters;
    saved.slice.add_weight_gradient(p[kHead], saved.n_ND);
    if (!saved.odds_N1.defined()) return;
    model::add_product(p[kClassifier], saved.odds_N1, saved.n_ND);
    p[kClassifier + 1].gradient.add_(saved.odds_N1.sum(0));
  }

  ExitOptions options_;
  cost::HeadRows rows_;
  bool is_last_;
};

}  // namespace

std::vector<std::shared_ptr<const model::Layer>> exit_slices(
    std::shared_ptr<const model::Layer> inner, const ExitOptions& options) {
  const std::string block = inner->name().substr(0, inner->name().rfind('.'));
  const std::size_t head = inner->parameters().size() + 1;
  std::vector<std::shared_ptr<const model::Layer>> layers;
  layers.push_back(std::make_shared<FirstExitSlice>(std::move(inner), options));
  for (std::int64_t slice = 1; slice < options.slices; ++slice) {
    std::vector<model::ParameterSpec> specs = {slice_of_head(options, slice, head)};
    if (slice + 1 == options.slices && options.confidence == ExitConfidence::kClassifier) {
      add_classifier(options.hidden, specs);
      for (std::size_t i = 1; i < specs.size(); ++i) {
        specs[i].piece = model::ParameterSpec::Piece{.layers_before = slice, .parameter = head + i};
      }
    }
    layers.push_back(std::make_shared<ExitSlice>(block, std::move(specs), options, slice));
  }
  return layers;
}

}  // namespace dynmo::dynamism
