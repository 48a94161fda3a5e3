// SPDX-License-Identifier: Apache-2.0
// Mixture of depths: what a routed block does to which rows, its gradients against autograd and
// central differences, and the load model against the block's work.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/mixture_of_depths/load.h"
#include "dynmo/dynamism/mixture_of_depths/training/routed_block.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/kernels/select_top.h"
#include "dynmo/model/moe.h"
#include "tests/dynamism/shapes.h"
#include "tests/model/experts_formula.h"
#include "tests/model/gradients.h"
#include "tests/model/helpers.h"
#include "tests/model/stash_bytes.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

using at::Tensor;
using dynamism::MixtureOfDepthsOptions;
using model::testing::index_of;
using model::testing::random_tensor;
using model::testing::same_bits;

constexpr std::int64_t kHidden = 24;  // of the tiny decoders

std::shared_ptr<const model::Layer> routed_of(const model::Model& layers, double capacity) {
  return dynamism::routed_block("blocks.0", layers[1], layers[2],
                                layers[1]->parameters().front().shape.front(), capacity);
}

// b T + t of the rows with the highest scores.
std::vector<std::int64_t> rows_of(const model::LayerState& state, const model::Layer& layer,
                                  const Tensor& x_BTD, double capacity) {
  const Tensor scores_BT =
      x_BTD.to(at::kDouble)
          .matmul(state.parameters[index_of(layer, "router.weight")].value.to(at::kDouble))
          .to(at::kFloat);
  const std::int64_t tokens = x_BTD.size(1);
  std::vector<std::int64_t> rows;
  for (std::int64_t b = 0; b < x_BTD.size(0); ++b) {
    const Tensor own = scores_BT[b].contiguous();
    const std::span<const float> scores(own.const_data_ptr<float>(),
                                        static_cast<std::size_t>(tokens));
    for (const std::int64_t t :
         kernels::select_top(scores, dynamism::routed_tokens(capacity, tokens))) {
      rows.push_back(b * tokens + t);
    }
  }
  return rows;
}

struct Decoder {
  const char* name;
  model::Model (*make)();
};
const std::vector<Decoder> kDecoders = {
    {"llama", [] { return model::make_llama(model::testing::tiny_config()); }},
    {"gpt2", [] { return model::make_gpt2(model::testing::tiny_gpt2()); }}};

TEST(RoutedBlock, LetsTheOtherRowsPassBitForBitAndTheirGradientsToo) {
  for (const Decoder& decoder : kDecoders) {
    const auto layer = routed_of(decoder.make(), 0.3);
    model::LayerState state = model::make_state(*layer, LayerId(1), 3);
    const Tensor x = random_tensor({3, 10, kHidden}, 5, at::kFloat);
    const Tensor slope = random_tensor({3, 10, kHidden}, 6, at::kFloat);
    std::unique_ptr<model::Stash> stash;
    const model::Output output = layer->forward(state, x, {}, &stash);
    const Tensor gradient =
        layer->input_gradient(state, *stash, slope, model::Layer::InputGradient::kWanted);
    const std::vector<std::int64_t> chosen = rows_of(state, *layer, x, 0.3);
    ASSERT_EQ(chosen.size(), 3U * 3);
    for (std::int64_t row = 0; row < 30; ++row) {
      const bool is_chosen = std::ranges::count(chosen, row) > 0;
      const auto same = [&](const Tensor& a, const Tensor& b) {
        return same_bits(a.view({30, kHidden})[row], b.view({30, kHidden})[row]);
      };
      EXPECT_EQ(same(output.hidden.x, x), !is_chosen) << decoder.name << ", row " << row;
      EXPECT_EQ(same(gradient, slope), !is_chosen) << decoder.name << ", row " << row;
    }
  }
}

