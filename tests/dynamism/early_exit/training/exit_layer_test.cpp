// SPDX-License-Identifier: Apache-2.0
// Exits: which rows leave, what they and the others lose and learn, against a dense composition in
// fp64 in which rows that have left are masked; and thresholds from counts.
#include "dynmo/dynamism/early_exit/training/exit_layer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "dynmo/core/rng.h"
#include "dynmo/model/moe.h"
#include "dynmo/model/recompute.h"
#include "tests/model/experts_formula.h"
#include "tests/model/helpers.h"

namespace dynmo::model {
namespace {

using dynamism::exit_bin;
using dynamism::exit_layer;
using dynamism::ExitConfidence;
using dynamism::has_exit;
using dynamism::kExitBins;
using dynamism::kExitCounts;
using dynamism::kExitFigures;
using dynamism::kExitLeft;
using dynamism::kExitRows;
using dynamism::kNeverLeaves;
using dynamism::set_threshold;
using dynamism::threshold_for;

using testing::plain_attention;
using testing::plain_mlp;
using testing::plain_norm;
using testing::random_tensor;

constexpr std::int64_t kSequences = 3;

struct ExitCase {
  ExitConfidence confidence = ExitConfidence::kGap;
  double loss = 0.1;
  float threshold = 0.1F;
  bool recomputes = false;
  std::optional<MoeRouter> experts = {};  // in the place of MLPs
  double capacity_factor = 0;
};
void PrintTo(const ExitCase& c, std::ostream* out) {
  *out << "confidence " << static_cast<int>(c.confidence) << ", loss " << c.loss << ", threshold "
       << c.threshold << (c.recomputes ? ", recomputed" : "");
  if (c.experts) {
    *out << ", router " << static_cast<int>(*c.experts) << ", capacity " << c.capacity_factor;
  }
}

MoeConfig experts_of(const ExitCase& c) {
  return {.router = {.router = *c.experts,
                     .experts = 4,
                     .top_k = 2,
                     .capacity_factor = c.capacity_factor,
                     .drop = MoeDrop::kProbability,
                     .aux_loss = *c.experts == MoeRouter::kTopK ? 0.3 : 0,
                     .z_loss = 0.05}};
}

// Embedding, three blocks with an exit behind the first two, head.
struct ExitModel {
  LlamaConfig config = testing::tiny_config();
  Model layers;
  std::vector<LayerState> states;

