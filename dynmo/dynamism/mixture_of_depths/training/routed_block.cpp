// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/mixture_of_depths/training/routed_block.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/dynamism/mixture_of_depths/options.h"
#include "dynmo/kernels/generic.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/kernels/select_top.h"
#include "dynmo/model/forwarding_layer.h"
#include "dynmo/model/key_value_cache.h"
#include "dynmo/model/ragged_rows.h"

namespace dynmo::dynamism {
namespace {

// Dimensions: B sequences of T rows, N = B x T, C chosen of each, D hidden, P of the predictor.

using at::Tensor;
using model::LayerState;

enum RoutedPart : std::uint64_t { kAttentionPart = 1, kMlpPart };  // of the layer's random key

// Indexes of the parameters behind those of the two halves.
enum { kRouter, kUp, kUpBias, kDown, kDownBias, kOwnParameters };

struct RoutedStash final : model::Stash {
  Tensor x_ND;       // the predictor's input
  Tensor inner_NP;   // ... of its activation
  Tensor slope_N;    // of the loss, by the predictor's logits
  Tensor rows_M;     // chosen ones: b T + t
  Tensor chosen_MD;  // x of them; attention has it, too
  Tensor update_MD;  // g(X) - X
  Tensor weight_M;   // sigmoid of the score
  Tensor score_gradient_M;
  std::unique_ptr<model::Stash> attention;
  std::unique_ptr<model::Stash> mlp;
  bool input_done = false;

  std::optional<Bytes> bytes() const override {
    Bytes total;
    for (const auto* half : {&attention, &mlp}) {
      if (*half == nullptr) continue;
      const auto own = (*half)->bytes();
      if (!own) return std::nullopt;
      total += *own;
    }
    for (const Tensor* tensor :
         {&x_ND, &inner_NP, &slope_N, &rows_M, &update_MD, &weight_M, &score_gradient_M}) {
      if (tensor->defined()) total += Bytes{static_cast<std::int64_t>(tensor->nbytes())};
    }
    return total;
  }
};

// Computes x w of each row. The order of its sum is fixed, so a row's score does not depend on the
// number of rows.
template <typename Element>
Tensor row_products(const Tensor& x_ND, const Tensor& w_D) {
  constexpr std::int64_t kLanes = 16;
  const Tensor out_N = at::empty({x_ND.size(0)}, x_ND.options());
  const std::int64_t width = x_ND.size(1);
  const auto* x = kernels::host_data<const Element>(x_ND);
  const auto* w = kernels::host_data<const Element>(w_D);
  auto* out = kernels::host_data<Element>(out_N);
  for (std::int64_t n = 0; n < x_ND.size(0); ++n, x += width) {
    std::array<Element, kLanes> sums{};
    std::int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        sums[static_cast<std::size_t>(lane)] += x[d + lane] * w[d + lane];
      }
    }
    for (; d < width; ++d) sums[static_cast<std::size_t>(d % kLanes)] += x[d] * w[d];
    Element sum = 0;
    for (const Element lane : sums) sum += lane;
    out[n] = sum;
  }
  return out_N;
}

Tensor scores_of(const Tensor& x_ND, const Tensor& w_D) {
  DYNMO_CHECK(x_ND.is_contiguous(), "contiguous rows, got {}", x_ND.size(0));
  if (!x_ND.is_cpu()) return at::mv(x_ND, w_D);
  return x_ND.scalar_type() == at::kDouble ? row_products<double>(x_ND, w_D)
                                           : row_products<float>(x_ND, w_D);
}

Tensor tensor_of(std::span<const std::int64_t> numbers) {
  Tensor tensor = at::empty({std::ssize(numbers)}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), kernels::host_data<std::int64_t>(tensor));
  return tensor;
}

Tensor flat(const Tensor& x_BTD) { return x_BTD.reshape({-1, x_BTD.size(-1)}); }

