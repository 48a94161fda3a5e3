// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "dynmo/kernels/sparse_products.h"
#include "dynmo/model/adamw.h"
#include "dynmo/model/autograd_layer.h"
#include "dynmo/model/pruned.h"
#include "dynmo/model/state_bytes.h"
#include "helpers.h"
#include "stash_bytes.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;
using testing::same_bits;

// Does what a migration does: header and tensors as bytes, into a state made from the layer alone.
LayerState copy_by_bytes(const Layer& layer, const LayerState& state) {
  const auto header_bytes = pack(header(state));
  LayerState copy = allocate_like(layer, unpack(header_bytes).value()).value();
  const auto from = tensors(state);
  const auto to = tensors(copy);
  EXPECT_EQ(from.size(), to.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    EXPECT_EQ(from[i].name, to[i].name);
    EXPECT_EQ(from[i].bytes.size(), to[i].bytes.size());
    std::memcpy(to[i].bytes.data(), from[i].bytes.data(), from[i].bytes.size());
  }
  return copy;
}

class StateBytes : public ::testing::Test {
 protected:
  StateBytes() {
    config_.dropout = 0.1;
    model_ = make_llama(config_);
    states_ = testing::make_states(model_, 3);
    for (int step = 0; step < 2; ++step) train(states_, step);
  }
  void train(std::vector<LayerState>& states, int step) const {
    LayerContext context = testing::random_context(config_.shape, 2, 4);
    context.step = step;
    testing::backward(model_, states, context);
    for (LayerState& state : states) {
      update(state, {.learning_rate = 1e-2});
    }
  }

  LlamaConfig config_ = testing::tiny_config();
  Model model_;
  std::vector<LayerState> states_;
};

TEST_F(StateBytes, ACopiedLayerTrainsOnWithTheSameBits) {
  std::vector<LayerState> copies;
  for (std::size_t i = 0; i < model_.size(); ++i) {
    copies.push_back(copy_by_bytes(*model_[i], states_[i]));
    EXPECT_EQ(digest(copies[i]), digest(states_[i]));
  }
  for (int step = 2; step < 4; ++step) {
    train(states_, step);
    train(copies, step);
  }
  for (std::size_t i = 0; i < model_.size(); ++i) EXPECT_EQ(digest(copies[i]), digest(states_[i]));
}

TEST_F(StateBytes, AFrozenLayerIsValuesOnly) {
  const Bytes before = tensor_bytes(states_[1]);
  EXPECT_EQ(before, parameter_bytes(*model_[1]) * 3);
  freeze(states_[1]);
  EXPECT_EQ(tensor_bytes(states_[1]), parameter_bytes(*model_[1]));
  const LayerState copy = copy_by_bytes(*model_[1], states_[1]);
  EXPECT_TRUE(copy.frozen);
  EXPECT_FALSE(copy.parameters[0].gradient.defined());
  EXPECT_EQ(digest(copy), digest(states_[1]));
}

TEST_F(StateBytes, OrderIsValuesThenFirstThenSecondMoments) {
  const auto views = tensors(states_[5]);
  std::vector<std::string> names;
  for (const auto& view : views) names.push_back(view.name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"norm.weight", "lm_head.weight", "norm.weight.first_moment",
                                      "lm_head.weight.first_moment", "norm.weight.second_moment",
                                      "lm_head.weight.second_moment"}));
  EXPECT_EQ(views[3].shape, (std::vector<std::int64_t>{19, 24}));
  EXPECT_EQ(views[3].kind, TensorKind::kFirstMoment);
}

TEST_F(StateBytes, DigestSeesEveryTensorAndEveryNumber) {
  LayerState& state = states_[2];
  const Digest before = digest(state);
  for (const NamedTensor& view : tensors(state)) {
    for (const std::size_t at : {std::size_t{0}, view.bytes.size() - 1}) {
      view.bytes[at] ^= std::byte{1};
      EXPECT_NE(digest(state), before) << view.name;
      view.bytes[at] ^= std::byte{1};
    }
  }
  EXPECT_EQ(digest(state), before);
  const auto changes = [&](auto change) {
    LayerState other = state;
    change(other);
    return digest(other) != before;
  };
  EXPECT_TRUE(changes([](LayerState& s) { s.optimizer_steps += 1; }));
  EXPECT_TRUE(changes([](LayerState& s) { s.random_key ^= 1; }));
  EXPECT_TRUE(changes([](LayerState& s) { s.id = LayerId{7}; }));
  EXPECT_TRUE(changes([](LayerState& s) { s.parameters[1].name += "x"; }));
  EXPECT_TRUE(changes([](LayerState& s) { s.parameters[1].weight_decay = false; }));
  EXPECT_TRUE(changes([](LayerState& s) { s.frozen = true; }));
}

