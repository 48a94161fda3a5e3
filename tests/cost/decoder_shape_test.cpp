// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/decoder_shape.h"

#include <gtest/gtest.h>

#include "dynmo/cost/transformer.h"

namespace dynmo::cost {
namespace {

TEST(DecoderShape, SizesOf0FollowFromTheWidthAsInTheArchitecturesModels) {
  const DecoderShape given = {.hidden = 4096, .blocks = 32, .sequence = 2048};
  EXPECT_EQ(with_defaults(given, Architecture::kLlama),  // Llama 7B
            (DecoderShape{.vocabulary = 32000,
                          .hidden = 4096,
                          .blocks = 32,
                          .heads = 32,
                          .kv_heads = 32,
                          .intermediate = 11008,
                          .sequence = 2048,
                          .positions = 2048}));
  const TransformerShape mixtral = transformer_shape(given, Architecture::kMixtral);  // 8x7B
  EXPECT_EQ(mixtral.kv_heads, 8);
  EXPECT_EQ(mixtral.intermediate, 14336);
  EXPECT_EQ(mixtral.head_size, 128);
  EXPECT_EQ(mixtral.experts, 8);
  EXPECT_EQ(mixtral.experts_per_token, 2);
  const TransformerShape gpt =  // GPT-2, its vocabulary padded
      transformer_shape({.hidden = 768, .blocks = 12, .sequence = 1024}, Architecture::kGpt);
  EXPECT_EQ(gpt.heads, 12);
  EXPECT_EQ(gpt.kv_heads, 12);
  EXPECT_EQ(gpt.intermediate, 3072);
  EXPECT_EQ(gpt.vocabulary, 50304);
  EXPECT_TRUE(gpt.learned_positions && gpt.qkv_biases && !gpt.gated_mlp);
  EXPECT_TRUE(validate(mixtral) && validate(gpt));
}

TEST(DecoderShape, WhatIsGivenStays) {
  const DecoderShape given = {.vocabulary = 257,
                              .hidden = 256,
                              .blocks = 8,
                              .heads = 8,
                              .kv_heads = 2,
                              .intermediate = 688,
                              .sequence = 128,
                              .positions = 512};
  for (const auto architecture :
       {Architecture::kGpt, Architecture::kLlama, Architecture::kMixtral}) {
    EXPECT_EQ(with_defaults(given, architecture), given);
  }
  EXPECT_TRUE(validate(given));
}

TEST(DecoderShape, FaultsNameTheKey) {
  const auto message = [](auto change) {
    DecoderShape shape =
        with_defaults({.hidden = 256, .blocks = 2, .sequence = 64}, Architecture::kLlama);
    change(shape);
    return validate(shape, {.hidden = 1024, .blocks = 10, .tokens = 40000}).error().message;
  };
  EXPECT_EQ(message([](auto& s) { s.hidden = 0; }), "model.hidden is 0, wanted 1 to 1024");
  EXPECT_EQ(message([](auto& s) { s.heads = 1025; }), "model.heads is 1025, wanted 1 to 1024");
  EXPECT_EQ(message([](auto& s) { s.blocks = 11; }), "model.blocks is 11, wanted 1 to 10");
  EXPECT_EQ(message([](auto& s) { s.vocabulary = 40001; }),
            "model.vocabulary is 40001, wanted 1 to 40000");
  EXPECT_EQ(message([](auto& s) { s.kv_heads = 3; }),
            "model.kv_heads is 3, wanted a divisor of model.heads (2)");
  EXPECT_EQ(message([](auto& s) { s.positions = 63; }),
            "model.positions is 63, wanted at least model.sequence (64), or 0");
  EXPECT_EQ(message([](auto& s) { s.positions = 40001; }),
            "model.positions is 40001, wanted at most 40000");
}

}  // namespace
}  // namespace dynmo::cost