TEST(RoutedBlock, OfAllRowsAtFullWeightIsTheDenseBlock) {
  for (const Decoder& decoder : kDecoders) {
    const model::Model layers = decoder.make();
    const auto layer = routed_of(layers, 1);
    model::LayerState state = model::testing::double_state(*layer, LayerId(1), 4);
    // Every score is far above 0, where the sigmoid is 1.
    const Tensor x = random_tensor({2, 10, kHidden}, 5).abs_().add_(0.1);
    state.parameters[index_of(*layer, "router.weight")].value.fill_(100);
    const Tensor ours = layer->forward(state, x, {}, nullptr).hidden.x;
    model::LayerState attention = state;
    attention.parameters.resize(layers[1]->parameters().size());
    model::LayerState mlp = state;
    mlp.parameters.assign(
        state.parameters.begin() + static_cast<std::ptrdiff_t>(attention.parameters.size()),
        state.parameters.begin() + static_cast<std::ptrdiff_t>(attention.parameters.size() +
                                                               layers[2]->parameters().size()));
    const model::Hidden inner = layers[1]->forward(attention, x, {}, nullptr).hidden;
    const Tensor dense = layers[2]->forward(mlp, inner, {}, nullptr).hidden.x;
    EXPECT_TRUE(at::allclose(ours, dense, 1e-12, 1e-12)) << decoder.name;
  }
}

// The formula of routed_block.h for the Llama family, with nothing of its layers: explicit mask and
// softmax, rotation by the positions that rows had, cross entropy of the predictor on a detached x.
// The MLP may be one of experts: their losses act in the gradients alone.
struct RoutedFormula {
  Tensor output;
  Tensor losses;
};

RoutedFormula formula(const model::LlamaConfig& c, const std::vector<Tensor>& p,
                      const Tensor& x_BTD, const Tensor& rows_M,
                      const model::RouterOptions* experts = nullptr, const Tensor& bias = {}) {
  const std::int64_t B = x_BTD.size(0);
  const std::int64_t T = x_BTD.size(1);
  const std::int64_t C = rows_M.numel() / B;
  const Tensor flat = x_BTD.view({-1, c.shape.hidden});
  const Tensor x = flat.index_select(0, rows_M).view({B, C, c.shape.hidden});
  const auto norm = [&](const Tensor& y, const Tensor& weight) {
    return y / (y.pow(2).mean(-1, true) + c.rms_epsilon).sqrt() * weight;
  };
  const std::int64_t K = c.head_size();
  const Tensor angle = rows_M.remainder(T).to(at::kDouble).view({B, 1, C, 1}) *
                       at::pow(c.rope.theta, at::arange(0, K, 2, at::kDouble) / -double(K));
  const Tensor both = at::cat({angle, angle}, -1);
  const auto turned = [&](const Tensor& y) {
    const auto halves = y.chunk(2, -1);
    return y * both.cos() + at::cat({-halves[1], halves[0]}, -1) * both.sin();
  };
  const Tensor n = norm(x, p[0]);
  const auto heads = [&](const Tensor& w, std::int64_t count) {
    return n.matmul(w.t()).view({B, C, count, K}).transpose(1, 2);
  };
  const std::int64_t group = c.shape.heads / c.shape.kv_heads;
  const Tensor q = turned(heads(p[1], c.shape.heads));
  const Tensor k = turned(heads(p[2], c.shape.kv_heads)).repeat_interleave(group, 1);
  const Tensor v = heads(p[3], c.shape.kv_heads).repeat_interleave(group, 1);
  const Tensor scores = (q.matmul(k.transpose(2, 3)) / std::sqrt(double(K)))
                            .masked_fill(at::ones({C, C}, at::kBool).triu(1), -INFINITY);
  const Tensor mixed = at::softmax(scores, -1).matmul(v).transpose(1, 2).reshape(x.sizes());
  const Tensor h = x + mixed.matmul(p[4].t());
  Tensor y;
  Tensor losses = at::zeros({}, at::kDouble);
  if (experts != nullptr) {
    const auto made = model::testing::experts_formula(*experts, {p.begin() + 5, p.end() - 5}, h,
                                                      bias, c.rms_epsilon);
    y = made.output;
    losses = made.losses;
  } else {
    const Tensor m = norm(h, p[5]);
    const Tensor gate = m.matmul(p[6].t());
    y = h + (gate * at::sigmoid(gate) * m.matmul(p[7].t())).matmul(p[8].t());
  }
  const Tensor& router = p[p.size() - 5];
  const Tensor r = at::sigmoid(flat.matmul(router)).index_select(0, rows_M).view({B, C, 1});
  return {.output = flat.index_copy(0, rows_M, (x + r * (y - x)).view({-1, c.shape.hidden}))
                        .view(x_BTD.sizes()),
          .losses = losses};
}

