// SPDX-License-Identifier: Apache-2.0
#pragma once

// A decoder of the GPT-2 family (Radford et al., 2019) as a list of movable layers. The first is
// the embedding of tokens and positions. Each block has two half blocks, attention and MLP, each x
// + dropout(f(layer_norm(x))). The last is final norm + head, whose output is the mean
// cross-entropy of the micro-batch.
//
// Parameters have Hugging Face's names and shapes, so a checkpoint is written without conversion.
// Matrices of half blocks are [in, out], and query, key and value are one matrix.
//
// Dropout acts on the embedding and the updates of half blocks. Dropout of attention's
// probabilities is not supported.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/cost/decoder_shape.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/recipe.h"

namespace dynmo::model {

struct Gpt2Config {
  cost::DecoderShape shape = {.vocabulary = 257,  // bytes and an end of text
                              .hidden = 256,
                              .blocks = 8,
                              .heads = 8,
                              .kv_heads = 0,  // 0: equal to heads
                              .intermediate = 1024,
                              .sequence = 128,
                              .positions = 128};
  double norm_epsilon = 1e-5;
  // Standard deviation of the normal initial values. For the two projections into the residual
  // stream it is divided by sqrt(2 x blocks) (Radford et al., 2019, section 2.3).
  double init_std = 0.02;
  double dropout = 0;
  bool tied_embeddings = true;  // head's matrix = embedding's matrix

  [[nodiscard]] std::int64_t head_size() const { return shape.hidden / shape.heads; }
  friend bool operator==(const Gpt2Config&, const Gpt2Config&) = default;
};

// Checks a config. Fails with kBadInput, which names the key of a run's config, its value, and what
// it must be.
[[nodiscard]] Expected<void> validate(const Gpt2Config& config);

// Makes 1 + 2 x blocks + shape.head_slices layers: embedding, blocks.0.attention, blocks.0.mlp,
// ..., head. Requires a valid config.
[[nodiscard]] Model make_gpt2(const Gpt2Config& config);

// Returns Hugging Face's full name of a layer's parameter. {layer 3, "attn.c_attn.weight"} is
// "transformer.h.1.attn.c_attn.weight".
[[nodiscard]] std::string checkpoint_name(const Gpt2Config& config, const Place& place,
                                          std::string_view parameter);

// Returns the head's scores before softmax, [B, T, vocabulary], without a graph, for generating
// text.
[[nodiscard]] at::Tensor gpt2_logits(const Gpt2Config& config, const LayerState& head,
                                     const at::Tensor& hidden_BTD);

}  // namespace dynmo::model
