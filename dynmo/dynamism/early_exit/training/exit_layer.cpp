// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/early_exit/training/exit_layer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/early_exit/training/exit_parts_impl.h"
#include "dynmo/dynamism/early_exit/training/exit_scores_impl.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/model/hand_written.h"

namespace dynmo::dynamism {
namespace {

using at::Tensor;

// The head's result for its rows.
struct Scored {
  Tensor probabilities_MV;          // of accumulation_type
  std::vector<double> gap;          // of the two largest
  std::vector<std::int64_t> right;  // 1 or 0, where there are targets
  std::vector<double> loss;         // ... -log of the target's
};

struct SavedExit : model::Stash {
  std::unique_ptr<model::Stash> inner;
  std::vector<std::int64_t> shape;  // of the half block's output
  Tensor stay;                      // its staying rows; undefined: all
  Tensor learn;                     // rows that the head learns from; undefined: all
  Tensor y_MD, inverse_M1;          // of these; undefined: none
  Tensor scores_MV;                 // probabilities; from input_gradient on, their gradient
  Tensor targets_M, weights_M1;     // of the rows in the step's loss
  Tensor odds_M1;                   // the classifier's probabilities; then gradients of its sums
  Tensor norm_gradient_D;

  std::optional<Bytes> bytes() const override {
    std::optional<Bytes> total = inner->bytes();
    for (const Tensor* tensor :
         {&stay, &learn, &y_MD, &inverse_M1, &scores_MV, &weights_M1, &odds_M1, &norm_gradient_D}) {
      if (total && tensor->defined()) *total += Bytes{static_cast<std::int64_t>(tensor->nbytes())};
    }
    return total;
  }
};

template <typename Element>
void read_scores(const Tensor& probabilities_MV, const Tensor& targets_M, Scored& scored) {
  const std::int64_t width = probabilities_MV.size(1);
  const auto* row = kernels::host_data<const Element>(probabilities_MV);
  const auto* target =
      targets_M.defined() ? kernels::host_data<const std::int64_t>(targets_M) : nullptr;
  for (std::int64_t m = 0; m < probabilities_MV.size(0); ++m, row += width) {
    std::int64_t best = 0;
    Element second = 0;
    for (std::int64_t v = 1; v < width; ++v) {
      if (row[v] > row[best]) {
        second = row[best];
        best = v;
      } else {
        second = std::max(second, row[v]);
      }
    }
    scored.gap.push_back(static_cast<double>(row[best] - second));
    if (target == nullptr) continue;
    scored.right.push_back(best == target[m] ? 1 : 0);
    scored.loss.push_back(-std::log(
        static_cast<double>(std::max(row[target[m]], std::numeric_limits<Element>::min()))));
  }
}

class ExitLayer final : public HalfBlockWithExit {
 public:
  ExitLayer(std::shared_ptr<const model::Layer> layer, const ExitOptions& options)
      : HalfBlockWithExit(std::move(layer), options), inner_figures_(inner().figures().size()) {}

  std::vector<model::ParameterSpec> parameters() const override {
    std::vector<model::ParameterSpec> specs = inner().parameters();
    const std::int64_t D = options().hidden;
    specs.push_back(exit_norm(D));
    specs.push_back({.name = kExitHead,
                     .shape = {options().vocabulary, D},
                     .init_std = options().head_init_std});
    if (classifies()) add_classifier(D, specs);
    return specs;
  }
  std::vector<std::string> figures() const override {
    std::vector<std::string> names = inner().figures();
    add_exit_figures(names);
    return names;
  }
  model::Needs needs() const override {
    model::Needs needs = inner().needs();
    needs.targets = needs.loss = needs.drops_rows = true;
    return needs;
  }