class RoutedBlock final : public model::Layer {
 public:
  RoutedBlock(std::string name, std::shared_ptr<const Layer> attention,
              std::shared_ptr<const Layer> mlp, std::int64_t hidden, double capacity)
      : name_(std::move(name)),
        attention_(std::move(attention)),
        mlp_(std::move(mlp)),
        attention_parameters_(attention_->parameters().size()),
        mlp_parameters_(mlp_->parameters().size()),
        mlp_buffers_(mlp_->buffers().size()),
        hidden_(hidden),
        capacity_(capacity) {
    DYNMO_CHECK(capacity > 0 && capacity <= 1, "a capacity above 0 and at most 1, got {}",
                capacity);
  }

  std::string name() const override { return name_; }
  std::vector<std::string> figures() const override {
    std::vector<std::string> names = mlp_->figures();
    for (std::string& name : depths_figures()) names.push_back(std::move(name));
    return names;
  }
  std::vector<model::BufferSpec> buffers() const override { return mlp_->buffers(); }

  std::vector<model::ParameterSpec> parameters() const override {
    constexpr double kStd = 0.02;
    std::vector<model::ParameterSpec> all = attention_->parameters();
    for (model::ParameterSpec& spec : mlp_->parameters()) all.push_back(std::move(spec));
    const std::int64_t inner = predictor_size(hidden_);
    const auto add = [&](const char* name, std::vector<std::int64_t> shape, double init_std,
                         double mean = 0) {
      all.push_back({.name = name,
                     .shape = std::move(shape),
                     .init_std = init_std,
                     .mean = mean,
                     .weight_decay = init_std > 0});
    };
    add("router.weight", {hidden_}, kStd);
    add("predictor.up.weight", {inner, hidden_}, kStd);
    add("predictor.up.bias", {inner}, 0);
    add("predictor.down.weight", {inner}, kStd);
    // The logit of the mean share of chosen rows.
    const double share = std::clamp(capacity_, 0.01, 0.99);
    add("predictor.down.bias", {1}, 0, std::log(share / (1 - share)));
    return all;
  }

  model::Output forward(const LayerState& state, const model::Hidden& input,
                        const model::LayerContext& context,
                        std::unique_ptr<model::Stash>* stash) const override {
    DYNMO_CHECK(!input.rows.defined() && input.x.dim() == 3,
                "{}: whole sequences, got {} dimensions", name_, input.x.dim());
    const at::NoGradGuard no_graph;
    const Tensor x_ND = flat(input.x).to(own(state, kRouter).scalar_type());
    if (context.pass == model::Pass::kGeneration) return generated(state, input.x, x_ND, context);
    RoutedStash saved;
    const Tensor score_N = scores_of(x_ND, own(state, kRouter));
    saved.x_ND = flat(input.x);
    saved.rows_M = top_of(score_N, input.x.size(0), input.x.size(1));
    Tensor sums;
    if (context.pass == model::Pass::kTraining) {
      sums = predict(state, x_ND, context.loss_weight, saved);
    }
    model::Output output{.hidden = input.x.clone()};
    model::Output mlp =
        route(state, input.x, saved.rows_M, saved.rows_M.remainder(input.x.size(1)), score_N,
              context, stash == nullptr ? nullptr : &saved, output.hidden.x);
    if (context.pass == model::Pass::kTraining) {
      output.figures = std::move(mlp.figures);
      output.later_figures = std::move(mlp.later_figures);
      add_depths_figures(output, x_ND.size(0), saved.rows_M.numel(), sums);
    }
    if (stash != nullptr) *stash = std::make_unique<RoutedStash>(std::move(saved));
    return output;
  }