TEST_F(StateBytes, AHeaderSurvivesPackingAndOthersAreRefused) {
  const StateHeader given{.id = LayerId{-1},
                          .frozen = true,
                          .optimizer_steps = std::int64_t{1} << 40,
                          .random_key = ~std::uint64_t{0},
                          .layout = {3, 4}};
  auto bytes = pack(given);
  EXPECT_EQ(unpack(bytes).value(), given);
  EXPECT_FALSE(unpack(std::span(bytes).first(47)));
  bytes[0] ^= std::byte{1};
  EXPECT_FALSE(unpack(bytes));
}

TEST_F(StateBytes, CompletingMemoryLeavesWhatHasArrived) {
  // Above and below the size of a large page.
  const auto layer = autograd_layer(
      "two", {{.name = "large", .shape = {1200, 1000}}, {.name = "small", .shape = {3}}},
      HiddenFunction());
  for (const bool frozen : {false, true}) {
    LayerState state = allocate_tensors_like(*layer, LayerId{0}, {.frozen = frozen, .pruned = {}});
    for (const NamedTensor& tensor : tensors(state)) {
      for (std::size_t i = 0; i < tensor.bytes.size(); ++i) tensor.bytes[i] = std::byte(i % 251);
    }
    complete_memory(state);
    for (const NamedTensor& tensor : tensors(state)) {
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < tensor.bytes.size(); ++i) {
        wrong += tensor.bytes[i] != std::byte(i % 251) ? 1 : 0;
      }
      EXPECT_EQ(wrong, 0) << tensor.name;
    }
    for (const Parameter& parameter : state.parameters) {
      ASSERT_EQ(parameter.gradient.defined(), !frozen);
      if (!parameter.gradient.defined()) continue;
      EXPECT_EQ(parameter.gradient.count_nonzero().item<int>(), 0);
    }
  }
}

TEST_F(StateBytes, AHeaderOfAnotherModelIsRefused) {
  LlamaConfig other = config_;
  other.shape.intermediate += 1;
  const auto result = allocate_like(*make_llama(other)[2], header(states_[2]));
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().message,
            "state of layer 2 has other parameters or shapes than blocks.0.mlp of this model; use "
            "the same model at both ends");
}

// With a buffer of every kind that sources use; they count its rows and mask some.
std::shared_ptr<const Layer> buffered_layer(at::ScalarType mask = at::kBool) {
  return autograd_layer(
      "buffered", {{.name = "weight", .shape = {3}, .init_std = 1}}, HiddenFunction(),
      {.buffers = {{.name = "count", .shape = {2}, .type = at::kLong, .initial = 5},
                   {.name = "mask", .shape = {3}, .type = mask, .initial = 1}}});
}

// Half of one matrix gone, masked; three quarters of the next, compressed.
TEST_F(StateBytes, APrunedLayerTravelsInItsOwnShapeAndTrainsOnWithTheSameBits) {
  const std::size_t layer = 2;
  const std::vector<ParameterSpec> specs = model_[layer]->parameters();
  LayerState& state = states_[layer];
  for (const std::size_t i : {1U, 2U}) {
    std::vector<std::int32_t> stay;
    for (std::int32_t k = 0; k < specs[i].shape[0] * specs[i].shape[1]; k += i == 1 ? 2 : 4) {
      stay.push_back(k);
    }
    prune(state.parameters[i], specs[i], stay,
          i == 1 ? MatrixFormat::kMasked : MatrixFormat::kCompressed);
  }
  derive(*model_[layer], state);
  const StateShape shape = shape_of(state);
  EXPECT_EQ(shape.pruned.at(1).segments, 0) << "masked";
  EXPECT_EQ(shape.pruned.at(2).segments, state.parameters[2].pattern->segments());
  EXPECT_EQ(parse_shape(to_text(shape)).value(), shape);
  EXPECT_TRUE(fits(shape, *model_[layer]));
  EXPECT_FALSE(fits(shape, *model_[0])) << "an embedding is not pruned";
  EXPECT_EQ(tensor_bytes(state), pruned_bytes(*model_[layer], shape).values * 3 +
                                     pruned_bytes(*model_[layer], shape).masks);

  LayerState copy = allocate_like(*model_[layer], state.id, shape);
  copy.optimizer_steps = state.optimizer_steps;
  copy.random_key = state.random_key;
  const auto from = tensors(std::as_const(state));
  const auto to = tensors(copy);
  ASSERT_EQ(from.size(), to.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    EXPECT_EQ(from[i].name, to[i].name);
    ASSERT_EQ(from[i].bytes.size(), to[i].bytes.size());
    std::memcpy(to[i].bytes.data(), from[i].bytes.data(), from[i].bytes.size());
  }
  derive(*model_[layer], copy);
  ASSERT_EQ(digest(copy), digest(state));
  std::vector<LayerState> copies = states_;
  copies[layer] = std::move(copy);
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (i != layer) copies[i] = copy_by_bytes(*model_[i], states_[i]);
  }
  train(states_, 2);
  train(copies, 2);
  for (std::size_t i = 0; i < copies.size(); ++i) {
    EXPECT_EQ(digest(copies[i]), digest(states_[i])) << "layer " << i;
  }
  copies[layer].parameters[1].mask.data_ptr<std::uint8_t>()[0] ^= 1;
  EXPECT_NE(digest(copies[layer]), digest(states_[layer])) << "a bit of a mask";
}

