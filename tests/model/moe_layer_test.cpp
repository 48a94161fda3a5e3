// SPDX-License-Identifier: Apache-2.0
// Layers of experts against the formula, token by token, in fp64 by autograd.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "dynmo/model/moe.h"
#include "dynmo/model/precision.h"
#include "dynmo/model/pruned.h"
#include "dynmo/model/recompute.h"
#include "experts_formula.h"
#include "gradients.h"
#include "helpers.h"
#include "stash_bytes.h"

namespace dynmo::model {
namespace {

using at::Tensor;
using testing::by_autograd;
using testing::by_three_calls;
using testing::double_state;
using testing::Gradients;
using testing::random_tensor;
using testing::same_bits;

constexpr double kEpsilon = 1e-5;

struct MoeCase {
  MoeRouter router = MoeRouter::kTopK;
  double capacity_factor = 0;
  MoeDrop drop = MoeDrop::kPosition;
  std::int64_t top_k = 2;
};
void PrintTo(const MoeCase& c, std::ostream* out) {
  *out << "router " << static_cast<int>(c.router) << ", capacity " << c.capacity_factor << ", drop "
       << static_cast<int>(c.drop) << ", top " << c.top_k;
}

MoeConfig moe_config_of(const MoeCase& c, std::int64_t experts = 5) {
  return {.router = {.router = c.router,
                     .experts = experts,
                     .top_k = c.top_k,
                     .capacity_factor = c.capacity_factor,
                     .drop = c.drop,
                     .aux_loss = c.router == MoeRouter::kTopK ? 0.3 : 0,
                     .z_loss = 0.05}};
}

std::shared_ptr<const Layer> experts_in(const LlamaConfig& config, const MoeConfig& moe) {
  return dynamic_cast<const TakesExperts&>(*make_llama(config)[2]).with(moe);
}

LayerState state_of(const Layer& layer, std::uint64_t seed) {
  LayerState state = double_state(layer, LayerId(2), seed);
  for (Buffer& buffer : state.buffers) {
    buffer.value.copy_(random_tensor(buffer.value.sizes(), seed + 1).mul_(0.2));
  }
  return state;
}

class MoeLayers : public ::testing::TestWithParam<MoeCase> {};

TEST_P(MoeLayers, AreTheFormulaTokenByTokenAndSoAreAllGradients) {
  const MoeConfig moe = moe_config_of(GetParam());
  const auto layer = experts_in(testing::tiny_config(), moe);
  LayerState state = state_of(*layer, 5);
  const Tensor input = random_tensor({3, 10, 24}, 21);
  const Tensor slope = random_tensor({3, 10, 24}, 22);
  const Tensor bias = state.buffers.empty() ? Tensor() : state.buffers[0].value.to(at::kDouble);
  constexpr double kWeight = 0.25;
  Tensor output;
  Gradients plain = by_autograd(
      state, input, at::ones({}, at::kDouble), [&](const std::vector<Tensor>& w, const Tensor& x) {
        const auto f = testing::experts_formula(moe.router, w, x, bias, kEpsilon);
        output = f.output.detach();
        return (f.output * slope).sum() + kWeight * f.losses;
      });
  plain.output = output;
  LayerContext context;
  context.loss_weight = kWeight;
  const Gradients ours = by_three_calls(*layer, state, input, context, slope);
  const auto near = [](const Tensor& a, const Tensor& b) {
    return a.sizes() == b.sizes() && at::allclose(a, b, 1e-10, 1e-10);
  };
  EXPECT_TRUE(near(ours.output, plain.output));
  EXPECT_TRUE(near(ours.input, plain.input));
  for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
    EXPECT_TRUE(near(ours.parameters[i], plain.parameters[i])) << state.parameters[i].name;
  }
  EXPECT_GT(plain.parameters[1].abs().max().item<double>(), 1e-4) << "the router learns";
}

std::vector<MoeCase> all_cases() {
  std::vector<MoeCase> cases;
  for (int router = 0; router < 5; ++router) {
    for (const std::int64_t top_k : {1, 2, 3}) {
      cases.push_back({.router = static_cast<MoeRouter>(router), .top_k = top_k});
      for (const MoeDrop drop : {MoeDrop::kPosition, MoeDrop::kProbability}) {
        cases.push_back({.router = static_cast<MoeRouter>(router),
                         .capacity_factor = 0.8,
                         .drop = drop,
                         .top_k = top_k});
      }
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Routers, MoeLayers, ::testing::ValuesIn(all_cases()));

TEST(MoeLayer, OfOneExpertIsTheMlp) {
  const LlamaConfig config = testing::tiny_config();
  const auto mlp = make_llama(config)[2];
  LayerState dense = double_state(*mlp, LayerId(2), 5);
  const Tensor input = random_tensor({2, 10, 24}, 1);
  const Tensor slope = random_tensor({2, 10, 24}, 2);
  for (int router = 0; router < 5; ++router) {
    const MoeCase c{.router = static_cast<MoeRouter>(router), .top_k = 1};
    MoeConfig moe = moe_config_of(c, 1);
    moe.router.aux_loss = moe.router.z_loss = 0;
    const auto layer = experts_in(config, moe);
    LayerState state = double_state(*layer, LayerId(2), 5);
    state.parameters[0].value = dense.parameters[0].value;
    for (std::size_t i = 1; i < 4; ++i) state.parameters[i + 1].value = dense.parameters[i].value;
    for (LayerState* each : {&dense, &state}) {
      for (Parameter& p : each->parameters) p.gradient = at::zeros_like(p.value);
    }
    const Gradients ours = by_three_calls(*layer, state, input, {}, slope);
    const Gradients theirs = by_three_calls(*mlp, dense, input, {}, slope);
    EXPECT_TRUE(at::allclose(ours.output, theirs.output, 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(ours.input, theirs.input, 1e-12, 1e-12));
    for (std::size_t i = 1; i < 4; ++i) {
      EXPECT_TRUE(at::allclose(ours.parameters[i + 1], theirs.parameters[i], 1e-12, 1e-12));
    }
    EXPECT_EQ(ours.parameters[1].abs().max().item<double>(), 0) << "one expert, nothing to choose";
  }
}

TEST(MoeLayer, OfEqualExpertsDoesNotDependOnTheRouter) {
  for (int router = 0; router < 4; ++router) {
    const auto layer = experts_in(testing::tiny_config(),
                                  moe_config_of({.router = static_cast<MoeRouter>(router)}));
    LayerState state = state_of(*layer, 5);
    for (std::size_t e = 1; e < 5; ++e) {
      for (std::size_t m = 2; m < 5; ++m) {
        state.parameters[3 * e + m].value = state.parameters[m].value;
      }
    }
    const Tensor input = random_tensor({2, 10, 24}, 1);
    const Tensor first = layer->forward(state, input, {}, nullptr).hidden.x;
    state.parameters[1].value = random_tensor({5, 24}, 77);
    const Tensor second = layer->forward(state, input, {}, nullptr).hidden.x;
    EXPECT_TRUE(at::allclose(first, second, 1e-12, 1e-12)) << "router " << router;
  }
}

TEST(MoeLayer, HasTheNamesOfMixtralAndPrunesExpertsAlone) {
  const LlamaConfig config = testing::tiny_config();
  MoeConfig moe = moe_config_of({}, 3);
  moe.intermediate = 36;
  const auto layer = experts_in(config, moe);
  EXPECT_EQ(layer->name(), "blocks.0.moe");
  const auto specs = layer->parameters();
  ASSERT_EQ(specs.size(), 2U + 3 * 3);
  EXPECT_EQ(specs[0].name, "post_attention_layernorm.weight");
  EXPECT_EQ(specs[1].name, "block_sparse_moe.gate.weight");
  EXPECT_EQ(specs[1].shape, (std::vector<std::int64_t>{3, 24}));
  EXPECT_FALSE(specs[1].prunable);
  EXPECT_EQ(specs[5].name, "block_sparse_moe.experts.1.w1.weight");
  EXPECT_EQ(specs[5].shape, (std::vector<std::int64_t>{36, 24}));
  EXPECT_EQ(specs[7].name, "block_sparse_moe.experts.1.w2.weight");
  EXPECT_EQ(specs[7].shape, (std::vector<std::int64_t>{24, 36}));
  for (std::size_t i = 2; i < specs.size(); ++i) EXPECT_TRUE(specs[i].prunable);
  EXPECT_EQ(checkpoint_name(config, decoder_place(LayerId(4), config.shape.blocks), specs[7].name),
            "model.layers.1.block_sparse_moe.experts.1.w2.weight");
}

// Some experts get no rows, and one batch has none at all.
TEST(MoeLayer, TakesRowsThatAreLeftAndNoRows) {
  for (int router = 0; router < 5; ++router) {
    const auto layer = experts_in(testing::tiny_config(),
                                  moe_config_of({.router = static_cast<MoeRouter>(router)}));
    for (const std::int64_t count : {0, 1, 7}) {
      LayerState state = state_of(*layer, 5);
      const Hidden input(random_tensor({count, 24}, 3), at::arange(count, at::kInt).mul_(2));
      std::unique_ptr<Stash> stash;
      const Output output = layer->forward(state, input, {}, &stash);
      EXPECT_TRUE(output.hidden.rows.is_same(input.rows));
      ASSERT_EQ(output.hidden.x.sizes(), input.x.sizes());
      ASSERT_EQ(output.figures.size(), layer->figures().size());
      for (const double figure : output.figures) EXPECT_TRUE(std::isfinite(figure));
      EXPECT_EQ(output.figures[kMoeTokens], static_cast<double>(count));
      const Tensor slope = random_tensor({count, 24}, 4);
      const Tensor gradient =
          layer->input_gradient(state, *stash, slope, Layer::InputGradient::kWanted);
      EXPECT_EQ(gradient.sizes(), input.x.sizes());
      layer->weight_gradient(state, *stash);
      for (const Parameter& p : state.parameters) {
        EXPECT_TRUE(p.gradient.isfinite().all().item<bool>()) << p.name;
        if (count == 0) {
          EXPECT_EQ(p.gradient.abs().max().item<double>(), 0) << p.name;
        }
      }
      // The same rows among others that are dense.
      if (count == 0) continue;
      const Tensor dense =
          layer->forward(state, input.x.unsqueeze(0), {}, nullptr).hidden.x.squeeze(0);
      EXPECT_TRUE(same_bits(dense, output.hidden.x));
    }
  }
}

TEST(MoeLayer, CountsItsStashAndRecomputesToTheSameBits) {
  const auto layer = experts_in(testing::tiny_config(), moe_config_of({.capacity_factor = 0.9}));
  LayerState state = make_state(*layer, LayerId(2), 5);
  const Tensor input = random_tensor({3, 10, 24}, 21, at::kFloat);
  const Tensor slope = random_tensor({3, 10, 24}, 22, at::kFloat);
  std::unique_ptr<Stash> stash;
  (void)layer->forward(state, input, {}, &stash);
  EXPECT_EQ(stash->bytes(), measure_stash(*layer, state, input, {}).held);
  const Gradients once = by_three_calls(*layer, state, input, {}, slope);
  LayerState again = make_state(*layer, LayerId(2), 5);
  const Gradients twice = by_three_calls(*recomputed(layer), again, input, {}, slope);
  EXPECT_TRUE(same_bits(once.input, twice.input));
  for (std::size_t i = 0; i < once.parameters.size(); ++i) {
    EXPECT_TRUE(same_bits(once.parameters[i], twice.parameters[i]));
  }
}

TEST(MoeLayer, OfPrunedExpertsComputesWithWhatIsLeft) {
  const auto layer = experts_in(testing::tiny_config(), moe_config_of({}));
  const auto specs = layer->parameters();
  const Tensor input = random_tensor({3, 10, 24}, 21, at::kFloat);
  const Tensor slope = random_tensor({3, 10, 24}, 22, at::kFloat);
  std::vector<Gradients> results;
  std::vector<LayerState> states;
  for (const MatrixFormat format : {MatrixFormat::kMasked, MatrixFormat::kCompressed}) {
    LayerState& state = states.emplace_back(make_state(*layer, LayerId(2), 5));
    for (std::size_t i = 2; i < specs.size(); i += 2) {
      std::vector<std::int32_t> stay;
      for (std::int32_t w = 0; w < state.parameters[i].value.numel(); w += 3) stay.push_back(w);
      state.parameters[i].value.mul_(10);
      prune(state.parameters[i], specs[i], stay, format);
    }
    derive(*layer, state);
    results.push_back(by_three_calls(*layer, state, input, {}, slope));
    mask_gradients(state);
  }
  EXPECT_TRUE(at::allclose(results[0].output, results[1].output, 1e-4, 1e-5));
  EXPECT_TRUE(at::allclose(results[0].input, results[1].input, 1e-4, 1e-5));
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const Parameter& masked = states[0].parameters[i];
    const Parameter& compressed = states[1].parameters[i];
    EXPECT_EQ(is_compressed(compressed), i >= 2 && i % 2 == 0);
    Tensor dense = masked.gradient;
    if (is_compressed(compressed)) dense = dense.flatten().slice(0, 0, dense.numel(), 3);
    EXPECT_TRUE(at::allclose(dense, compressed.gradient, 1e-4, 1e-5)) << specs[i].name;
  }
}

// A frozen layer gets no stash in a prefix; behind one that trains it passes gradients on alone.
TEST(MoeLayer, ThatIsFrozenAddsNoWeightGradients) {
  const auto layer =
      experts_in(testing::tiny_config(), moe_config_of({.router = MoeRouter::kBias}));
  LayerState state = make_state(*layer, LayerId(2), 5);
  LayerState frozen = make_state(*layer, LayerId(2), 5);
  freeze(frozen);
  const Tensor input = random_tensor({3, 10, 24}, 21, at::kFloat);
  const Tensor slope = random_tensor({3, 10, 24}, 22, at::kFloat);
  const Gradients trains = by_three_calls(*layer, state, input, {}, slope);
  const Gradients rests = by_three_calls(*layer, frozen, input, {}, slope);
  EXPECT_TRUE(same_bits(trains.output, rests.output));
  EXPECT_TRUE(same_bits(trains.input, rests.input));
  for (const Tensor& gradient : rests.parameters) EXPECT_FALSE(gradient.defined());
}

// fp32 has kernels of its own, where the processor has the instructions.
TEST(MoeLayer, InFp32IsNearItself) {
  LlamaConfig config = testing::tiny_config();
  config.shape.hidden = 72;
  config.shape.intermediate = 100;
  const auto layer = experts_in(config, moe_config_of({}));
  LayerState state = make_state(*layer, LayerId(2), 5);
  state.parameters[1].value.mul_(100);
  LayerState exact = state;
  for (Parameter& p : exact.parameters) {
    p.value = p.value.to(at::kDouble);
    p.gradient = at::zeros_like(p.value);
  }
  const Tensor input = random_tensor({3, 10, 72}, 21, at::kFloat);
  const Tensor slope = random_tensor({3, 10, 72}, 22, at::kFloat);
  const Gradients rounded = by_three_calls(*layer, state, input, {}, slope);
  const Gradients ours =
      by_three_calls(*layer, exact, input.to(at::kDouble), {}, slope.to(at::kDouble));
  const auto error = [](const Tensor& a, const Tensor& b) {
    return ((a.to(at::kDouble) - b).norm() / b.norm()).item<double>();
  };
  EXPECT_LT(error(rounded.output, ours.output), 1e-5);
  EXPECT_LT(error(rounded.input, ours.input), 1e-5);
  for (std::size_t i = 0; i < ours.parameters.size(); ++i) {
    EXPECT_LT(error(rounded.parameters[i], ours.parameters[i]), 1e-5) << i;
  }
}

TEST(MoeLayer, InBf16RoutesInFp32AndIsNearItself) {
  LlamaConfig config = testing::tiny_config();
  config.shape.hidden = 64;
  config.shape.intermediate = 96;
  const auto plain = experts_in(config, moe_config_of({}));
  const auto layer = in_precision({plain}, cost::Precision::kBf16)[0];
  LayerState state = make_state(*layer, LayerId(2), 5);
  LayerState exact = make_state(*plain, LayerId(2), 5);
  // So far apart that no rounding changes a choice.
  for (LayerState* each : {&state, &exact}) each->parameters[1].value.mul_(100);
  for (Parameter& p : exact.parameters) {
    const bool router = p.name == "block_sparse_moe.gate.weight";
    p.value = (router ? p.value : p.value.to(at::kBFloat16)).to(at::kDouble);
    p.gradient = at::zeros_like(p.value);
  }
  const Tensor input = random_tensor({3, 10, 64}, 21).to(at::kBFloat16);
  const Tensor slope = random_tensor({3, 10, 64}, 22).to(at::kBFloat16);
  const Gradients rounded = by_three_calls(*layer, state, input, {}, slope);
  const Gradients ours =
      by_three_calls(*plain, exact, input.to(at::kDouble), {}, slope.to(at::kDouble));
  const auto error = [](const Tensor& a, const Tensor& b) {
    return ((a.to(at::kDouble) - b).norm() / b.norm()).item<double>();
  };
  EXPECT_EQ(rounded.output.scalar_type(), at::kBFloat16);
  EXPECT_LT(error(rounded.output, ours.output), 0.01);
  EXPECT_LT(error(rounded.input, ours.input), 0.01);
  for (std::size_t i = 0; i < ours.parameters.size(); ++i) {
    EXPECT_EQ(rounded.parameters[i].scalar_type(), at::kFloat);
    EXPECT_LT(error(rounded.parameters[i], ours.parameters[i]), 0.02) << i;
  }
}

}  // namespace
}  // namespace dynmo::model