  Tensor input_gradient(const LayerState& state, model::Stash& stash, const Tensor& output_gradient,
                        InputGradient wanted) const override {
    const at::NoGradGuard no_graph;
    auto& saved = dynamic_cast<RoutedStash&>(stash);
    DYNMO_CHECK(!saved.input_done && saved.rows_M.defined(),
                "{}: input_gradient, then weight_gradient, once per stash", name_);
    saved.input_done = true;
    const Tensor dy_MD = flat(output_gradient).index_select(0, saved.rows_M);
    const Tensor w_M = saved.weight_M;
    saved.score_gradient_M =
        (dy_MD.to(w_M.scalar_type()) * saved.update_MD).sum(1).mul_(w_M).mul_(1 - w_M);
    saved.update_MD.reset();
    const Tensor update_gradient_MD = (dy_MD * w_M.unsqueeze(1)).to(dy_MD.scalar_type());
    const std::int64_t sequences = output_gradient.size(0);
    const Tensor inner_BCD =
        mlp_->input_gradient(mlp_state(state), *saved.mlp,
                             update_gradient_MD.view({sequences, -1, hidden_}), kWantedAlways);
    const Tensor x_BCD =
        attention_->input_gradient(attention_state(state), *saved.attention, inner_BCD, wanted);
    saved.weight_M.reset();
    Tensor gradient;
    if (wanted == InputGradient::kWanted) {
      const Tensor through_router_MD =
          at::outer(saved.score_gradient_M, own(state, kRouter)).to(dy_MD.scalar_type());
      const Tensor dx_MD = (dy_MD - update_gradient_MD).add_(flat(x_BCD)).add_(through_router_MD);
      gradient = output_gradient.contiguous().clone();
      flat(gradient).index_copy_(0, saved.rows_M, dx_MD);
    }
    if (state.frozen) clear(saved);
    return gradient;
  }

  void weight_gradient(LayerState& state, model::Stash& stash) const override {
    const at::NoGradGuard no_graph;
    auto& saved = dynamic_cast<RoutedStash&>(stash);
    DYNMO_CHECK(saved.input_done && (state.frozen || saved.rows_M.defined()),
                "{}: input_gradient, then weight_gradient, once per stash", name_);
    if (!state.frozen) {
      LayerState attention = attention_state(state);
      attention_->weight_gradient(attention, *saved.attention);
      LayerState mlp = mlp_state(state);
      mlp_->weight_gradient(mlp, *saved.mlp);
      const auto type = own(state, kRouter).scalar_type();
      gradient(state, kRouter).add_(at::mv(saved.chosen_MD.to(type).t(), saved.score_gradient_M));
      add_predictor_gradients(state, saved, saved.x_ND.to(type));
    }
    clear(saved);
  }

 private:
  static constexpr InputGradient kWantedAlways = InputGradient::kWanted;

  [[nodiscard]] std::size_t index(std::size_t i) const {
    return attention_parameters_ + mlp_parameters_ + i;
  }
  // Returns an own parameter, which is fp32 even if the halves compute in bf16.
  [[nodiscard]] const Tensor& own(const LayerState& state, std::size_t i) const {
    DYNMO_CHECK(state.parameters.size() == index(kOwnParameters), "{} parameters for {}, got {}",
                index(kOwnParameters), name_, state.parameters.size());
    return state.parameters[index(i)].value;
  }
  [[nodiscard]] Tensor& gradient(LayerState& state, std::size_t i) const {
    return state.parameters[index(i)].gradient;
  }

  // Returns the part of the state that one half uses. Tensors are shared.
  static LayerState part_of(const LayerState& state, std::size_t first, std::size_t count,
                            RoutedPart part) {
    const auto begin = state.parameters.begin() + static_cast<std::ptrdiff_t>(first);
    return {.id = state.id,
            .parameters = {begin, begin + static_cast<std::ptrdiff_t>(count)},
            .optimizer_steps = state.optimizer_steps,
            .random_key = mix_key({part, state.random_key}),
            .frozen = state.frozen};
  }
  [[nodiscard]] LayerState attention_state(const LayerState& state) const {
    return part_of(state, 0, attention_parameters_, kAttentionPart);
  }
  [[nodiscard]] LayerState mlp_state(const LayerState& state) const {
    LayerState part = part_of(state, attention_parameters_, mlp_parameters_, kMlpPart);
    const auto first = state.buffers.begin();
    part.buffers.assign(first, first + static_cast<std::ptrdiff_t>(mlp_buffers_));
    return part;
  }

