// SPDX-License-Identifier: Apache-2.0
#pragma once

// The layers that make_llama puts together, written by hand: what each keeps between its three
// calls is listed beside it in llama_layers.cpp and counted by activation_bytes (memory.h).

#include <memory>
#include <string>

#include "dynmo/kernels/operations.h"
#include "dynmo/model/family_impl.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/llama.h"

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

}  // namespace dynmo::model
