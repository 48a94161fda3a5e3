// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <functional>
#include <utility>

#include "dynmo/model/emulated/layer.h"
#include "dynmo/model/output_shape.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

cost::ModelCost costs(double unit) {
  cost::ModelCost model;
  for (const char* name : {"embedding", "middle", "head"}) {
    cost::LayerCost layer;
    layer.name = name;
    layer.forward_s = unit;
    layer.backward_input_s = 2 * unit;
    layer.backward_weight_s = 3 * unit;
    layer.parameter_bytes = Bytes{4000};
    layer.boundary_bytes = Bytes{64};
    model.layers.push_back(layer);
  }
  return model;
}

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// How long is left to the clock: a sleep is never too short, and CPU time shows that it is a sleep.
TEST(Emulated, EachCallTakesAtLeastItsCostAndNextToNoProcessorTime) {
  const Model model = make_emulated({.costs = [](std::int64_t step) {
                        return costs(0.004 * static_cast<double>(step));
                      }}).value();
  LayerState state = make_state(*model[1], LayerId{1}, 1);
  const LayerContext context{.step = 1, .micro_batch = {}, .tokens_BT = {}, .targets_BT = {}};
  std::unique_ptr<Stash> stash;
  at::Tensor x = at::zeros({16});
  at::Tensor y;
  at::Tensor dx;
  const std::clock_t before = std::clock();
  EXPECT_GE(seconds_of([&] { y = model[1]->forward(state, x, context, &stash).hidden.x; }), 0.004);
  EXPECT_GE(seconds_of([&] {
              dx = model[1]->input_gradient(state, *stash, y, Layer::InputGradient::kWanted);
            }),
            0.008);
  EXPECT_GE(seconds_of([&] { model[1]->weight_gradient(state, *stash); }), 0.012);
  EXPECT_LT(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC, 0.020);
  EXPECT_EQ(y.sizes(), at::IntArrayRef({16}));
  EXPECT_EQ(dx.sizes(), at::IntArrayRef({16}));
}

// The hidden value behind a layer has the bytes of its step, and the gradient of the input those of
// the input.
TEST(Emulated, OutputsHaveTheBytesOfTheirStep) {
  const Model model = make_emulated({.costs = [](std::int64_t step) {
                        cost::ModelCost now = costs(0);
                        now.layers[1].boundary_bytes = Bytes{64 - 10 * step};
                        return now;
                      }}).value();
  LayerState state = make_state(*model[1], LayerId{1}, 1);
  for (const auto& [step, floats] : {std::pair<int, int>{0, 16}, {1, 13}, {5, 3}, {6, 1}}) {
    LayerContext context;
    context.step = step;
    std::unique_ptr<Stash> stash;
    const at::Tensor y = model[1]->forward(state, at::zeros({16}), context, &stash).hidden.x;
    EXPECT_EQ(y.sizes(), at::IntArrayRef({floats})) << step;
    EXPECT_EQ(output_shapes(model, step, {}, at::kFloat), (OutputShapes{{16}, {floats}, {}}));
    const at::Tensor dx = model[1]->input_gradient(state, *stash, y, Layer::InputGradient::kWanted);
    EXPECT_EQ(dx.sizes(), at::IntArrayRef({16}));
  }
}

TEST(Emulated, ParametersAreScaledAndTheHeadGivesALoss) {
  const Model model =
      make_emulated({.memory_scale = 0.25, .costs = [](std::int64_t) { return costs(0); }}).value();
  ASSERT_EQ(model.size(), 3U);
  EXPECT_EQ(model[2]->name(), "head");
  const LayerState state = make_state(*model[0], LayerId{0}, 1);
  EXPECT_EQ(state.parameters[0].value.nbytes(), 1000U);
  EXPECT_EQ(model[2]->forward(state, at::zeros({16}), {}, nullptr).loss.dim(), 0);
}

TEST(Emulated, AnInvalidModelOrScaleIsRefused) {
  const auto none = make_emulated({.costs = [](std::int64_t) { return cost::ModelCost{}; }});
  ASSERT_FALSE(none.has_value());
  EXPECT_EQ(none.error().code, ErrorCode::kBadInput);
  const auto scale =
      make_emulated({.memory_scale = 2, .costs = [](std::int64_t) { return costs(1); }});
  ASSERT_FALSE(scale.has_value());
  EXPECT_NE(scale.error().message.find("memory_scale is 2"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::model