TEST(StateShape, TextThatIsNoneIsRefused) {
  for (const char* text :
       {"", "x", "t,", "t,1", "t,1:", "t,1:2", "t,1:2x", "t,1:-2c", "t 1:2c", "t,1:2c,", "t,1:2c-1",
        "t,1:2m4", "t,1:2cc", "t,1:2c99999999999999999999"}) {
    EXPECT_FALSE(parse_shape(text)) << text;
  }
  for (const char* text : {"f,1:2c3,10:3m", "f,1:2c,10:3m"}) {  // the second of an older version
    EXPECT_EQ(to_text(parse_shape(text).value()), text);
  }
}

TEST_F(StateBytes, AShapeOfMoreThanALayerHasFitsNone) {
  const Layer& mlp = *model_[2];
  const std::vector<ParameterSpec> specs = mlp.parameters();
  const std::int64_t weights = specs[1].shape[0] * specs[1].shape[1];
  const std::int64_t segments = cost::all_segments(specs[1].shape[0], specs[1].shape[1]);
  const auto with = [](std::int64_t kept, bool compressed, std::int64_t of_segments) {
    return StateShape{.pruned = {{1, {kept, compressed, of_segments}}}};
  };
  EXPECT_TRUE(fits(with(weights, true, segments), mlp));
  EXPECT_TRUE(fits(with(weights, false, 0), mlp));
  EXPECT_TRUE(fits(with(1, true, 2), mlp));
  EXPECT_FALSE(fits(with(weights + 1, true, segments), mlp));
  EXPECT_FALSE(fits(with(weights, true, segments + 1), mlp));
  EXPECT_FALSE(fits(with(weights, false, 1), mlp)) << "masked";
  EXPECT_FALSE(fits(with(1, true, 3), mlp)) << "one weight is in a row and a column";
}

// A quarter of one matrix compressed, another masked, the third whole: by hand.
TEST_F(StateBytes, ProductsTakeWhatTheFitSaysOfWhatIsLeft) {
  const Layer& mlp = *model_[2];
  const cost::ProductFit fit{.fixed = 0.1, .weights = 1.5, .segments = 0.2};
  double all = 0;
  std::map<std::size_t, double> weights;
  const std::vector<ParameterSpec> specs = mlp.parameters();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].prunable) continue;
    weights[i] = static_cast<double>(specs[i].shape[0] * specs[i].shape[1]);
    all += weights[i];
  }
  ASSERT_EQ(weights.size(), 3U);
  const auto [first, size] = *weights.begin();
  const std::int64_t segments =
      cost::all_segments(specs[first].shape[0], specs[first].shape[1]) / 2;
  const auto kept = static_cast<std::int64_t>(size) / 4;
  StateShape shape;
  EXPECT_EQ(product_time(mlp, shape, fit), 1);
  shape.pruned[weights.rbegin()->first] = {.kept = kept};
  EXPECT_EQ(product_time(mlp, shape, fit), 1) << "masked";
  shape.pruned[first] = {.kept = kept, .compressed = true, .segments = segments};
  EXPECT_NEAR(product_time(mlp, shape, fit), (0.575 * size + all - size) / all, 1e-12);
  shape.pruned[first] = {.kept = 4 * kept, .compressed = true, .segments = 2 * segments};
  EXPECT_EQ(product_time(mlp, shape, fit), 1) << "no more than dense";
  EXPECT_EQ(product_time(*model_[0], {}, fit), 1) << "nothing to prune";
}

TEST(Buffers, StartAsDescribed) {
  const LayerState state = make_state(*buffered_layer(), LayerId{0}, 1);
  ASSERT_EQ(state.buffers.size(), 2U);
  EXPECT_TRUE(same_bits(state.buffers[0].value, at::full({2}, 5, at::kLong)));
  EXPECT_TRUE(same_bits(state.buffers[1].value, at::full({3}, 1, at::kBool)));
}

