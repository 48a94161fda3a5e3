// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/key_value_cache.h"

#include <gtest/gtest.h>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/precision.h"
#include "tests/model/helpers.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;
using testing::random_tokens;

struct Reading {
  Model layers;
  std::vector<LayerState> states;

  Reading(Model model) : layers(std::move(model)) {  // NOLINT: a model with its weights
    for (std::size_t i = 0; i < layers.size(); ++i) {
      states.push_back(make_state(*layers[i], LayerId(static_cast<int>(i)), 3));
    }
  }
  // Before the head.
  [[nodiscard]] at::Tensor hidden(const at::Tensor& tokens_BT, KeyValueCache* cache) const {
    LayerContext context;
    context.pass = Pass::kGeneration;
    context.tokens_BT = tokens_BT;
    context.cache = cache;
    Hidden hidden;
    for (std::size_t i = 0; i + 1 < layers.size(); ++i) {
      hidden = layers[i]->forward(states[i], hidden, context, nullptr).hidden;
    }
    if (cache != nullptr) cache->advance(tokens_BT.size(1));
    return hidden.x;
  }
};

// Longer than a block of attention's rows.
DecoderConfig config_named(const std::string& name) {
  if (name == "gpt2") {
    Gpt2Config config = testing::tiny_gpt2();
    config.shape.sequence = 150;
    config.shape.positions = 160;
    config.dropout = 0.5;  // which generation leaves out
    return config;
  }
  LlamaConfig config = testing::tiny_config();
  config.shape.sequence = 150;
  config.dropout = 0.5;
  if (name == "llama") config.shape.kv_heads = config.shape.heads;
  return config;
}

double difference(const at::Tensor& ours, const at::Tensor& wanted) {
  EXPECT_EQ(ours.sizes(), wanted.sizes());
  return ((ours - wanted).norm() / wanted.norm()).to(at::kDouble).item<double>();
}

class Cache : public ::testing::TestWithParam<const char*> {};

// The sums of products with one row run in another order than those with many.
TEST_P(Cache, GivesTheScoresOfTheWholeText) {
  const DecoderConfig config = config_named(GetParam());
  const Reading model(make_decoder(config));
  const at::Tensor tokens = random_tokens(2, 150, 19, 4);
  const at::Tensor wanted = model.hidden(tokens, nullptr);
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    Rng rng(seed);
    KeyValueCache cache(150);
    std::vector<at::Tensor> parts;
    while (cache.tokens() < 150) {
      const auto some = static_cast<std::int64_t>(
          seed == 0 ? 1 : 1 + rng.below(static_cast<std::uint64_t>(150 - cache.tokens())));
      parts.push_back(model.hidden(tokens.narrow(1, cache.tokens(), some), &cache));
    }
    const at::Tensor made = at::cat(parts, 1);
    EXPECT_LE(difference(made, wanted), 1e-5) << "seed " << seed;
    const at::Tensor scores = logits(config, model.states.back(), made);
    const at::Tensor theirs = logits(config, model.states.back(), wanted);
    EXPECT_LE(difference(scores, theirs), 1e-5) << "seed " << seed;
    EXPECT_TRUE(scores.argmax(-1).equal(theirs.argmax(-1))) << "seed " << seed;
  }
}

// Other orders round to other neighbours: a few roundoffs of 2^-8.
TEST_P(Cache, GivesTheHiddenValuesOfTheWholeTextInBf16) {
  const Reading model(in_precision(make_decoder(config_named(GetParam())), cost::Precision::kBf16));
  const at::Tensor tokens = random_tokens(1, 100, 19, 5);
  const at::Tensor wanted = model.hidden(tokens, nullptr);
  EXPECT_EQ(wanted.scalar_type(), at::kBFloat16);
  KeyValueCache cache(100);
  std::vector<at::Tensor> parts;
  for (std::int64_t t = 0; t < 100; ++t) {
    parts.push_back(model.hidden(tokens.narrow(1, t, 1), &cache));
  }
  EXPECT_LE(difference(at::cat(parts, 1).to(at::kDouble), wanted.to(at::kDouble)), 0x1p-7);
}

TEST_P(Cache, ReadsAnewOnceItIsCleared) {
  const Reading model(make_decoder(config_named(GetParam())));
  const at::Tensor tokens = random_tokens(1, 40, 19, 6);
  KeyValueCache cache(40);
  static_cast<void>(model.hidden(random_tokens(1, 40, 19, 7), &cache));
  EXPECT_THROW(static_cast<void>(model.hidden(tokens.narrow(1, 0, 1), &cache)), CheckFailure);
  cache.clear();
  const at::Tensor first = model.hidden(tokens.narrow(1, 0, 30), &cache);
  EXPECT_EQ(cache.tokens(), 30);
  EXPECT_TRUE(first.equal(model.hidden(tokens.narrow(1, 0, 30), nullptr)));
}

INSTANTIATE_TEST_SUITE_P(Decoders, Cache, ::testing::Values("llama", "grouped", "gpt2"));

TEST(KeyValueCache, KeepsWhatItHasWhileItGrows) {
  KeyValueCache cache(300);
  std::vector<at::Tensor> keys;
  for (std::int64_t t = 0; t < 300; t += 3) {
    keys.push_back(random_tensor({2, 3, 2, 5}, static_cast<std::uint64_t>(t)));
    const auto all = cache.append(LayerId(1), keys.back(), keys.back() + 1);
    cache.advance(3);
    ASSERT_TRUE(all.k_BTHK.equal(at::cat(keys, 1)));
    ASSERT_TRUE(all.v_BTHK.equal(at::cat(keys, 1) + 1));
  }
  EXPECT_THROW(static_cast<void>(cache.append(LayerId(1), keys[0], keys[0])), CheckFailure);
}

}  // namespace
}  // namespace dynmo::model