Tensor predictor_loss(const std::vector<Tensor>& p, const Tensor& x_BTD, const Tensor& rows_M) {
  const Tensor x = x_BTD.detach().view({-1, x_BTD.size(2)});
  const std::size_t first = p.size() - 4;
  const Tensor inner = x.matmul(p[first].t()) + p[first + 1];
  const Tensor logits = (inner * at::sigmoid(inner)).matmul(p[first + 2]) + p[first + 3];
  const Tensor chosen = at::zeros_like(logits).index_fill(0, rows_M, 1);
  return at::binary_cross_entropy_with_logits(logits, chosen);
}

TEST(RoutedBlock, HasTheGradientsOfAutogradByThePredictorsLossToo) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const model::LlamaConfig config = model::testing::tiny_config();
    // Two rows and more: one alone has no gradient of its query.
    const double capacity = 0.2 + 0.08 * static_cast<double>(seed % 11);
    const auto layer = routed_of(model::make_llama(config), capacity);
    model::LayerState state = model::testing::double_state(*layer, LayerId(1), seed);
    const Tensor x = random_tensor({3, 10, kHidden}, mix_key({seed, 1}));
    const Tensor slope = random_tensor({3, 10, kHidden}, mix_key({seed, 2}));
    constexpr double kLossWeight = 0.25;
    model::LayerContext context;
    context.loss_weight = kLossWeight;
    const Tensor rows = at::tensor(rows_of(state, *layer, x, capacity), at::kLong);
    const model::testing::Gradients ours =
        model::testing::by_three_calls(*layer, state, x, context, slope);
    EXPECT_TRUE(at::allclose(ours.output,
                             formula(
                                 config,
                                 [&] {
                                   std::vector<Tensor> values;
                                   for (const auto& p : state.parameters) values.push_back(p.value);
                                   return values;
                                 }(),
                                 x, rows)
                                 .output,
                             1e-11, 1e-11))
        << "seed " << seed;
    const model::testing::Gradients plain = model::testing::by_autograd(
        state, x, at::ones({}, at::kDouble),
        [&](const std::vector<Tensor>& p, const Tensor& input) {
          return (formula(config, p, input, rows).output * slope).sum() +
                 kLossWeight * predictor_loss(p, input, rows);
        });
    EXPECT_TRUE(at::allclose(ours.input, plain.input, 1e-9, 1e-11)) << "seed " << seed;
    ASSERT_EQ(ours.parameters.size(), plain.parameters.size());
    for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
      EXPECT_TRUE(at::allclose(ours.parameters[i], plain.parameters[i], 1e-9, 1e-11))
          << state.parameters[i].name << ", seed " << seed;
      EXPECT_GT(plain.parameters[i].abs().max().item<double>(), 0) << state.parameters[i].name;
    }
  }
}