  model::Output forward(const model::LayerState& state, const model::Hidden& input,
                        const model::LayerContext& context,
                        std::unique_ptr<model::Stash>* stash) const override {
    const at::NoGradGuard no_graph;
    auto saved = std::make_unique<SavedExit>();
    model::Output output = inner().forward(half_block(state), input, context,
                                           stash == nullptr ? nullptr : &saved->inner);
    saved->shape = output.hidden.x.sizes().vec();
    if (output.hidden.x.is_cpu()) {
      leave(state, input, context, output, *saved, stash != nullptr);
    } else {
      leave_on_device(state, input, context, output, *saved, stash != nullptr);
    }
    if (stash != nullptr) *stash = std::move(saved);
    return output;
  }

  Tensor input_gradient(const model::LayerState& state, model::Stash& stash,
                        const Tensor& output_gradient, InputGradient wanted) const override {
    const at::NoGradGuard no_graph;
    auto& saved = dynamic_cast<SavedExit&>(stash);
    Tensor dy_ND = model::rows(output_gradient);
    if (saved.stay.defined()) {
      dy_ND = at::zeros({count(saved.shape), options().hidden}, output_gradient.options());
      dy_ND.index_copy_(0, saved.stay, model::rows(output_gradient));
    }
    if (saved.y_MD.defined()) add_own(state, saved, dy_ND);
    return inner().input_gradient(half_block(state), *saved.inner, dy_ND.view(saved.shape), wanted);
  }

  void weight_gradient(model::LayerState& state, model::Stash& stash) const override {
    const at::NoGradGuard no_graph;
    auto& saved = dynamic_cast<SavedExit&>(stash);
    model::LayerState of_inner = half_block(state);
    inner().weight_gradient(of_inner, *saved.inner);
    if (state.frozen || !saved.y_MD.defined()) return;
    std::vector<model::Parameter>& p = state.parameters;
    const Tensor n_MD = kernels::normed_again(saved.y_MD, saved.inverse_M1,
                                              model::value(state, norm()), kExitEpsilon);
    p[norm()].gradient.add_(saved.norm_gradient_D);
    model::add_product(p[head()], saved.scores_MV, n_MD);
    if (!saved.odds_M1.defined()) return;
    model::add_product(p[classifier()], saved.odds_M1, n_MD);
    p[classifier() + 1].gradient.add_(saved.odds_M1.sum(0));
  }

 private:
  [[nodiscard]] std::size_t classifier() const { return head() + 1; }

  static std::int64_t count(const std::vector<std::int64_t>& shape) {
    return shape.size() == 3 ? shape[0] * shape[1] : shape[0];
  }

  [[nodiscard]] model::LayerState half_block(const model::LayerState& state) const {
    return inner_state(state, classifies() ? 4 : 2, "an exit");
  }

