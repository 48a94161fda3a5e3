// SPDX-License-Identifier: Apache-2.0
// Layers without some of their units, in fp64: they compute what the whole layer computes with
// zeros in the place of these units, and their gradients match central differences.
#include "dynmo/model/units.h"

#include <gtest/gtest.h>

#include <numeric>

#include "dynmo/model/gpt2.h"
#include "dynmo/model/moe.h"
#include "dynmo/model/pruned.h"
#include "gradients.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;

struct UnitCase {
  std::string kind;
  std::shared_ptr<const Layer> layer;
  cost::DecoderShape shape;
};
void PrintTo(const UnitCase& c, std::ostream* out) { *out << c.kind; }

std::vector<UnitCase> unit_cases() {
  LlamaConfig llama = testing::tiny_config();
  llama.qkv_bias = true;
  const Gpt2Config gpt2 = testing::tiny_gpt2();
  const auto mlp = make_llama(llama)[2];
  const auto experts = dynamic_cast<const TakesExperts&>(*mlp).with(
      {.router = {.experts = 3, .top_k = 2, .aux_loss = 0}, .intermediate = 8});
  return {{"attention", make_llama(llama)[1], llama.shape},
          {"mlp", make_llama(llama)[2], llama.shape},
          {"gpt2_attention", make_gpt2(gpt2)[1], llama.shape},
          {"gpt2_mlp", make_gpt2(gpt2)[2], llama.shape},
          {"experts", experts, llama.shape}};
}

class LayerWithFewerUnits : public ::testing::TestWithParam<UnitCase> {
 protected:
  void SetUp() override {
    specs_ = layer_->parameters();
    state_ = testing::double_state(*layer_, LayerId{1}, 5);
    whole_ = testing::double_state(*layer_, LayerId{1}, 5);
    for (const UnitSet& set : unit_sets(specs_)) {
      std::vector<std::int32_t> stay;  // all but each third, from the first on
      for (std::int32_t u = 0; u < set.count; ++u) {
        if (u % 3 != 0) stay.push_back(u);
      }
      prune_units(state_, specs_, set, stay);
    }
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      whole_.parameters[i].value = dense_value(state_.parameters[i], specs_[i].shape).clone();
    }
  }
  [[nodiscard]] double loss(const at::Tensor& weight) const {
    const Output output = layer_->forward(state_, input_, context_, nullptr);
    return output.hidden.x.mul(weight).sum().item<double>();
  }

  std::shared_ptr<const Layer> layer_ = GetParam().layer;
  std::vector<ParameterSpec> specs_;
  LayerState state_;
  LayerState whole_;  // with zeros
  LayerContext context_ = testing::random_context(GetParam().shape, 3, 9);
  at::Tensor input_ = random_tensor({3, 10, 24}, 21);
};

TEST_P(LayerWithFewerUnits, ComputesWhatTheWholeOneDoesWithZeros) {
  const at::Tensor weight = random_tensor({3, 10, 24}, 31);
  const testing::Gradients fewer =
      testing::by_three_calls(*layer_, state_, input_, context_, weight);
  const testing::Gradients all = testing::by_three_calls(*layer_, whole_, input_, context_, weight);
  EXPECT_TRUE(at::allclose(fewer.output, all.output, 1e-10, 1e-12));
  EXPECT_TRUE(at::allclose(fewer.input, all.input, 1e-10, 1e-12));
  int smaller = 0;
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    const Parameter& parameter = state_.parameters[i];
    at::Tensor expected = all.parameters[i];
    if (parameter.by_units) {
      const auto offsets = kept_offsets(parameter.mask, expected.numel());
      const at::Tensor places =
          at::tensor(std::vector<std::int64_t>(offsets.begin(), offsets.end()), at::kLong);
      expected = expected.view({-1}).index_select(0, places).view(parameter.value.sizes());
      ++smaller;
      EXPECT_LT(parameter.value.numel(), all.parameters[i].numel());
    }
    EXPECT_TRUE(at::allclose(fewer.parameters[i], expected, 1e-10, 1e-12)) << parameter.name;
  }
  EXPECT_GE(smaller, 3);
}

