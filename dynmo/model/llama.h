// SPDX-License-Identifier: Apache-2.0
#pragma once

// A decoder of the Llama family (Touvron et al., 2023) as a list of movable layers: embedding, two
// half blocks a block (attention, then MLP, each x + dropout(f(rms_norm(x)))), and final norm +
// head, whose output is the mean cross-entropy of the micro-batch. Parameters carry Hugging Face's
// names and are separate tensors, so that a checkpoint is written as it is.

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

struct LlamaConfig {
  cost::DecoderShape shape = {.vocabulary = 257,  // bytes and an end of text
                              .hidden = 256,
                              .blocks = 8,
                              .heads = 8,
                              .kv_heads = 8,
                              .intermediate = 688,
                              .sequence = 128};
  double rope_theta = 10000;
  double rms_epsilon = 1e-5;
  // Standard deviation of the normal initial values; that of the two projections into the residual
  // stream is divided by sqrt(2 x blocks), as in GPT-2 (Radford et al., 2019, section 2.3).
  double init_std = 0.02;
  double dropout = 0;
  bool tied_embeddings = false;  // the head's matrix is that of the embedding

  [[nodiscard]] std::int64_t head_size() const { return shape.hidden / shape.heads; }
  friend bool operator==(const LlamaConfig&, const LlamaConfig&) = default;
};

// kBadInput naming the key of a run's config, what it is, and what it must be.
[[nodiscard]] Expected<void> validate(const LlamaConfig& config);

// 1 + 2 x blocks + shape.head_slices layers: embedding, blocks.0.attention, blocks.0.mlp, ...,
// head. Requires a valid config.
[[nodiscard]] Model make_llama(const LlamaConfig& config);

// Hugging Face's full name of a layer's parameter: {layer 3, "self_attn.q_proj.weight"} is
// "model.layers.1.self_attn.q_proj.weight".
[[nodiscard]] std::string checkpoint_name(const LlamaConfig& config, const Place& place,
                                          std::string_view parameter);

// The head's scores before softmax, [B, T, vocabulary], without a graph: for generating text.
[[nodiscard]] at::Tensor llama_logits(const LlamaConfig& config, const LayerState& head,
                                      const at::Tensor& hidden_BTD);

}  // namespace dynmo::model
