// SPDX-License-Identifier: Apache-2.0
#pragma once

// A decoder of any of the families there are: what training, checkpoints and generation need of
// one, whichever it is.

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
// The layers of make_decoder in their places.
[[nodiscard]] Recipe make_recipe(const DecoderConfig& config);
// 1 + 2 x blocks + shape.head_slices layers: embedding, blocks.0.attention, blocks.0.mlp, ...,
// head. Requires a valid config.
[[nodiscard]] Model make_decoder(const DecoderConfig& config);
// Whether the embedding's and the head's matrix are one.
[[nodiscard]] bool tied(const DecoderConfig& config);
// The embedding's and the head's matrix, where they are one; else none. A slice of a head is tied
// to its rows of the embedding. For make_decoder's layers.
[[nodiscard]] std::vector<Tie> ties(const DecoderConfig& config);
// Hugging Face's full name of a layer's parameter.
[[nodiscard]] std::string checkpoint_name(const DecoderConfig& config, const Place& place,
                                          std::string_view parameter);
// The head's scores before softmax, [B, T, vocabulary], without a graph: for generating text.
[[nodiscard]] at::Tensor logits(const DecoderConfig& config, const LayerState& head,
                                const at::Tensor& hidden_BTD);

}  // namespace dynmo::model