// Experts in a routed block are given the chosen rows: capacities and losses are those of as many.
TEST(RoutedBlock, OfExpertsHasTheGradientsOfAutograd) {
  const model::LlamaConfig config = model::testing::tiny_config();
  const model::Model layers = model::make_llama(config);
  for (int router = 0; router < 5; ++router) {
    for (const double capacity : {0.2, 0.6}) {
      model::MoeConfig moe{.router = {.router = static_cast<model::MoeRouter>(router),
                                      .experts = 4,
                                      .capacity_factor = capacity > 0.5 ? 0.8 : 0,
                                      .z_loss = 0.05}};
      if (router == 0) moe.router.aux_loss = 0.3;
      const auto mlp = dynamic_cast<const model::TakesExperts&>(*layers[2]).with(moe);
      const auto layer = dynamism::routed_block("blocks.0", layers[1], mlp, kHidden, capacity);
      model::LayerState state = model::testing::double_state(*layer, LayerId(1), 3);
      Tensor bias;
      for (model::Buffer& buffer : state.buffers) {
        buffer.value.copy_(random_tensor(buffer.value.sizes(), 7).mul_(0.2));
        bias = buffer.value.to(at::kDouble);
      }
      const Tensor x = random_tensor({3, 10, kHidden}, 21);
      const Tensor slope = random_tensor({3, 10, kHidden}, 22);
      model::LayerContext context;
      context.loss_weight = 0.25;
      const Tensor rows = at::tensor(rows_of(state, *layer, x, capacity), at::kLong);
      const auto ours = model::testing::by_three_calls(*layer, state, x, context, slope);
      Tensor output;
      const auto plain = model::testing::by_autograd(
          state, x, at::ones({}, at::kDouble),
          [&](const std::vector<Tensor>& p, const Tensor& input) {
            const RoutedFormula made = formula(config, p, input, rows, &moe.router, bias);
            output = made.output.detach();
            Tensor total =
                (made.output * slope).sum() + 0.25 * (made.losses + predictor_loss(p, input, rows));
            // (Autograd wants all to be used, and an expert may get no row.)
            for (const Tensor& parameter : p) total = total + 0 * parameter.sum();
            return total;
          });
      const std::string what = fmt::format("router {}, capacity {}", router, capacity);
      EXPECT_TRUE(at::allclose(ours.output, output, 1e-11, 1e-11)) << what;
      EXPECT_TRUE(at::allclose(ours.input, plain.input, 1e-9, 1e-11)) << what;
      for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
        EXPECT_TRUE(at::allclose(ours.parameters[i], plain.parameters[i], 1e-9, 1e-11))
            << state.parameters[i].name << ", " << what;
      }
      const std::vector<double> figures = layer->forward(state, x, context, nullptr).figures;
      ASSERT_EQ(figures.size(), layer->figures().size());
      const auto chosen = static_cast<double>(rows.numel());
      EXPECT_EQ(figures[model::kMoeTokens], chosen);
      EXPECT_EQ(figures[figures.size() - dynamism::kDepthsFigures + dynamism::kChosenRows], chosen);
    }
  }
}

// At a selection that stays: no two scores of these inputs are near each other.
TEST(RoutedBlock, HasTheGradientsOfCentralDifferences) {
  for (const Decoder& decoder : kDecoders) {
    const auto layer = routed_of(decoder.make(), 0.4);
    model::LayerState state = model::testing::double_state(*layer, LayerId(1), 5);
    const Tensor x = random_tensor({3, 10, kHidden}, 21);
    const Tensor slope = random_tensor({3, 10, kHidden}, 31);
    const model::testing::Gradients ours =
        model::testing::by_three_calls(*layer, state, x, {}, slope);
    const auto loss = [&] {
      return (layer->forward(state, x, {}, nullptr).hidden.x * slope).sum().item<double>();
    };
    const std::vector<std::int64_t> rows = rows_of(state, *layer, x, 0.4);
    std::vector<Tensor> moved = {x};
    std::vector<Tensor> slopes = {ours.input};
    // (The predictor's parameters have a loss of their own.)
    for (std::size_t p = 0; p <= index_of(*layer, "router.weight"); ++p) {
      moved.push_back(state.parameters[p].value);
      slopes.push_back(ours.parameters[p]);
    }
    for (std::size_t i = 0; i < moved.size(); ++i) {
      const Tensor direction = random_tensor(moved[i].sizes(), 100 + i);
      constexpr double kStep = 1e-6;
      moved[i].add_(direction, kStep);
      const double above = loss();
      ASSERT_EQ(rows_of(state, *layer, x, 0.4), rows);
      moved[i].add_(direction, -2 * kStep);
      const double below = loss();
      ASSERT_EQ(rows_of(state, *layer, x, 0.4), rows);
      moved[i].add_(direction, kStep);
      const double expected = (slopes[i] * direction).sum().item<double>();
      EXPECT_NEAR((above - below) / (2 * kStep), expected, 1e-5 * std::max(1.0, std::abs(expected)))
          << decoder.name << ", tensor " << i;
      EXPECT_NE(expected, 0) << decoder.name << ", tensor " << i;
    }
  }
}