  void leave(const model::LayerState& state, const model::Hidden& input,
             const model::LayerContext& context, model::Output& output, SavedExit& saved,
             bool learns) const {
    const bool training = context.pass == model::Pass::kTraining;
    const ExitQuestion question = question_for(state, context.pass);
    const double threshold = question.threshold;
    const bool never = question.never();
    const bool asks = question.asks;
    const bool teaches = question.teaches;
    const Tensor y_ND = model::rows(output.hidden.x);
    const std::int64_t N = y_ND.size(0);
    std::vector<double> own(kExitFigures, 0.0);
    own[kExitRows] = static_cast<double>(N);
    double loss = 0;
    if (asks || teaches) {
      Scored scored;
      const auto [n_ND, inverse_N1] =
          kernels::rms_norm(y_ND, model::value(state, norm()), kExitEpsilon);
      Tensor targets_N;
      if (context.targets_BT.defined()) targets_N = model::targets_of(output.hidden, context);
      // The head scores all rows, or else only those that leave.
      const bool all = teaches || (training && classifies()) ||
                       (asks && options().confidence == ExitConfidence::kGap);
      Tensor raw_NV;
      if (all) scored = score(state, n_ND, targets_N, raw_NV);
      Tensor odds_N1;
      if (classifies()) odds_N1 = odds(state, classifier(), n_ND);
      const std::vector<double> confidence =
          asks ? confidences(input, y_ND, scored, odds_N1) : std::vector<double>();
      std::vector<std::int64_t> left;
      std::vector<std::int64_t> stay;
      for (std::int64_t n = 0; n < N; ++n) {
        const bool leaves = asks && confidence[static_cast<std::size_t>(n)] >= threshold;
        (leaves && !never ? left : stay).push_back(n);
      }
      for (const double c : confidence) ++own[static_cast<std::size_t>(kExitCounts + exit_bin(c))];
      own[kExitLeft] = static_cast<double>(left.size());
      const Tensor left_L = indices(left);
      if (!all && !left.empty()) {
        const Tensor some_ND = n_ND.index_select(0, left_L);
        const Tensor targets = targets_N.defined() ? targets_N.index_select(0, left_L) : targets_N;
        scored = score(state, some_ND, targets, raw_NV);
      }
      for (std::size_t m = 0; m < scored.loss.size(); ++m) {
        own[kExitLoss] += scored.loss[m];
        own[kExitRight] += static_cast<double>(scored.right[m]);
      }
      own[kExitScored] = static_cast<double>(scored.loss.size());
      if (targets_N.defined()) {
        for (std::size_t i = 0; i < left.size(); ++i) {
          loss += scored.loss[all ? static_cast<std::size_t>(left[i]) : i];
        }
        loss /= static_cast<double>(context.targets_BT.numel());
      } else if (!left.empty()) {
        output.left_scores = all ? raw_NV.index_select(0, left_L) : raw_NV;
        output.left_rows =
            (output.hidden.rows.defined() ? output.hidden.rows : at::arange(N, at::kInt))
                .index_select(0, left_L);
      }
      if (training && learns) {
        save(context, all, left_L, y_ND, inverse_N1, targets_N, scored.probabilities_MV,
             at::tensor(scored.right, at::kLong), odds_N1, saved);
      }
      if (!left.empty()) {
        saved.stay = indices(stay);
        const Tensor rows_N =
            output.hidden.rows.defined() ? output.hidden.rows : at::arange(N, at::kInt);
        output.hidden = {y_ND.index_select(0, saved.stay), rows_N.index_select(0, saved.stay)};
      }
    }
    if (!context.targets_BT.defined()) return;  // generating text
    const Tensor term = at::scalar_tensor(
        loss, at::TensorOptions().dtype(kernels::accumulation_type(y_ND.scalar_type())));
    output.loss = output.loss.defined() ? output.loss + term : term;
    output.figures.resize(inner_figures_, 0.0);
    output.figures.insert(output.figures.end(), own.begin(), own.end());
  }