  static void clear(RoutedStash& saved) {
    saved = RoutedStash();
    saved.input_done = true;
  }

  // Returns the routed_tokens() rows with the highest scores of each sequence, ascending.
  [[nodiscard]] Tensor top_of(const Tensor& score_N, std::int64_t sequences,
                              std::int64_t tokens) const {
    const Tensor wide_N = score_N.to(at::kFloat);
    const std::int64_t count = routed_tokens(capacity_, tokens);
    if (!wide_N.is_cpu()) {
      const Tensor places_BC = kernels::generic::select_top(wide_N.view({sequences, -1}), count);
      const Tensor first_B = at::arange(sequences, places_BC.options()).mul_(tokens);
      return (places_BC + first_B.unsqueeze(1)).flatten();
    }
    const std::span<const float> scores(kernels::host_data<const float>(wide_N),
                                        static_cast<std::size_t>(wide_N.numel()));
    std::vector<std::int64_t> rows;
    for (std::int64_t b = 0; b < sequences; ++b) {
      const auto own =
          scores.subspan(static_cast<std::size_t>(b * tokens), static_cast<std::size_t>(tokens));
      for (const std::int64_t t : kernels::select_top(own, count)) rows.push_back(b * tokens + t);
    }
    return tensor_of(rows);
  }

  // Runs the halves on the chosen rows, and writes those rows of `out_BTD`. Returns the MLP's
  // output.
  model::Output route(const LayerState& state, const Tensor& x_BTD, const Tensor& rows_M,
                      const Tensor& positions_M, const Tensor& score_N,
                      const model::LayerContext& context, RoutedStash* saved,
                      Tensor& out_BTD) const {
    const std::int64_t sequences = x_BTD.size(0);
    const Tensor chosen_MD = flat(x_BTD).index_select(0, rows_M);
    const auto stash_of = [&](std::unique_ptr<model::Stash> RoutedStash::*half) {
      return saved == nullptr ? nullptr : &(saved->*half);
    };
    const model::Hidden inner = model::forward_at(*attention_, attention_state(state),
                                                  chosen_MD.view({sequences, -1, hidden_}),
                                                  positions_M.view({sequences, -1}), context,
                                                  stash_of(&RoutedStash::attention))
                                    .hidden;
    model::Output outer =
        mlp_->forward(mlp_state(state), inner, context, stash_of(&RoutedStash::mlp));
    const Tensor weight_M = score_N.index_select(0, rows_M).sigmoid_();
    const Tensor update_MD = flat(outer.hidden.x) - chosen_MD;
    const Tensor made_MD =
        (update_MD * weight_M.unsqueeze(1)).to(chosen_MD.scalar_type()).add_(chosen_MD);
    flat(out_BTD).index_copy_(0, rows_M, made_MD);
    if (saved != nullptr) {
      saved->chosen_MD = chosen_MD;
      saved->update_MD = update_MD;
      saved->weight_M = weight_M;
    }
    return outer;
  }

  // Runs the rows that the predictor chooses. Sequences run separately, because their numbers of
  // rows differ.
  [[nodiscard]] model::Output generated(const LayerState& state, const Tensor& x_BTD,
                                        const Tensor& x_ND,
                                        const model::LayerContext& context) const {
    const std::int64_t before = context.cache == nullptr ? 0 : context.cache->tokens();
    DYNMO_CHECK(context.cache == nullptr || x_BTD.size(0) == 1,
                "{}: a cache of one sequence, got {}", name_, x_BTD.size(0));
    const Tensor score_N = scores_of(x_ND, own(state, kRouter));
    const Tensor logit_N = logits_of(state, x_ND).second;
    const std::int64_t tokens = x_BTD.size(1);
    Tensor out_BTD = x_BTD.clone();
    for (std::int64_t b = 0; b < x_BTD.size(0); ++b) {
      const Tensor rows_M = logit_N.narrow(0, b * tokens, tokens).gt(0).nonzero().flatten();
      if (rows_M.numel() == 0) continue;
      Tensor out_1TD = out_BTD.narrow(0, b, 1);
      (void)route(state, x_BTD.narrow(0, b, 1), rows_M, rows_M + before,
                  score_N.narrow(0, b * tokens, tokens), context, nullptr, out_1TD);
    }
    return {.hidden = out_BTD};
  }

