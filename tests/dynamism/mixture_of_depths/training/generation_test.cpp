// SPDX-License-Identifier: Apache-2.0
// Mixture of depths where text is made: the predictor chooses, the cache holds what it chose, and
// no token looks at a later one.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/key_value_cache.h"
#include "dynmo/weights/generate.h"
#include "dynmo/weights/trained_model.h"
#include "tests/model/gradients.h"
#include "tests/model/helpers.h"

namespace dynmo::runtime::testing {
namespace {

using at::Tensor;
using model::testing::index_of;
using model::testing::random_tensor;
using model::testing::random_tokens;

struct RoutedModel {
  weights::TrainedModel model;
  std::vector<std::size_t> routed = {};
};

// With weights so large that the predictor chooses about half of all rows and tokens matter.
RoutedModel routed_model(bool gpt2, std::uint64_t seed) {
  RoutedModel made;
  if (gpt2) {
    model::Gpt2Config config = model::testing::tiny_gpt2();
    config.shape.blocks = 4;
    config.shape.sequence = 20;
    config.shape.positions = 20;
    made.model.config = config;
  } else {
    model::LlamaConfig config = model::testing::tiny_config();
    config.shape.blocks = 4;
    config.shape.sequence = 20;
    made.model.config = config;
  }
  model::Recipe recipe = model::make_recipe(made.model.config);
  EXPECT_TRUE(dynamism::make_mixture_of_depths_source({})->shape(recipe));
  made.model.places = model::places_of(recipe);
  made.model.layers = model::layers_of(std::move(recipe));
  at::set_num_threads(1);
  for (std::size_t i = 0; i < made.model.layers.size(); ++i) {
    const LayerId id(static_cast<int>(i));
    model::LayerState state = model::make_state(*made.model.layers[i], id, seed);
    for (std::size_t p = 0; p < state.parameters.size(); ++p) {
      Tensor& value = state.parameters[p].value;
      value.add_(random_tensor(value.sizes(), mix_key({seed, i, p}), at::kFloat), 0.3);
    }
    if (made.model.places[i].part == model::Part::kBlock) {
      made.routed.push_back(i);
      const auto own = [&](const char* name) {
        return state.parameters[index_of(*made.model.layers[i], name)].value;
      };
      // No score is so low that a chosen row stays as it was.
      own("router.weight").mul_(0.05);
      own("predictor.down.bias").zero_();
      own("predictor.down.weight").mul_(20);
    }
    made.model.states.push_back(std::move(state));
  }
  return made;
}

model::LayerContext context_of(model::Pass pass, const Tensor& tokens_BT,
                               model::KeyValueCache* cache = nullptr) {
  model::LayerContext context;
  context.pass = pass;
  context.tokens_BT = tokens_BT;
  context.cache = cache;
  return context;
}

Tensor hidden_of(const weights::TrainedModel& model, const Tensor& tokens_BT, model::Pass pass,
                 model::KeyValueCache* cache = nullptr) {
  const model::LayerContext context = context_of(pass, tokens_BT, cache);
  model::Hidden hidden;
  for (std::size_t i = 0; i + 1 < model.layers.size(); ++i) {
    hidden = model.layers[i]->forward(model.states[i], hidden, context, nullptr).hidden;
  }
  if (cache != nullptr) cache->advance(tokens_BT.size(1));
  return hidden.x;
}

// How many rows of one text the predictor of a routed layer chooses: those that it changes.
std::int64_t chosen_in(const weights::TrainedModel& model, const Tensor& tokens,
                       std::size_t layer) {
  const model::LayerContext context = context_of(model::Pass::kGeneration, tokens);
  model::Hidden before;
  for (std::size_t i = 0; i < layer; ++i) {
    before = model.layers[i]->forward(model.states[i], before, context, nullptr).hidden;
  }
  const Tensor after =
      model.layers[layer]->forward(model.states[layer], before, context, nullptr).hidden.x;
  return (after != before.x).any(-1).sum().item<std::int64_t>();
}

double off(const Tensor& ours, const Tensor& wanted) {
  return ((ours - wanted).norm() / wanted.norm()).item<double>();
}

// Sums of products with some rows run in another order than those with others.
TEST(RoutedGeneration, ReadsByACacheThatHasTheChosenRowsAlone) {
  int some_chosen = 0;
  for (const bool gpt2 : {false, true}) {
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      const RoutedModel made = routed_model(gpt2, seed);
      const Tensor tokens = random_tokens(1, 20, 19, seed);
      const Tensor wanted = hidden_of(made.model, tokens, model::Pass::kGeneration);
      model::KeyValueCache cache(20);
      Rng rng(seed);
      std::vector<Tensor> parts;
      while (cache.tokens() < 20) {
        const auto some = static_cast<std::int64_t>(
            seed == 0 ? 1 : 1 + rng.below(static_cast<std::uint64_t>(20 - cache.tokens())));
        parts.push_back(hidden_of(made.model, tokens.narrow(1, cache.tokens(), some),
                                  model::Pass::kGeneration, &cache));
      }
      EXPECT_LE(off(at::cat(parts, 1), wanted), 1e-5) << "seed " << seed;
      for (const std::size_t layer : made.routed) {
        const std::int64_t chosen = chosen_in(made.model, tokens, layer);
        EXPECT_EQ(cache.tokens_of(LayerId(static_cast<int>(layer))), chosen);
        some_chosen += chosen < 20 && chosen > 0 ? 1 : 0;
      }
      EXPECT_EQ(cache.tokens_of(LayerId(1)), 20);
    }
  }
  EXPECT_GT(some_chosen, 10) << "a selection to speak of";
}

// The rows of several sequences may be of different numbers.
TEST(RoutedGeneration, ChoosesEachSequenceByItself) {
  const RoutedModel made = routed_model(false, 7);
  const Tensor tokens = random_tokens(4, 20, 19, 3);
  const Tensor all = hidden_of(made.model, tokens, model::Pass::kGeneration);
  for (std::int64_t b = 0; b < 4; ++b) {
    const Tensor own =
        hidden_of(made.model, tokens.narrow(0, b, 1).contiguous(), model::Pass::kGeneration);
    EXPECT_LE(off(all.narrow(0, b, 1), own), 1e-5);
  }
}

// 1,000 trials: a token that changes leaves what was made of those before it. (Top C of a whole
// text would not.)
TEST(RoutedGeneration, LooksAtNoLaterToken) {
  int looked = 0;
  int some_chosen = 0;
  std::vector<RoutedModel> models;
  for (std::uint64_t seed = 0; seed < 20; ++seed)
    models.push_back(routed_model(seed % 2 == 1, seed));
  for (std::uint64_t trial = 0; trial < 1000; ++trial) {
    const RoutedModel& made = models[trial % models.size()];
    Rng rng(mix_key({0x1A7E, trial}));
    const Tensor tokens = random_tokens(1, 20, 19, mix_key({trial, 1}));
    const auto changed_at = static_cast<std::int64_t>(1 + rng.below(19));
    Tensor other = tokens.clone();
    auto& token = other.data_ptr<std::int64_t>()[changed_at];
    token = (token + 1 + static_cast<std::int64_t>(rng.below(18))) % 19;
    const auto differ = [&](model::Pass pass) {
      return off(hidden_of(made.model, other, pass).narrow(1, 0, changed_at),
                 hidden_of(made.model, tokens, pass).narrow(1, 0, changed_at));
    };
    ASSERT_LE(differ(model::Pass::kGeneration), 1e-5) << "trial " << trial;
    const std::int64_t chosen = chosen_in(made.model, tokens, made.routed[0]);
    some_chosen += chosen > 0 && chosen < 20 ? 1 : 0;
    looked += differ(model::Pass::kValidation) > 1e-3 ? 1 : 0;
    const auto likeliest = [&](const Tensor& x) {
      return model::logits(made.model.config, made.model.states.back(),
                           hidden_of(made.model, x, model::Pass::kGeneration))
          .argmax(-1)
          .narrow(1, 0, changed_at);
    };
    ASSERT_TRUE(likeliest(tokens).equal(likeliest(other))) << "trial " << trial;
  }
  EXPECT_GT(some_chosen, 300) << "a selection to speak of";
  EXPECT_GT(looked, 100) << "a selection that looks ahead is noticed";
}

TEST(RoutedGeneration, IsGreedyByTheWholeText) {
  for (std::uint64_t prompt = 0; prompt < 100; ++prompt) {
    const RoutedModel made = routed_model(prompt % 2 == 1, prompt / 10);
    Rng rng(mix_key({0x9E4, prompt}));
    std::vector<std::int64_t> text(1 + rng.below(8));
    for (std::int64_t& token : text) token = static_cast<std::int64_t>(rng.below(19));
    weights::Sampling sampling;
    sampling.tokens = 12;
    const auto made_text = weights::generate(made.model, text, sampling);
    ASSERT_TRUE(made_text) << made_text.error().message;
    for (const std::int64_t token : *made_text) {
      const auto scores = weights::logits(made.model, text);
      ASSERT_TRUE(scores) << scores.error().message;
      ASSERT_EQ(scores->narrow(0, scores->size(0) - 1, 1).argmax().item<std::int64_t>(), token)
          << "prompt " << prompt;
      text.push_back(token);
    }
    EXPECT_EQ(made_text->size(), 12U);
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