  // Like leave(), on a device. All figures but the first two are read later.
  void leave_on_device(const model::LayerState& state, const model::Hidden& input,
                       const model::LayerContext& context, model::Output& output, SavedExit& saved,
                       bool learns) const {
    const bool training = context.pass == model::Pass::kTraining;
    const ExitQuestion question = question_for(state, context.pass);
    const Tensor y_ND = model::rows(output.hidden.x);
    const std::int64_t N = y_ND.size(0);
    DYNMO_CHECK(context.targets_BT.defined(), "{} with targets", name());
    const auto tokens = static_cast<double>(context.targets_BT.numel());
    const at::ScalarType wide = kernels::accumulation_type(y_ND.scalar_type());
    Tensor term = at::zeros({}, y_ND.options().dtype(wide));
    ScoresOnDevice scores;
    Tensor confidence_N;
    std::int64_t left = 0;
    if ((question.asks || question.teaches) && N > 0) {
      const auto [n_ND, inverse_N1] =
          kernels::rms_norm(y_ND, model::value(state, norm()), kExitEpsilon);
      const Tensor targets_N = model::targets_of(output.hidden, context);
      const auto score = [&](const Tensor& n_MD, const Tensor& targets_M) {
        return scores_on_device(model::times(state.parameters[head()], n_MD), targets_M);
      };
      const bool all = question.teaches || (training && classifies()) ||
                       options().confidence == ExitConfidence::kGap;
      if (all) scores = score(n_ND, targets_N);
      Tensor odds_N1;
      if (classifies()) odds_N1 = odds(state, classifier(), n_ND);
      if (question.asks) {
        confidence_N = scores.gap_M;
        if (classifies()) confidence_N = odds_N1.squeeze(1);
        if (options().confidence == ExitConfidence::kSimilarity) {
          confidence_N = similarity(model::rows(input.x), y_ND);
        }
      }
      RowsByLeaving rows;
      if (!question.never()) {
        rows = divide_by(confidence_N, question.threshold);
        left = rows.left.numel();
      }
      if (left > 0) {
        if (!all) {
          scores = score(n_ND.index_select(0, rows.left), targets_N.index_select(0, rows.left));
        }
        const Tensor loss_L = all ? scores.loss_M.index_select(0, rows.left) : scores.loss_M;
        term = loss_L.sum().div_(tokens).to(wide);
        saved.stay = rows.stay;
        const Tensor rows_N = output.hidden.rows.defined()
                                  ? output.hidden.rows
                                  : at::arange(N, y_ND.options().dtype(at::kInt));
        output.hidden = {y_ND.index_select(0, rows.stay), rows_N.index_select(0, rows.stay)};
      }
      if (training && learns) {
        save(context, all, rows.left, y_ND, inverse_N1, targets_N, scores.probabilities_MV,
             scores.right_M, odds_N1, saved);
      }
    }
    output.loss = output.loss.defined() ? output.loss + term : term;
    if (!training) return;
    if (!output.later_figures.defined()) output.figures.resize(inner_figures_, 0.0);
    model::add_figures(output, {static_cast<double>(N), static_cast<double>(left)},
                       figures_on_device(scores, confidence_N, y_ND.device()));
  }

  // Scores rows. Without targets, sets `raw_MV` to the scores before softmax.
  [[nodiscard]] Scored score(const model::LayerState& state, const Tensor& n_MD,
                             const Tensor& targets_M, Tensor& raw_MV) const {
    Scored scored;
    Tensor scores_MV = model::times(state.parameters[head()], n_MD)
                           .to(kernels::accumulation_type(n_MD.scalar_type()));
    if (!targets_M.defined()) raw_MV = scores_MV.clone();
    (void)kernels::cross_entropy(
        scores_MV, targets_M.defined() ? targets_M : at::zeros({n_MD.size(0)}, at::kLong),
        std::max<std::int64_t>(n_MD.size(0), 1));
    if (scores_MV.scalar_type() == at::kDouble) {
      read_scores<double>(scores_MV, targets_M, scored);
    } else {
      read_scores<float>(scores_MV, targets_M, scored);
    }
    scored.probabilities_MV = std::move(scores_MV);
    return scored;
  }

  [[nodiscard]] std::vector<double> confidences(const model::Hidden& input, const Tensor& y_ND,
                                                const Scored& scored, const Tensor& odds_N1) const {
    if (options().confidence == ExitConfidence::kGap) return scored.gap;
    Tensor each_N = odds_N1;
    if (options().confidence == ExitConfidence::kSimilarity) {
      each_N = similarity(model::rows(input.x), y_ND);
    }
    return doubles(each_N);
  }