  // Returns the predictor's inner values and logits.
  [[nodiscard]] std::pair<Tensor, Tensor> logits_of(const LayerState& state,
                                                    const Tensor& x_ND) const {
    Tensor inner_NP = at::addmm(own(state, kUpBias), x_ND, own(state, kUp).t());
    Tensor logit_N = at::mv(at::silu(inner_NP), own(state, kDown)).add_(own(state, kDownBias));
    return {std::move(inner_NP), std::move(logit_N)};
  }

  // Returns the figures from kPredictedRows on, fp64. The predictor's loss is a mean over the rows.
  [[nodiscard]] Tensor predict(const LayerState& state, const Tensor& x_ND, double loss_weight,
                               RoutedStash& saved) const {
    auto [inner_NP, logit_N] = logits_of(state, x_ND);
    const std::int64_t count = x_ND.size(0);
    Tensor chosen_N = at::zeros({count}, logit_N.options());
    chosen_N.index_fill_(0, saved.rows_M, 1);
    const Tensor loss_N = at::binary_cross_entropy_with_logits(logit_N, chosen_N, {}, {}, 0);
    const Tensor says_N = logit_N.gt(0);
    saved.inner_NP = std::move(inner_NP);
    saved.slope_N = (logit_N.sigmoid() - chosen_N).mul_(loss_weight / static_cast<double>(count));
    return at::stack({says_N.sum(at::kDouble), says_N.eq(chosen_N.gt(0)).sum(at::kDouble),
                      loss_N.sum(at::kDouble)});
  }

  // Adds depths_figures(), of which predict() has made `sums`.
  static void add_depths_figures(model::Output& output, std::int64_t rows, std::int64_t chosen,
                                 const Tensor& sums) {
    std::vector<double> figures = {static_cast<double>(rows), static_cast<double>(chosen)};
    if (!sums.is_cpu()) return model::add_figures(output, figures, sums);
    const auto* own = kernels::host_data<const double>(sums);
    figures.insert(figures.end(), own, own + sums.numel());
    model::add_figures(output, figures, {});
  }

  void add_predictor_gradients(LayerState& state, const RoutedStash& saved,
                               const Tensor& x_ND) const {
    gradient(state, kDownBias).add_(saved.slope_N.sum());
    gradient(state, kDown).add_(at::mv(at::silu(saved.inner_NP).t(), saved.slope_N));
    const Tensor inner_gradient_NP =
        at::silu_backward(at::outer(saved.slope_N, own(state, kDown)), saved.inner_NP);
    gradient(state, kUpBias).add_(inner_gradient_NP.sum(0));
    gradient(state, kUp).addmm_(inner_gradient_NP.t(), x_ND);
  }

  std::string name_;
  std::shared_ptr<const Layer> attention_;
  std::shared_ptr<const Layer> mlp_;
  std::size_t attention_parameters_;
  std::size_t mlp_parameters_;
  std::size_t mlp_buffers_;
  std::int64_t hidden_;
  double capacity_;
};

}  // namespace

std::vector<std::string> depths_figures() {
  return {"rows", "chosen", "predicted", "right", "predictor_loss"};
}

std::shared_ptr<const model::Layer> routed_block(std::string name,
                                                 std::shared_ptr<const model::Layer> attention,
                                                 std::shared_ptr<const model::Layer> mlp,
                                                 std::int64_t hidden, double capacity) {
  return std::make_shared<RoutedBlock>(std::move(name), std::move(attention), std::move(mlp),
                                       hidden, capacity);
}

}  // namespace dynmo::dynamism
