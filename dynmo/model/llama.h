// SPDX-License-Identifier: Apache-2.0
#pragma once

// A decoder of the Llama family (Touvron et al., 2023) as a list of movable layers. The first is
// the embedding. Each block has two half blocks, attention and MLP, each x +
// dropout(f(rms_norm(x))). The last is final norm + head, whose output is the mean cross-entropy of
// the micro-batch.
//
// Parameters have Hugging Face's names and are separate tensors, so a checkpoint is written without
// conversion.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/cost/decoder_shape.h"
#include "dynmo/cost/rotary.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/recipe.h"

namespace dynmo::model {

struct LlamaConfig {
  cost::DecoderShape shape = {.vocabulary = 257,  // bytes and an end of text
                              .hidden = 256,
                              .blocks = 8,
                              .heads = 8,
                              .kv_heads = 8,
                              .intermediate = 688,
                              .sequence = 128};
  cost::Rotary rope = {};
  double rms_epsilon = 1e-5;
  // Standard deviation of the normal initial values. For the two projections into the residual
  // stream it is divided by sqrt(2 x blocks), as in GPT-2 (Radford et al., 2019, section 2.3).
  double init_std = 0.02;
  double dropout = 0;
  bool tied_embeddings = false;  // head's matrix = embedding's matrix
  bool qkv_bias = false;         // queries, keys and values have a bias, as in Qwen2

  [[nodiscard]] std::int64_t head_size() const { return shape.hidden / shape.heads; }
  friend bool operator==(const LlamaConfig&, const LlamaConfig&) = default;
};

// Checks a config. Fails with kBadInput, which names the key of a run's config, its value, and what
// it must be.
[[nodiscard]] Expected<void> validate(const LlamaConfig& config);

// Makes 1 + 2 x blocks + shape.head_slices layers: embedding, blocks.0.attention, blocks.0.mlp,
// ..., head. Requires a valid config.
[[nodiscard]] Model make_llama(const LlamaConfig& config);

// Returns Hugging Face's full name of a layer's parameter. {layer 3, "self_attn.q_proj.weight"} is
// "model.layers.1.self_attn.q_proj.weight".
[[nodiscard]] std::string checkpoint_name(const LlamaConfig& config, const Place& place,
                                          std::string_view parameter);

// Returns the head's scores before softmax, [B, T, vocabulary], without a graph, for generating
// text.
[[nodiscard]] at::Tensor llama_logits(const LlamaConfig& config, const LayerState& head,
                                      const at::Tensor& hidden_BTD);

}  // namespace dynmo::model
