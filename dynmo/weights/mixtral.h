// SPDX-License-Identifier: Apache-2.0
#pragma once

// A Mixtral is a Llama that trains with [moe]: between that table and Mixtral's config, and between
// two spellings of its tensors.
//
// Files of Hugging Face's transformers hold a matrix a name,
// "model.layers.0.block_sparse_moe.experts.3.w1.weight", which is what a layer's parameters are
// called here. Since version 5 its models hold those of all experts in one tensor,
// "model.layers.0.mlp.experts.gate_up_proj", and so do files that it is told to write as the model
// is.

#include <map>
#include <string>
#include <string_view>

#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/decoder_shape.h"
#include "dynmo/dynamism/source_options.h"
#include "dynmo/model/decoder.h"
#include "dynmo/weights/hugging_face.h"

namespace dynmo::weights {

using TensorMap = std::map<std::string, checkpoint::TensorView, std::less<>>;

// Replaces the tensors that hold all experts of a block by those of each expert, and the router's
// later name by its first. They stay views of the same bytes. kBadInput naming the tensor: another
// shape or number type than the config asks for, a tensor that is there under both names.
[[nodiscard]] Expected<void> separate_experts(TensorMap& tensors, const cost::DecoderShape& shape,
                                              const Experts& experts, std::string_view origin);

// The sources of a run that trains a Mixtral.
[[nodiscard]] dynamism::SourceOptions sources_of(const Experts& experts);

// Returns the model that transformers has for a decoder that was trained with these sources: a
// Mixtral where [moe] is enabled. kBadInput, naming the key: a router or a capacity that a Mixtral
// does not have.
[[nodiscard]] Expected<HuggingFaceModel> exported_model(const model::DecoderConfig& config,
                                                        const dynamism::SourceOptions& sources,
                                                        std::string_view origin);

}  // namespace dynmo::weights
