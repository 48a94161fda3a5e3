// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/forwarding_layer.h"

#include <gtest/gtest.h>

#include <functional>

#include "dynmo/model/precision.h"
#include "dynmo/model/recompute.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

struct CountedStash final : Stash {
  std::optional<Bytes> bytes() const override { return Bytes{77}; }
};

// Overrides every virtual function of Layer with an answer that no default gives. A function that
// Layer gains belongs here and in ForwardingLayer.
class OverridesAll final : public Layer {
 public:
  mutable int input_gradients = 0;
  mutable int weight_gradients = 0;

  std::string name() const override { return "all"; }
  std::vector<ParameterSpec> parameters() const override {
    return {{.name = "weight", .shape = {2}}};
  }
  std::vector<BufferSpec> buffers() const override { return {{.name = "mask", .shape = {3}}}; }
  std::vector<std::string> figures() const override { return {"rows"}; }
  Needs needs() const override { return {.targets = true, .loss = true}; }
  at::ScalarType compute_type() const override { return at::kDouble; }
  Output forward(const LayerState&, const Hidden& input, const LayerContext& context,
                 std::unique_ptr<Stash>* stash) const override {
    if (stash != nullptr) *stash = std::make_unique<CountedStash>();
    return {.hidden = {input.x + 1, input.rows},
            .loss = at::full({}, context.loss_weight),
            .figures = {4}};
  }
  at::Tensor input_gradient(const LayerState&, Stash& stash, const at::Tensor& gradient,
                            InputGradient) const override {
    (void)dynamic_cast<CountedStash&>(stash);
    ++input_gradients;
    return gradient * 3;
  }
  void weight_gradient(LayerState&, Stash& stash) const override {
    (void)dynamic_cast<CountedStash&>(stash);
    ++weight_gradients;
  }
};

class PlainDecorator final : public ForwardingLayer {
 public:
  using ForwardingLayer::ForwardingLayer;
};

struct Decorator {
  std::string name;
  std::function<std::shared_ptr<const Layer>(std::shared_ptr<const Layer>)> decorate;
  at::ScalarType compute_type = at::kDouble;
};

class Decorators : public ::testing::TestWithParam<Decorator> {};

TEST_P(Decorators, ForgetNoFunctionOfTheLayer) {
  const auto inner = std::make_shared<OverridesAll>();
  const auto layer = GetParam().decorate(inner);
  EXPECT_EQ(layer->name(), "all");
  EXPECT_EQ(layer->parameters().at(0).name, "weight");
  EXPECT_EQ(layer->buffers().at(0).name, "mask");
  EXPECT_EQ(layer->figures(), inner->figures());
  EXPECT_TRUE(layer->needs().targets);
  EXPECT_TRUE(layer->needs().loss);
  EXPECT_EQ(layer->compute_type(), GetParam().compute_type);

  LayerState state = make_state(*layer, LayerId{0}, 1);
  state.parameters[0].compute_copy = state.parameters[0].value;
  LayerContext context;
  context.loss_weight = 0.125;
  const Hidden input(at::ones({2, 1}), at::arange(2, at::kInt));
  std::unique_ptr<Stash> stash;
  const Output output = layer->forward(state, input, context, &stash);
  EXPECT_EQ(output.hidden.x[0].item<double>(), 2);
  EXPECT_TRUE(output.hidden.rows.is_same(input.rows));
  EXPECT_EQ(output.loss.item<double>(), 0.125);
  EXPECT_EQ(output.figures, (std::vector<double>{4}));
  const at::Tensor dx =
      layer->input_gradient(state, *stash, at::ones({2, 1}), Layer::InputGradient::kWanted);
  EXPECT_EQ(dx[1].item<double>(), 3);
  EXPECT_EQ(stash->bytes(), Bytes{77});
  layer->weight_gradient(state, *stash);
  EXPECT_EQ(inner->input_gradients, 1);
  EXPECT_EQ(inner->weight_gradients, 1);
}

INSTANTIATE_TEST_SUITE_P(
    All, Decorators,
    ::testing::Values(
        Decorator{"plain", [](auto layer) { return std::make_shared<PlainDecorator>(layer); }},
        Decorator{"recomputed", [](auto layer) { return recomputed(layer); }},
        Decorator{"bf16",
                  [](auto layer) { return in_precision({layer}, cost::Precision::kBf16)[0]; },
                  at::kBFloat16}),
    [](const auto& c) { return c.param.name; });

}  // namespace
}  // namespace dynmo::model