TEST(RoutedBlock, TellsHowOftenThePredictorIsRight) {
  const model::LlamaConfig config = model::testing::tiny_config();
  const auto layer = routed_of(model::make_llama(config), 0.3);
  model::LayerState state = model::testing::double_state(*layer, LayerId(1), 5);
  const Tensor x = random_tensor({3, 10, kHidden}, 21);
  const std::vector<double> figures = layer->forward(state, x, {}, nullptr).figures;
  ASSERT_EQ(figures.size(), layer->figures().size());
  std::vector<Tensor> p;
  for (const auto& parameter : state.parameters) p.push_back(parameter.value);
  const Tensor rows = at::tensor(rows_of(state, *layer, x, 0.3), at::kLong);
  EXPECT_EQ(figures[dynamism::kRows], 30);
  EXPECT_EQ(figures[dynamism::kChosenRows], 9);
  EXPECT_NEAR(figures[dynamism::kPredictorLoss], 30 * predictor_loss(p, x, rows).item<double>(),
              1e-9);
  const auto says = [&](double logit) {
    state.parameters[index_of(*layer, "predictor.down.weight")].value.zero_();
    state.parameters[index_of(*layer, "predictor.down.bias")].value.fill_(logit);
    return layer->forward(state, x, {}, nullptr).figures;
  };
  EXPECT_EQ(says(1)[dynamism::kPredictedRows], 30);
  EXPECT_EQ(says(1)[dynamism::kRightRows], 9);
  EXPECT_EQ(says(-1)[dynamism::kPredictedRows], 0);
  EXPECT_EQ(says(-1)[dynamism::kRightRows], 21);
}

TEST(RoutedBlock, SavesWhatItSaysItDoesAndLittleOfTheRowsThatPass) {
  model::LlamaConfig config = small_model();
  config.shape.sequence = 64;
  config.dropout = 0;
  const model::Model layers = model::make_llama(config);
  const auto layer = routed_of(layers, 0.125);
  const model::LayerState state = model::make_state(*layer, LayerId(1), 3);
  const Tensor x = random_tensor({2, 64, 32}, 5, at::kFloat);
  std::unique_ptr<model::Stash> stash;
  (void)layer->forward(state, x, {}, &stash);
  const auto bytes = [&](int i) {
    const model::LayerState own =
        model::make_state(*layers[static_cast<std::size_t>(i)], LayerId(i), 3);
    return model::measure_stash(*layers[static_cast<std::size_t>(i)], own, x, {}).held.value;
  };
  EXPECT_EQ(stash->bytes()->value, model::measure_stash(*layer, state, x, {}).held.value);
  // An eighth of the two halves, x, and the predictor's values.
  EXPECT_LT(static_cast<double>(stash->bytes()->value),
            0.25 * static_cast<double>(bytes(1) + bytes(2)) + 2 * 64 * 32 * 4);
}

TEST(MixtureOfDepthsSource, MakesOneLayerOfEveryOtherBlock) {
  for (const auto& [options, wanted] :
       std::vector<std::pair<MixtureOfDepthsOptions, std::vector<std::string>>>{
           {{},
            {"embedding", "blocks.0.attention", "blocks.0.mlp", "blocks.1", "blocks.2.attention",
             "blocks.2.mlp", "head"}},
           {{.every = 1, .first_block = 1},
            {"embedding", "blocks.0.attention", "blocks.0.mlp", "blocks.1", "blocks.2", "head"}}}) {
    model::Recipe recipe = model::decoder_recipe(model::make_llama(small_model()));
    ASSERT_TRUE(dynamism::make_mixture_of_depths_source(options)->shape(recipe));
    std::vector<std::string> names;
    for (const auto& [place, layer] : recipe.slots) names.push_back(layer->name());
    EXPECT_EQ(names, wanted);
    EXPECT_EQ(recipe.slots[3].place, (model::Place{model::Part::kBlock, 1}));
    EXPECT_EQ(model::checkpoint_name(small_model(), recipe.slots[3].place, "router.weight"),
              "model.layers.1.router.weight");
  }
}

