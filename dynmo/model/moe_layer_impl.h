// SPDX-License-Identifier: Apache-2.0
#pragma once

// The layer of moe.h as TakesExperts makes it.

#include <memory>
#include <string>

#include "dynmo/model/family_impl.h"
#include "dynmo/model/llama.h"
#include "dynmo/model/moe.h"

namespace dynmo::model {

// `norm` is the layer's first parameter.
[[nodiscard]] std::shared_ptr<const Layer> moe_layer(std::string name, ParameterSpec norm,
                                                     const LlamaConfig& config,
                                                     const MoeConfig& moe);

}  // namespace dynmo::model