TEST(Buffers, TravelAsBytesOfTheirOwnType) {
  const auto layer = buffered_layer();
  LayerState state = make_state(*layer, LayerId{0}, 1);
  state.buffers[0].value[1] = std::int64_t{1} << 40;
  state.buffers[1].value[2] = false;
  EXPECT_EQ(tensor_bytes(state).value, 3 * 3 * 4 + 2 * 8 + 3);
  EXPECT_EQ(tensors(state).back().type, at::kBool);
  const LayerState copy = copy_by_bytes(*layer, state);
  EXPECT_EQ(digest(copy), digest(state));
  EXPECT_TRUE(same_bits(copy.buffers[0].value, state.buffers[0].value));
  freeze(state);
  EXPECT_EQ(tensor_bytes(state).value, 3 * 4 + 2 * 8 + 3) << "a frozen layer has them, too";
}

TEST(Buffers, AreInTheDigestAndInTheLayout) {
  LayerState state = make_state(*buffered_layer(), LayerId{0}, 1);
  const Digest before = digest(state);
  state.buffers[1].value[0] = false;
  EXPECT_NE(digest(state), before);
  EXPECT_FALSE(allocate_like(*buffered_layer(at::kByte), header(state)).has_value());
}

TEST(Memory, AStashKnowsItsBytes) {
  LlamaConfig llama = testing::tiny_config();
  Gpt2Config gpt2 = testing::tiny_gpt2();
  llama.dropout = gpt2.dropout = 0.1;
  for (const Model& model : {make_llama(llama), make_gpt2(gpt2)}) {
    const LayerContext context = testing::random_context(llama.shape, 3, 4);
    for (std::size_t i = 0; i < model.size(); ++i) {
      const LayerState state = make_state(*model[i], LayerId{static_cast<int>(i)}, 3);
      at::Tensor x;
      if (i > 0) x = at::ones({3, 10, 24});
      std::unique_ptr<Stash> stash;
      (void)model[i]->forward(state, x, context, &stash);
      EXPECT_EQ(stash->bytes(), measure_stash(*model[i], state, x, context).held)
          << model[i]->name();
    }
  }
}

TEST(Memory, ForwardWithoutAStashKeepsItsOutputOnly) {
  const LlamaConfig config = testing::tiny_config();
  const Model model = make_llama(config);
  const LayerState state = make_state(*model[1], LayerId{1}, 3);
  const at::Tensor x = random_tensor({3, 10, 24}, 8, at::kFloat);
  const AllocationMeter meter;
  const at::Tensor y = model[1]->forward(state, x, {}, nullptr).hidden.x;
  EXPECT_EQ(meter.held(), boundary_bytes(config, 3));
}

TEST(Memory, AFrozenLayerBehindATrainedOneKeepsNothingForItsWeights) {
  const LlamaConfig config = testing::tiny_config();
  const Model model = make_llama(config);
  LayerState state = make_state(*model[2], LayerId{2}, 3);
  freeze(state);
  const at::Tensor x = random_tensor({3, 10, 24}, 8, at::kFloat);
  const at::Tensor dy = random_tensor({3, 10, 24}, 9, at::kFloat);
  const AllocationMeter meter;
  std::unique_ptr<Stash> stash;
  at::Tensor y = model[2]->forward(state, x, {}, &stash).hidden.x;
  y.reset();
  EXPECT_GT(meter.held().value, 0);
  at::Tensor dx = model[2]->input_gradient(state, *stash, dy, Layer::InputGradient::kWanted);
  EXPECT_EQ(meter.held(), boundary_bytes(config, 3));
}

TEST(Memory, InputGradientKeepsWhatWeightGradientNeedsAndThatFreesTheRest) {
  const LlamaConfig config = testing::tiny_config();
  const Model model = make_llama(config);
  LayerState state = make_state(*model[2], LayerId{2}, 3);
  const at::Tensor dy = random_tensor({3, 10, 24}, 8, at::kFloat);
  const AllocationMeter meter;
  std::unique_ptr<Stash> stash;
  at::Tensor x = at::ones({3, 10, 24});
  at::Tensor y = model[2]->forward(state, x, {}, &stash).hidden.x;
  x.reset();
  y.reset();
  EXPECT_EQ(meter.held(), activation_bytes(config, LayerId{2}, 3));
  at::Tensor dx = model[2]->input_gradient(state, *stash, dy, Layer::InputGradient::kWanted);
  dx.reset();
  // Input, gradients of gate and up, their product, 1 / rms, gradient of the norm's weight.
  EXPECT_EQ(meter.held().value, 4 * (30 * (24 + 3 * 20 + 1) + 24));
  model[2]->weight_gradient(state, *stash);
  EXPECT_EQ(meter.held().value, 0);
}

}  // namespace
}  // namespace dynmo::model
