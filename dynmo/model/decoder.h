// SPDX-License-Identifier: Apache-2.0
#pragma once

// A decoder of any family: what training, checkpoints and generation need of it, independent of the
// family.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/family.h"
#include "dynmo/model/gpt2.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/llama.h"
#include "dynmo/model/recipe.h"
#include "dynmo/model/tie.h"

namespace dynmo::model {

using DecoderConfig = std::variant<LlamaConfig, Gpt2Config>;

[[nodiscard]] cost::Family family(const DecoderConfig& config);

[[nodiscard]] const cost::DecoderShape& shape_of(const DecoderConfig& config);

[[nodiscard]] Expected<void> validate(const DecoderConfig& config);
// Returns the layers of make_decoder() with their places.
[[nodiscard]] Recipe make_recipe(const DecoderConfig& config);
// Makes 1 + 2 x blocks + shape.head_slices layers: embedding, blocks.0.attention, blocks.0.mlp,
// ..., head. Requires a valid config.
[[nodiscard]] Model make_decoder(const DecoderConfig& config);
// Returns whether the embedding and the head share one matrix.
[[nodiscard]] bool tied(const DecoderConfig& config);
// Returns the ties of make_decoder()'s layers: the shared matrix of embedding and head, if there is
// one. A slice of a head is tied to its rows of the embedding.
[[nodiscard]] std::vector<Tie> ties(const DecoderConfig& config);
// Returns Hugging Face's full name of a layer's parameter.
[[nodiscard]] std::string checkpoint_name(const DecoderConfig& config, const Place& place,
                                          std::string_view parameter);
// Returns the head's scores before softmax, [B, T, vocabulary], without a graph, for generating
// text.
[[nodiscard]] at::Tensor logits(const DecoderConfig& config, const LayerState& head,
                                const at::Tensor& hidden_BTD);

}  // namespace dynmo::model
