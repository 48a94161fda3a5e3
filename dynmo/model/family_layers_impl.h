// SPDX-License-Identifier: Apache-2.0
#pragma once

// The layers that make_llama and make_gpt2 put together, written by hand: what each keeps between
// its three calls is listed beside it in llama_layers.cpp, moe_layer.cpp and gpt2_layers.cpp.

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
// x + dropout(attention(rms_norm(x))); parameters: norm, q, k, v, o.
[[nodiscard]] std::shared_ptr<const Layer> attention_layer(std::string name, Specs specs,
                                                           const LlamaConfig& config,
                                                           const kernels::RotaryTable& table);
// x + dropout(down(silu(gate(n)) * up(n))), n = rms_norm(x); parameters: norm, gate, up, down.
[[nodiscard]] std::shared_ptr<const Layer> mlp_layer(std::string name, Specs specs,
                                                     const LlamaConfig& config);
// Adds the mean cross-entropy of the scores rms_norm(x) head^T, in shape.head_slices layers;
// parameters: norm, head.
void add_head(Specs specs, const LlamaConfig& config, Model& model);

// The layer of moe.h as TakesExperts makes it. `norm` is its first parameter.
[[nodiscard]] std::shared_ptr<const Layer> moe_layer(std::string name, ParameterSpec norm,
                                                     const LlamaConfig& config,
                                                     const MoeConfig& moe);

// The layers of GPT-2. A matrix W is [in, out]: y = x W + bias.

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