  explicit ExitModel(const ExitCase& c) {
    config.shape.blocks = 3;
    layers = make_llama(config);
    for (const std::size_t i : {2, 4, 6}) {
      if (!c.experts) continue;
      layers[i] = dynamic_cast<const TakesExperts&>(*layers[i]).with(experts_of(c));
    }
    for (const std::size_t i : {2, 4}) {
      layers[i] = exit_layer(layers[i], {.hidden = config.shape.hidden,
                                         .vocabulary = config.shape.vocabulary,
                                         .confidence = c.confidence,
                                         .loss = c.loss});
      if (c.recomputes) layers[i] = recomputed(layers[i]);
    }
    for (std::size_t i = 0; i < layers.size(); ++i) {
      states.push_back(testing::double_state(*layers[i], LayerId(static_cast<int>(i)), 11 + i));
      if (has_exit(*layers[i])) set_threshold(states.back(), c.threshold);
      for (Buffer& buffer : states.back().buffers) {
        if (buffer.name != kMoeBias) continue;
        buffer.value.copy_(random_tensor(buffer.value.sizes(), 40 + i).mul_(0.2));
      }
    }
  }
};

LayerContext exit_context(const ExitModel& model) {
  LayerContext context = testing::random_context(model.config.shape, kSequences, 9);
  context.sequences = kSequences;
  context.sequence_length = model.config.shape.sequence;
  context.loss_weight = 0.25;
  return context;
}

struct ExitRun {
  double loss = 0;
  std::vector<at::Tensor> rows;  // that are still here behind each layer, as flags
  std::vector<std::vector<double>> figures;
};

// Forward and, with gradients in the states, back.
ExitRun run(ExitModel& model, const LayerContext& context) {
  ExitRun result;
  std::vector<std::unique_ptr<Stash>> stashes(model.layers.size());
  Hidden hidden;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    const Output output = model.layers[i]->forward(model.states[i], hidden, context, &stashes[i]);
    hidden = output.hidden;
    if (output.loss.defined()) result.loss += output.loss.item<double>();
    at::Tensor here = at::ones({context.tokens_BT.numel()}, at::kBool);
    if (hidden.rows.defined()) {
      here.zero_();
      here.index_fill_(0, hidden.rows.to(at::kLong), true);
    }
    result.rows.push_back(here);
    result.figures.push_back(output.figures);
  }
  at::Tensor gradient;
  for (std::size_t i = model.layers.size(); i-- > 0;) {
    gradient = model.layers[i]->input_gradient(model.states[i], *stashes[i], gradient,
                                               Layer::InputGradient::kWanted);
    model.layers[i]->weight_gradient(model.states[i], *stashes[i]);
  }
  return result;
}

// The rows that are here choose among themselves; the others pass.
testing::ExpertsFormula plain_experts(const ExitModel& model, const ExitCase& c, std::size_t layer,
                                      const std::vector<at::Tensor>& p, const at::Tensor& x,
                                      const at::Tensor& here) {
  const at::Tensor places = here.nonzero().flatten();
  if (places.numel() == 0) return {.output = x, .losses = at::zeros({}, at::kDouble)};
  at::Tensor bias;
  if (*c.experts == MoeRouter::kBias) {
    bias = model.states[layer].buffers.front().value.to(at::kDouble);
  }
  const at::Tensor all = x.view({here.numel(), -1});
  testing::ExpertsFormula made = testing::experts_formula(
      experts_of(c).router, p, all.index_select(0, places), bias, model.config.rms_epsilon);
  made.output = all.index_copy(0, places, made.output).view(x.sizes());
  return made;
}

struct PlainLoss {
  at::Tensor learned;    // what gradients are of
  at::Tensor predicted;  // of the model's predictions
};

// The same model, dense: every row goes all the way, and counts where it left.
PlainLoss plain_loss(const ExitModel& model, const ExitCase& c,
                     const std::vector<std::vector<at::Tensor>>& p, const LayerContext& context,
                     const std::vector<at::Tensor>& rows) {
  const auto B = context.tokens_BT.size(0);
  const auto T = context.tokens_BT.size(1);
  const double tokens = static_cast<double>(B * T);
  const at::Tensor targets = context.targets_BT.view(-1);
  const auto losses_of = [&](const at::Tensor& x, const at::Tensor& norm, const at::Tensor& head,
                             double epsilon) {
    const at::Tensor n = plain_norm(x, norm, epsilon).view({B * T, -1});
    return -at::log_softmax(n.matmul(head.t()), -1).gather(1, targets.unsqueeze(1)).squeeze(1);
  };
  PlainLoss loss{at::zeros({}, at::kDouble), at::zeros({}, at::kDouble)};
  at::Tensor x = p[0][0].index({context.tokens_BT});
  at::Tensor here = at::ones({B * T}, at::kBool);
  for (std::size_t i = 1; i + 1 < model.layers.size(); ++i) {
    if (i % 2 == 1) {
      x = x + plain_attention(model.config, p[i], x, here.view({B, T}));
      continue;
    }
    if (c.experts) {
      const auto made = plain_experts(model, c, i, p[i], x, here);
      x = made.output;
      loss.learned = loss.learned + made.losses;
    } else {
      x = x + plain_mlp(model.config, p[i], x);
    }
    if (!has_exit(*model.layers[i])) continue;
    const bool classifies = c.confidence == ExitConfidence::kClassifier;
    const std::size_t norm = p[i].size() - (classifies ? 4 : 2);  // of the exit
    const at::Tensor each = losses_of(x, p[i][norm], p[i][norm + 1], 1e-5);
    const at::Tensor stays = rows[i];
    const at::Tensor leaves = here.logical_and(stays.logical_not());
    loss.predicted = loss.predicted + (each * leaves).sum() / tokens;
    loss.learned =
        loss.learned + (each * leaves).sum() / tokens + c.loss * (each * stays).sum() / tokens;
    if (classifies) {
      const at::Tensor n = plain_norm(x, p[i][norm], 1e-5).view({B * T, -1}).detach();
      const at::Tensor right =
          n.matmul(p[i][norm + 1].detach().t()).argmax(-1).eq(targets).to(at::kDouble);
      const at::Tensor odds = at::sigmoid(n.matmul(p[i][norm + 2].t()).squeeze(1) + p[i][norm + 3]);
      const at::Tensor entropy = -(right * odds.log() + (1 - right) * (1 - odds).log());
      loss.learned = loss.learned + (entropy * here).sum() / tokens;
    }
    here = stays;
  }
  const at::Tensor last = losses_of(x, p.back()[0], p.back()[1], model.config.rms_epsilon);
  loss.predicted = loss.predicted + (last * here).sum() / tokens;
  loss.learned = loss.learned + (last * here).sum() / tokens;
  return loss;
}

class Exits : public ::testing::TestWithParam<ExitCase> {};

TEST_P(Exits, AreTheMaskedDenseCompositionForwardAndBack) {
  const ExitCase& c = GetParam();
  ExitModel model(c);
  const LayerContext context = exit_context(model);
  const ExitRun ours = run(model, context);
  std::vector<std::vector<at::Tensor>> leaves;
  std::vector<at::Tensor> all;
  for (const LayerState& state : model.states) {
    auto& own = leaves.emplace_back();
    for (const Parameter& parameter : state.parameters) {
      own.push_back(parameter.value.clone().set_requires_grad(true));
      all.push_back(own.back());
    }
  }
  const PlainLoss plain = plain_loss(model, c, leaves, context, ours.rows);
  EXPECT_NEAR(ours.loss, plain.predicted.item<double>(), 1e-12);
  const auto gradients = torch::autograd::grad(
      {plain.learned}, all, {at::full({}, context.loss_weight, at::kDouble)},
      /*retain_graph=*/c10::nullopt, /*create_graph=*/false, /*allow_unused=*/true);
  std::size_t next = 0;
  for (const LayerState& state : model.states) {
    for (const Parameter& parameter : state.parameters) {
      const at::Tensor expected =
          gradients[next].defined() ? gradients[next] : at::zeros_like(parameter.gradient);
      ++next;
      EXPECT_TRUE(at::allclose(parameter.gradient, expected, 1e-10, 1e-12))
          << "layer " << state.id.value << " " << parameter.name << ": off by "
          << (parameter.gradient - expected).abs().max().item<double>();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Exits,
    ::testing::Values(ExitCase{}, ExitCase{.loss = 0}, ExitCase{.threshold = 0},
                      ExitCase{.threshold = 0.5F, .recomputes = true},
                      ExitCase{.threshold = kNeverLeaves},
                      ExitCase{.confidence = ExitConfidence::kSimilarity, .threshold = 0.8F},
                      ExitCase{
                          .confidence = ExitConfidence::kSimilarity, .loss = 0, .threshold = 0.8F},
                      ExitCase{.confidence = ExitConfidence::kClassifier, .threshold = 0.5F},
                      ExitCase{.confidence = ExitConfidence::kClassifier,
                               .loss = 0,
                               .threshold = 0.5F,
                               .recomputes = true}));

std::vector<ExitCase> cases_with_experts() {
  std::vector<ExitCase> cases;
  for (int router = 0; router < 5; ++router) {
    const auto experts = static_cast<MoeRouter>(router);
    cases.push_back({.experts = experts, .capacity_factor = 0.8});
    cases.push_back({.confidence = ExitConfidence::kSimilarity,
                     .loss = 0,
                     .threshold = 0.8F,
                     .recomputes = true,
                     .experts = experts});
    cases.push_back({.threshold = 0, .experts = experts});
  }
  cases.push_back({.confidence = ExitConfidence::kClassifier,
                   .threshold = 0.5F,
                   .experts = MoeRouter::kTopK,
                   .capacity_factor = 1.2});
  cases.push_back({.threshold = kNeverLeaves, .experts = MoeRouter::kTopK});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(OfExperts, Exits, ::testing::ValuesIn(cases_with_experts()));

// Behind an exit the figures of experts are of the rows that came: no rows, no losses.
TEST(ExitLayer, OfExpertsCountsTheRowsThatCame) {
  for (int router = 0; router < 5; ++router) {
    for (const float threshold : {0.0F, 0.1F}) {
      ExitModel model(ExitCase{.threshold = threshold,
                               .experts = static_cast<MoeRouter>(router),
                               .capacity_factor = 0.8});
      const ExitRun result = run(model, exit_context(model));
      double rows = 30;
      for (const std::size_t i : {2, 4, 6}) {
        const std::vector<double>& figures = result.figures[i];
        ASSERT_EQ(figures.size(), model.layers[i]->figures().size());
        EXPECT_EQ(figures[kMoeTokens], rows);
        EXPECT_EQ(figures[kMoeMicroBatches], rows > 0 ? 1 : 0);
        double assigned = 0;
        for (std::size_t e = 0; e < 4; ++e) assigned += figures[kMoeCounts + e];
        // The capacity of an expert is a share of these rows, 0.8 x 2 rows / 4 rounded up.
        const double capacity = std::ceil(0.4 * rows);
        const bool choose = static_cast<MoeRouter>(router) == MoeRouter::kExpertChoice;
        EXPECT_EQ(assigned, choose ? 4 * capacity : 2 * rows) << "router " << router;
        EXPECT_LE(assigned - figures[kMoeDropped], 4 * capacity);
        EXPECT_EQ(figures[kMoeZLoss] > 0, rows > 0);
        if (rows == 0) {
          EXPECT_EQ(figures[kMoeAuxLoss], 0);
        }
        if (i < 6) rows -= figures[figures.size() - kExitFigures + kExitLeft];
      }
      EXPECT_EQ(rows == 0, threshold == 0);
      EXPECT_LT(rows, 30);
    }
  }
}

TEST(ExitLayer, CountsEveryTokenWhereItLeaves) {
  for (const float threshold : {0.0F, 0.05F, 0.3F, kNeverLeaves}) {
    ExitModel model(ExitCase{.threshold = threshold});
    const ExitRun result = run(model, exit_context(model));
    const auto& first = result.figures[2];
    const auto& second = result.figures[4];
    EXPECT_EQ(first[kExitRows], 30);
    EXPECT_EQ(second[kExitRows], 30 - first[kExitLeft]);
    EXPECT_EQ(result.rows.back().numel() > 0, true);
    EXPECT_EQ(result.rows[5].sum().item<double>(), 30 - first[kExitLeft] - second[kExitLeft]);
    double counted = 0;
    for (int bin = 0; bin < kExitBins; ++bin) {
      counted += first[static_cast<std::size_t>(kExitCounts + bin)];
    }
    EXPECT_EQ(counted, 30);
    if (threshold == 0) {
      EXPECT_EQ(first[kExitLeft], 30);
      EXPECT_TRUE(std::isfinite(result.loss));
    }
    if (threshold == kNeverLeaves) {
      EXPECT_EQ(first[kExitLeft], 0);
    }
  }
}

// Whether a token leaves depends on those before it alone.
TEST(ExitLayer, LeavesTheSameOfATextHoweverItGoesOn) {
  ExitModel model(ExitCase{.threshold = 0.1F});
  LayerContext context = exit_context(model);
  const std::int64_t T = context.sequence_length;
  const at::Tensor before = run(model, context).rows[4].view({kSequences, T});
  for (std::int64_t cut = 1; cut < T; ++cut) {
    LayerContext other = context;
    other.tokens_BT = context.tokens_BT.clone();
    other.tokens_BT.narrow(1, cut, T - cut).fill_(cut % 7);
    const at::Tensor after = run(model, other).rows[4].view({kSequences, T});
    EXPECT_TRUE(at::equal(before.narrow(1, 0, cut), after.narrow(1, 0, cut))) << cut;
  }
}

TEST(ExitLayer, ThatNeverLetsGoAndTeachesNothingIsItsHalfBlock) {
  const LlamaConfig config = testing::tiny_config();
  const auto plain = make_llama(config)[2];
  const auto layer = exit_layer(
      plain, {.hidden = config.shape.hidden, .vocabulary = config.shape.vocabulary, .loss = 0});
  const LayerState state = make_state(*plain, LayerId(2), 3);
  LayerState with_exit = make_state(*layer, LayerId(2), 3);
  const LayerContext context = testing::random_context(config.shape, kSequences, 2);
  const at::Tensor x = random_tensor({kSequences, 10, 24}, 1, at::kFloat);
  const Output output = layer->forward(with_exit, x, context, nullptr);
  EXPECT_TRUE(
      testing::same_bits(output.hidden.x, plain->forward(state, x, context, nullptr).hidden.x));
  EXPECT_FALSE(output.hidden.rows.defined());
  EXPECT_EQ(output.loss.item<double>(), 0);
}

TEST(ExitLayer, GivesTheScoresOfWhatLeavesInGeneration) {
  ExitModel model(ExitCase{.threshold = 0.1F});
  LayerContext context = exit_context(model);
  const ExitRun trained = run(model, context);
  context.pass = Pass::kGeneration;
  context.targets_BT = at::Tensor();
  Hidden hidden;
  std::int64_t scored = 0;
  for (std::size_t i = 0; i + 1 < model.layers.size(); ++i) {
    const Output output = model.layers[i]->forward(model.states[i], hidden, context, nullptr);
    hidden = output.hidden;
    if (!output.left_rows.defined()) continue;
    scored += output.left_rows.numel();
    EXPECT_EQ(output.left_scores.sizes(),
              (std::vector<std::int64_t>{output.left_rows.numel(), model.config.shape.vocabulary}));
  }
  const std::int64_t left = hidden.rows.defined() ? hidden.rows.numel() : 30;
  EXPECT_EQ(scored + left, 30);
  EXPECT_GT(scored, 0);
  EXPECT_GT(left, 0);
  EXPECT_EQ(trained.rows[5].sum().item<std::int64_t>(), left);
}

TEST(ExitThresholds, LieAboveTheWantedShare) {
  std::vector<double> counts(kExitBins, 0.0);
  EXPECT_EQ(threshold_for(counts, 0.5), kNeverLeaves);
  Rng rng(4);
  std::vector<double> drawn;
  for (int i = 0; i < 20000; ++i) {
    drawn.push_back(std::pow(rng.uniform(), 3));
    ++counts[static_cast<std::size_t>(exit_bin(drawn.back()))];
  }
  EXPECT_EQ(threshold_for(counts, 0), kNeverLeaves);
  for (const double share : {0.001, 0.1, 0.25, 0.5, 0.9, 0.99}) {
    const double threshold = threshold_for(counts, share);
    const auto above = std::ranges::count_if(drawn, [&](double c) { return c >= threshold; });
    EXPECT_NEAR(static_cast<double>(above) / 20000, share, 0.01) << share;
  }
  EXPECT_LE(threshold_for(counts, 1), *std::ranges::min_element(drawn) + 1e-6);
}

TEST(ExitThresholds, BinsAscendFromNothingToCertain) {
  EXPECT_EQ(exit_bin(0), 0);
  EXPECT_EQ(exit_bin(-1), 0);
  EXPECT_EQ(exit_bin(std::nan("")), 0);
  EXPECT_EQ(exit_bin(0.5), 32);
  EXPECT_EQ(exit_bin(1), kExitBins - 1);
  int last = 0;
  for (double confidence = 0; confidence <= 1; confidence += 1e-5) {
    ASSERT_GE(exit_bin(confidence), last);
    last = exit_bin(confidence);
  }
}

}  // namespace
}  // namespace dynmo::model
