// SPDX-License-Identifier: Apache-2.0
// What `dynmo plan --model` says of a model's shape, and what training it takes.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include "dynmo/cost/hugging_face.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/model/layer.h"
#include "dynmo/runtime/known_costs.h"
#include "dynmo/weights/trained_model.h"
#include "dynmo/weights/weights.h"

namespace dynmo::weights {
namespace {

namespace fs = std::filesystem;

// Models that transformers saved (tests/peers/make_goldens.py).
class Planned : public ::testing::TestWithParam<const char*> {
 protected:
  [[nodiscard]] static fs::path folder() { return fs::path(GOLDENS) / GetParam(); }
};

// The planner and training must derive the same from the same file: names and bytes of the layers.
TEST_P(Planned, HasTheNamesAndBytesOfThePlanner) {
  const cost::Device device = cost::find_device("cpu").value();
  const cost::TransformerShape shape = cost::read_config(folder(), 16, 2).value();
  const cost::ModelCost planned = cost::transformer_costs(shape, device).value();
  const Weights weights = read_weights(folder()).value();
  const model::Model layers =
      model::layers_of(shaped_recipe(weights.config, weights.sources).value());
  runtime::PipelineOptions options;
  options.boundary_shape = {2, 16, shape.hidden};
  const cost::ModelCost known = runtime::known_costs(layers, options);
  ASSERT_EQ(planned.layers.size(), known.layers.size());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const cost::LayerCost& theirs = planned.layers[i];
    const cost::LayerCost& ours = known.layers[i];
    EXPECT_GT(ours.parameter_bytes, Bytes{0});
    EXPECT_EQ(theirs.parameter_bytes, ours.parameter_bytes) << ours.name;
    EXPECT_EQ(theirs.gradient_bytes, ours.gradient_bytes) << ours.name;
    EXPECT_EQ(theirs.optimizer_bytes, ours.optimizer_bytes) << ours.name;
    if (theirs.boundary_bytes > Bytes{0}) {
      EXPECT_EQ(theirs.boundary_bytes, ours.boundary_bytes) << ours.name;
    }
    EXPECT_EQ(theirs.name, ours.name);
  }
}

// Twice the multiplications of the matrix products that libtorch is asked for, or we do ourselves.
class Products {
 public:
  Products() {
    count_ = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&Products::start)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~Products() { at::removeCallback(handle_); }
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  [[nodiscard]] static double flops() { return count_; }

 private:
  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    const std::string name = function.name();
    const bool plain = name == "aten::mm" || name == "dynmo::own_product";
    if (!plain && name != "aten::addmm" && name != "aten::addmm_") return nullptr;
    const auto inputs = function.inputs();
    const at::Tensor a = inputs[plain ? 0 : 1].toTensor();
    const at::Tensor b = inputs[plain ? 1 : 2].toTensor();
    count_ += 2.0 * static_cast<double>(a.size(0) * a.size(1) * b.size(1));
    return nullptr;
  }

  static inline double count_ = 0;
  at::CallbackHandle handle_{};
};

// A training step's products with weights: as many FLOPs as the planner says, in each layer.
TEST_P(Planned, HasTheFlopsThatThePlannerCounts) {
  const cost::TransformerShape shape = cost::read_config(folder(), 16, 2).value();
  const std::vector<cost::LayerWork> work = cost::transformer_work(shape);
  const TrainedModel model = open_trained(folder()).value();
  model::LayerContext context;
  context.tokens_BT = context.targets_BT = (at::arange(32) * 37 % shape.vocabulary).view({2, 16});
  std::vector<model::LayerState> states;
  std::vector<std::unique_ptr<model::Stash>> stashes(model.layers.size());
  std::vector<double> flops(model.layers.size());
  model::Hidden hidden;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    states.push_back(model::make_state(*model.layers[i], LayerId(static_cast<int>(i)), 1));
    const Products products;
    hidden = model.layers[i]->forward(states[i], hidden, context, &stashes[i]).hidden;
    flops[i] += Products::flops();
  }
  at::Tensor gradient;
  for (std::size_t i = model.layers.size(); i-- > 0;) {
    const Products products;
    gradient = model.layers[i]->input_gradient(states[i], *stashes[i], gradient,
                                               model::Layer::InputGradient::kWanted);
    model.layers[i]->weight_gradient(states[i], *stashes[i]);
    flops[i] += Products::flops();
  }
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    EXPECT_EQ(flops[i], 3 * work[i].matrix_flops) << model.layers[i]->name();
    EXPECT_EQ(flops[i] > 0, i > 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Planned,
                         ::testing::Values("gpt2-tied", "gpt2-untied-f16", "llama-tied",
                                           "llama-untied-shards", "mixtral-shards",
                                           "mixtral-fused-bf16"),
                         [](const auto& test) {
                           std::string name = test.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace dynmo::weights
