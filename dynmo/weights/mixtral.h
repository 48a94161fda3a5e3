// SPDX-License-Identifier: Apache-2.0
#pragma once

// Converts between a Mixtral and a Llama that trains with [moe]. It converts that table and
// Mixtral's config, and two spellings of its tensors.
//
// Files of Hugging Face's transformers hold one matrix a name,
// "model.layers.0.block_sparse_moe.experts.3.w1.weight". A layer's parameters have the same names
// here. Since version 5 its models hold the matrices of all experts in one tensor,
// "model.layers.0.mlp.experts.gate_up_proj". Files that are written in the model's own format do,
// too.

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
// later name by its first. They stay views of the same bytes.
//
// Returns kBadInput with the tensor for another shape or number type than the config requires. Also
// returns it if a tensor exists under both names.
[[nodiscard]] Expected<void> separate_experts(TensorMap& tensors, const cost::DecoderShape& shape,
                                              const Experts& experts, std::string_view origin);

// Returns the sources of a run that trains a Mixtral.
[[nodiscard]] dynamism::SourceOptions sources_of(const Experts& experts);

// Returns the transformers model of a decoder that was trained with these sources: a Mixtral if
// [moe] is enabled. Returns kBadInput with the key for a router or a capacity that a Mixtral does
// not have.
[[nodiscard]] Expected<HuggingFaceModel> exported_model(const model::DecoderConfig& config,
                                                        const dynamism::SourceOptions& sources,
                                                        std::string_view origin);

}  // namespace dynmo::weights
