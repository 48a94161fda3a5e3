// SPDX-License-Identifier: Apache-2.0
#pragma once

// The functions behind make_llama's layers, for tests that put the whole model into one graph.

#include "dynmo/model/llama.h"

namespace dynmo::model {

[[nodiscard]] AutogradFunction embedding_function();
[[nodiscard]] AutogradFunction attention_function(const LlamaConfig& config);
[[nodiscard]] AutogradFunction mlp_function(const LlamaConfig& config);
[[nodiscard]] AutogradFunction head_function(const LlamaConfig& config);

}  // namespace dynmo::model
