// SPDX-License-Identifier: Apache-2.0
#pragma once

// The layers that make_gpt2 puts together, written by hand: what each keeps between its three calls
// is listed beside it in gpt2_layers.cpp and counted by activation_bytes (memory.h). A matrix W is
// [in, out]: y = x W + bias.

#include <memory>
#include <string>

#include "dynmo/model/family_impl.h"
#include "dynmo/model/gpt2.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

// dropout(tokens + positions); parameters: tokens, positions.
[[nodiscard]] std::shared_ptr<const Layer> gpt2_embedding_layer(Specs specs,
                                                                const Gpt2Config& config);
// x + dropout(attention(layer_norm(x))); parameters: norm, qkv, projection, a weight and a bias
// each.
[[nodiscard]] std::shared_ptr<const Layer> gpt2_attention_layer(std::string name, Specs specs,
                                                                const Gpt2Config& config);
// x + dropout(projection(gelu(fc(layer_norm(x))))); parameters: norm, fc, projection, a weight and
// a bias each.
[[nodiscard]] std::shared_ptr<const Layer> gpt2_mlp_layer(std::string name, Specs specs,
                                                          const Gpt2Config& config);
// Adds the mean cross-entropy of the scores layer_norm(x) head^T, in shape.head_slices layers;
// parameters: norm's weight and bias, head.
void add_gpt2_head(Specs specs, const Gpt2Config& config, Model& model);

}  // namespace dynmo::model