TEST(MixtureOfDepthsSource, PrunesNeitherRouterNorPredictor) {
  const auto layer = routed_of(model::make_llama(small_model()), 0.5);
  std::set<std::string> prunable;
  for (const auto& spec : layer->parameters()) {
    if (spec.prunable) prunable.insert(spec.name);
  }
  EXPECT_EQ(prunable.size(), 7U);
  for (const std::string& name : prunable) {
    EXPECT_TRUE(name.starts_with("self_attn.") || name.starts_with("mlp.")) << name;
  }
}

TEST(MixtureOfDepthsSource, RefusesAModelOfWhichNoBlockIsRouted) {
  for (const MixtureOfDepthsOptions& options :
       {MixtureOfDepthsOptions{.every = 4}, MixtureOfDepthsOptions{.first_block = 3}}) {
    model::Recipe recipe = model::decoder_recipe(model::make_llama(small_model()));
    const auto refused = dynamism::make_mixture_of_depths_source(options)->shape(recipe);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
    EXPECT_NE(refused.error().message.find("mixture_of_depths.every"), std::string::npos);
  }
}

// F + I + W of a layer's products, and of attention's core, on `rows` rows of `sequences`.
double work_of(const model::Layer& layer, double rows, double sequences, double heads_wide) {
  double products = 0;
  for (const auto& spec : layer.parameters()) {
    if (spec.shape.size() == 2) products += static_cast<double>(spec.shape[0] * spec.shape[1]);
  }
  const double pairs = rows / sequences * rows / 2;
  return 3 * (2 * rows * products + 2 * 2 * pairs * heads_wide);
}

// The load model against the work of what the block is made of, given the rows that it was measured
// to choose.
TEST(MixtureOfDepthsLoad, IsTheWorkOfEachLayerGivenItsRows) {
  model::LlamaConfig config = small_model();
  config.shape.hidden = 128;
  config.shape.heads = config.shape.kv_heads = 4;
  config.shape.intermediate = 352;
  config.shape.blocks = 4;
  config.shape.sequence = 256;
  for (const double capacity : {0.125, 0.3, 1.0}) {
    const MixtureOfDepthsOptions options{.capacity = capacity, .noise = 0};
    const model::Model plain = model::make_llama(config);
    model::Recipe recipe = model::decoder_recipe(plain);
    ASSERT_TRUE(dynamism::make_mixture_of_depths_source(options)->shape(recipe));
    cost::TransformerShape shape =
        cost::transformer_shape(config.shape, cost::Architecture::kLlama);
    shape.micro_batch_size = 2;
    const auto load = dynamism::make_mixture_of_depths(
        options, {.shape = shape, .device = dynamism::arithmetic_device(), .steps = 1});
    ASSERT_TRUE(load) << load.error().message;
    const cost::ModelCost model = (*load)->at(0);
    for (std::size_t i = 0; i < recipe.slots.size(); ++i) {
      const auto& [place, layer] = recipe.slots[i];
      if (place.part != model::Part::kBlock) continue;
      const Tensor x = random_tensor({2, 256, 128}, 5, at::kFloat);
      const model::LayerState state = model::make_state(*layer, LayerId(static_cast<int>(i)), 3);
      const auto figures = layer->forward(state, x, {}, nullptr).figures;
      const auto half = static_cast<std::size_t>(1 + 2 * place.block);
      // The predictor multiplies all rows, and has no gradient of its input.
      const double predictor = 2 * 2. * figures[dynamism::kRows] * 128 * (128. / 8);
      const double expected =
          (work_of(*plain[half], figures[dynamism::kChosenRows], 2, 128) +
           work_of(*plain[half + 1], figures[dynamism::kChosenRows], 2, 0) + predictor) /
          dynamism::arithmetic_device().flops_per_s;
      double charged = 0;
      for (const std::size_t layer_of_load : {half, half + 1}) {
        const cost::LayerCost& own = model.layers[layer_of_load];
        charged += own.forward_s + own.backward_input_s + own.backward_weight_s;
      }
      EXPECT_NEAR(charged, expected, 0.2 * expected) << capacity << ", block " << place.block;
    }
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
