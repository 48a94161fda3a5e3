// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/recompute.h"

#include <gtest/gtest.h>

#include "dynmo/model/precision.h"
#include "helpers.h"
#include "stash_bytes.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;
using testing::same_bits;

TEST(RecomputedLayers, GiveTheBitsOfTheLayerAndKeepItsInputAlone) {
  for (const cost::Precision precision : {cost::Precision::kFp32, cost::Precision::kBf16}) {
    LlamaConfig config = testing::tiny_config();
    config.dropout = 0.2;  // drawn twice, the same both times
    const Model model = in_precision(make_llama(config), precision);
    LayerContext context = testing::random_context(config.shape, 3, 9);
    context.step = 5;
    context.micro_batch = MicroBatchId{2};
    for (std::size_t i = 0; i < model.size(); ++i) {
      const auto again = recomputed(model[i]);
      at::Tensor x;
      if (i > 0) x = random_tensor({3, 10, 24}, 21, scalar_type(precision));
      at::Tensor dy;
      if (i + 1 < model.size()) dy = random_tensor({3, 10, 24}, 22, scalar_type(precision));
      context.loss_weight = 0.5;
      std::vector<at::Tensor> results[2];
      for (const auto& [layer, found] :
           {std::pair{model[i], &results[0]}, std::pair{again, &results[1]}}) {
        LayerState state = make_state(*layer, LayerId{static_cast<int>(i)}, 3);
        std::unique_ptr<Stash> stash;
        const Output output = layer->forward(state, x, context, &stash);
        found->push_back(output.hidden.x);
        found->push_back(output.loss);
        found->push_back(layer->input_gradient(state, *stash, dy, Layer::InputGradient::kWanted));
        layer->weight_gradient(state, *stash);
        for (const Parameter& p : state.parameters) found->push_back(p.gradient);
      }
      for (std::size_t j = 0; j < results[0].size(); ++j) {
        ASSERT_EQ(results[0][j].defined(), results[1][j].defined());
        if (results[0][j].defined()) {
          EXPECT_TRUE(same_bits(results[0][j], results[1][j])) << again->name() << " " << j;
        }
      }
      const LayerState state = make_state(*again, LayerId{static_cast<int>(i)}, 3);
      EXPECT_EQ(measure_stash(*again, state, x, context).held,
                i == 0 ? Bytes{0} : boundary_bytes(config, 3, precision));
    }
  }
}

TEST(RecomputedLayers, TheThreeCallsHaveTheirOrder) {
  const LlamaConfig config = testing::tiny_config();
  const auto layer = recomputed(make_llama(config)[2]);
  LayerState state = make_state(*layer, LayerId{2}, 3);
  const at::Tensor x = random_tensor({1, 10, 24}, 21, at::kFloat);
  std::unique_ptr<Stash> stash;
  (void)layer->forward(state, x, {}, &stash);
  EXPECT_THROW(layer->weight_gradient(state, *stash), std::logic_error);
  (void)layer->input_gradient(state, *stash, x, Layer::InputGradient::kWanted);
  EXPECT_THROW((void)layer->input_gradient(state, *stash, x, Layer::InputGradient::kWanted),
               std::logic_error);
}

}  // namespace
}  // namespace dynmo::model
