// SPDX-License-Identifier: Apache-2.0
#pragma once

// The hand-written layers of make_llama() and make_gpt2(). llama_layers.cpp, moe_layer.cpp and
// gpt2_layers.cpp list what each keeps between its three calls.

#include <memory>
#include <string>

#include "dynmo/kernels/operations.h"
#include "dynmo/model/family_impl.h"
#include "dynmo/model/gpt2.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/llama.h"
#include "dynmo/model/moe.h"

namespace dynmo::model {

[[nodiscard]] std::shared_ptr<const Layer> embedding_layer(Specs specs);
// Makes x + dropout(attention(rms_norm(x))). Parameters: norm, q, k, v, o.
[[nodiscard]] std::shared_ptr<const Layer> attention_layer(std::string name, Specs specs,
                                                           const LlamaConfig& config,
                                                           const kernels::RotaryTable& table);
// Makes x + dropout(down(silu(gate(n)) * up(n))), n = rms_norm(x). Parameters: norm, gate, up,
// down.
[[nodiscard]] std::shared_ptr<const Layer> mlp_layer(std::string name, Specs specs,
                                                     const LlamaConfig& config);
// Adds the mean cross-entropy of the scores rms_norm(x) head^T, in shape.head_slices layers.
// Parameters: norm, head.
void add_head(Specs specs, const LlamaConfig& config, Model& model);

// Makes the layer of moe.h for TakesExperts. `norm` is its first parameter.
[[nodiscard]] std::shared_ptr<const Layer> moe_layer(std::string name, ParameterSpec norm,
                                                     const LlamaConfig& config,
                                                     const MoeConfig& moe);

// The layers of GPT-2. A matrix W is [in, out]: y = x W + bias.

// Makes dropout(tokens + positions). Parameters: tokens, positions.
[[nodiscard]] std::shared_ptr<const Layer> gpt2_embedding_layer(Specs specs,
                                                                const Gpt2Config& config);
// Makes x + dropout(attention(layer_norm(x))). Parameters: norm, qkv, projection, each with a
// weight and a bias.
[[nodiscard]] std::shared_ptr<const Layer> gpt2_attention_layer(std::string name, Specs specs,
                                                                const Gpt2Config& config);
// Makes x + dropout(projection(gelu(fc(layer_norm(x))))). Parameters: norm, fc, projection, each
// with a weight and a bias.
[[nodiscard]] std::shared_ptr<const Layer> gpt2_mlp_layer(std::string name, Specs specs,
                                                          const Gpt2Config& config);
// Adds the mean cross-entropy of the scores layer_norm(x) head^T, in shape.head_slices layers.
// Parameters: norm's weight and bias, head.
void add_gpt2_head(Specs specs, const Gpt2Config& config, Model& model);

}  // namespace dynmo::model