TEST_P(LayerWithFewerUnits, HasGradientsOfCentralDifferences) {
  const at::Tensor weight = random_tensor({3, 10, 24}, 31);
  const testing::Gradients gradients =
      testing::by_three_calls(*layer_, state_, input_, context_, weight);
  constexpr double kStep = 1e-5;
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    const at::Tensor value = state_.parameters[i].value;
    const at::Tensor direction = random_tensor(value.sizes(), 41 + i);
    value.add_(direction, kStep);
    const double above = loss(weight);
    value.sub_(direction, 2 * kStep);
    const double below = loss(weight);
    value.add_(direction, kStep);
    const double slope = gradients.parameters[i].mul(direction).sum().item<double>();
    EXPECT_NEAR((above - below) / (2 * kStep), slope, 1e-5 * (1 + std::abs(slope)))
        << specs_[i].name;
  }
}

// A state of this shape holds it, and its text is the shape.
TEST_P(LayerWithFewerUnits, HasAShapeThatTravels) {
  const StateShape shape = shape_of(state_);
  EXPECT_TRUE(fits(shape, *layer_));
  const auto parsed = parse_shape(to_text(shape));
  ASSERT_TRUE(parsed.has_value()) << parsed.error().message;
  EXPECT_EQ(*parsed, shape);
  const LayerState like = allocate_like(*layer_, LayerId{1}, shape);
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    EXPECT_EQ(like.parameters[i].value.sizes(), state_.parameters[i].value.sizes());
    EXPECT_EQ(like.parameters[i].by_units, state_.parameters[i].by_units);
  }
  // One part of the units alone, or a part of a unit, is no shape.
  StateShape other = shape;
  other.pruned.erase(other.pruned.begin());
  EXPECT_FALSE(fits(other, *layer_));
  other = shape;
  other.pruned.begin()->second.kept -= 1;
  EXPECT_FALSE(fits(other, *layer_));
}

TEST_P(LayerWithFewerUnits, IsRefusedIfItsMasksDisagree) {
  EXPECT_TRUE(check_units(state_, specs_).has_value());
  const std::size_t last = unit_sets(specs_).front().parameters.back();
  auto* byte = state_.parameters[last].mask.data_ptr<std::uint8_t>();
  byte[0] ^= 1;
  const auto checked = check_units(state_, specs_);
  ASSERT_FALSE(checked.has_value());
  EXPECT_NE(checked.error().message.find(specs_[last].name), std::string::npos)
      << checked.error().message;
}

INSTANTIATE_TEST_SUITE_P(Kinds, LayerWithFewerUnits, ::testing::ValuesIn(unit_cases()),
                         [](const auto& test) { return test.param.kind; });

// A unit's size is the root mean square of its scaled weights, whatever the axis.
TEST(UnitSizes, AreThoseOfRowsAndColumns) {
  const LlamaConfig config = testing::tiny_config();
  const auto layer = make_llama(config)[2];
  const std::vector<ParameterSpec> specs = layer->parameters();
  const LayerState state = make_state(*layer, LayerId{2}, 3);
  const UnitSet set = unit_sets(specs).front();
  const std::vector<float> stds = {1, 0.5, 2, 0.25};
  const std::vector<float> sizes = unit_sizes(state, specs, set, stds);
  const auto squares = [&](std::size_t p, int axis) {
    return state.parameters[p].value.to(at::kDouble).div(stds[p]).square().sum(axis);
  };
  const at::Tensor expected = (squares(1, 1) + squares(2, 1) + squares(3, 0))
                                  .div(3.0 * static_cast<double>(config.shape.hidden))
                                  .sqrt();
  ASSERT_EQ(std::ssize(sizes), config.shape.intermediate);
  for (std::size_t u = 0; u < sizes.size(); ++u) {
    EXPECT_NEAR(sizes[u], expected[static_cast<std::int64_t>(u)].item<double>(), 1e-6 * sizes[u]);
  }
}

}  // namespace
}  // namespace dynmo::model