  // Saves the values from which head and classifier learn. `left` may be undefined. `right_N` has
  // all rows if the classifier learns.
  void save(const model::LayerContext& context, bool all, const Tensor& left, const Tensor& y_ND,
            const Tensor& inverse_N1, const Tensor& targets_N, const Tensor& probabilities_MV,
            const Tensor& right_N, const Tensor& odds_N1, SavedExit& saved) const {
    const bool some = left.defined() && left.numel() > 0;
    // The classifier learns from all rows.
    const bool from_all = all && (options().loss > 0 || classifies());
    if (y_ND.size(0) == 0 || (!from_all && !some)) return;
    const double share = context.loss_weight / static_cast<double>(context.targets_BT.numel());
    const auto wide = probabilities_MV.options();
    if (from_all) {
      saved.y_MD = y_ND;
      saved.inverse_M1 = inverse_N1;
      saved.scores_MV = probabilities_MV;
      saved.targets_M = targets_N;
      saved.weights_M1 = at::full({y_ND.size(0), 1}, options().loss * share, wide);
      if (some) saved.weights_M1.index_fill_(0, left, share);
      if (classifies()) {
        saved.odds_M1 = (odds_N1 - right_N.unsqueeze(1).to(odds_N1.scalar_type())).mul_(share);
      }
      return;
    }
    saved.learn = left;
    saved.y_MD = y_ND.index_select(0, left);
    saved.inverse_M1 = inverse_N1.index_select(0, left);
    saved.scores_MV = all ? probabilities_MV.index_select(0, left) : probabilities_MV;
    saved.targets_M = targets_N.index_select(0, left);
    saved.weights_M1 = at::full({left.numel(), 1}, share, wide);
  }

  // Adds the gradient of the exit's own loss to that of the half block's output.
  void add_own(const model::LayerState& state, SavedExit& saved, Tensor& dy_ND) const {
    const Tensor targets_M1 = saved.targets_M.unsqueeze(1);
    saved.scores_MV.scatter_add_(1, targets_M1,
                                 at::full(targets_M1.sizes(), -1.0, saved.scores_MV.options()));
    saved.scores_MV.mul_(saved.weights_M1);
    const at::ScalarType type = model::compute_value(state.parameters[head()]).scalar_type();
    saved.scores_MV = saved.scores_MV.to(type);
    if (saved.odds_M1.defined()) saved.odds_M1 = saved.odds_M1.to(type);
    const Tensor dn_MD = model::times_transposed(state.parameters[head()], saved.scores_MV);
    // If only some rows learn, they have left, so later layers give them no gradient.
    kernels::NormGradient gradient =
        kernels::norm_gradient(dn_MD, saved.y_MD, saved.inverse_M1, model::value(state, norm()),
                               InputGradient::kWanted, saved.learn.defined() ? Tensor() : dy_ND);
    saved.norm_gradient_D = std::move(gradient.weight_D);
    saved.targets_M.reset();
    saved.weights_M1.reset();
    if (saved.learn.defined()) {
      dy_ND.index_copy_(0, saved.learn, gradient.x_ND);
    } else {
      dy_ND = gradient.x_ND;
    }
  }

  std::size_t inner_figures_;
};

}  // namespace

std::shared_ptr<const model::Layer> exit_layer(std::shared_ptr<const model::Layer> inner,
                                               const ExitOptions& options) {
  DYNMO_CHECK(options.hidden > 0 && options.vocabulary > 0 && options.loss >= 0,
              "sizes of an exit's head, got {} x {}", options.vocabulary, options.hidden);
  return std::make_shared<ExitLayer>(std::move(inner), options);
}

std::vector<std::shared_ptr<const model::Layer>> exit_layers(
    std::shared_ptr<const model::Layer> inner, const ExitOptions& options) {
  if (options.slices > 1) return exit_slices(std::move(inner), options);
  return {exit_layer(std::move(inner), options)};
}

bool has_exit(const model::Layer& layer) {
  return has_threshold(layer) && layer.needs().drops_rows;
}

bool has_threshold(const model::Layer& layer) {
  return std::ranges::any_of(layer.buffers(),
                             [](const model::BufferSpec& spec) { return spec.name == kThreshold; });
}

void set_threshold(model::LayerState& state, float threshold) {
  const auto found =
      std::ranges::find(state.buffers, std::string_view(kThreshold), &model::Buffer::name);
  DYNMO_CHECK(found != state.buffers.end(), "a layer with an exit, got layer {}", state.id);
  found->value.fill_(threshold);
}

model::LayerState without_leaving(model::LayerState state) {
  for (model::Buffer& buffer : state.buffers) {
    if (buffer.name == kThreshold) buffer.value = at::full_like(buffer.value, kNeverLeaves);
  }
  return state;
}

}  // namespace dynmo::dynamism
