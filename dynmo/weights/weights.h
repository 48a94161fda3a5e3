// SPDX-License-Identifier: Apache-2.0
#pragma once

// The values of a decoder's parameters, from one of our checkpoints or from Hugging Face's
// transformers.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/expected.h"
#include "dynmo/dynamism/source_options.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/layer.h"
#include "dynmo/weights/mixtral.h"

namespace dynmo::weights {

struct Weights {
  std::filesystem::path origin;  // source folder
  std::int64_t step = 0;         // of a checkpoint
  std::string data;              // data.path of the run, or a Hugging Face folder itself
  std::string tokenizer = {};    // data::tokenizer_name of `data`; "" if not known
  model::DecoderConfig config;
  // The sources of a checkpoint's run, which shaped its layers.
  dynamism::SourceOptions sources = {};
  // Tensors by checkpoint_name: F32, F16 or BF16. Both of a tied pair are there. The matrix of a
  // head that was trained in slices is one tensor.
  TensorMap tensors;
  // Buffers of layers, by the same names: a router's bias.
  TensorMap buffers = {};
  // Files that hold the bytes, except for those in `joined`.
  std::vector<checkpoint::Safetensors> files;
  std::vector<std::shared_ptr<const std::vector<std::byte>>> joined = {};
  std::string left_out = {};            // as hugging_face.h returns it
  std::vector<std::string> notes = {};  // newer checkpoints that were skipped, with reasons
};

// Reads the weights of `path`. It is a Hugging Face folder (config.json), a run's folder (its
// newest verified checkpoint is used), or one checkpoint's folder. Returns kNoCheckpoint if it is
// none of them.
//
// Returns kBadInput for a damaged file, or a model that is not implemented (hugging_face.h). Also
// returns it for a tensor that is missing, not part of the model, or of another shape or number
// type.
[[nodiscard]] Expected<Weights> read_weights(const std::filesystem::path& path);

// Returns kBadInput unless a run of `config` may start from the weights, with the first key of
// [model] that differs and its value there. Tied embeddings may become untied.
[[nodiscard]] Expected<void> check_same_decoder(const Weights& weights,
                                                const model::DecoderConfig& config);
// Like check_same_decoder(), for the keys of [moe] that decide which experts there are and how many
// a token has. How a run balances them may differ.
[[nodiscard]] Expected<void> check_same_experts(const Weights& weights,
                                                const dynamism::SourceOptions& sources);

// Reads all values. Fails with kBadInput and the name of the first tensor with a NaN or Inf.
[[nodiscard]] Expected<void> check_finite(const Weights& weights);

// Returns the layers of a decoder, replaced by those of its sources. Returns kBadInput if a source
// refuses them.
[[nodiscard]] Expected<model::Recipe> shaped_recipe(const model::DecoderConfig& config,
                                                    const dynamism::SourceOptions& sources);

// Returns kBadInput unless there are weights for all parameters that `layers` at these places have.
[[nodiscard]] Expected<void> check_same_layers(const Weights& weights,
                                               const std::vector<model::Place>& places,
                                               const model::Model& layers);

// Fills the values and existing buffers of the layer at `place`. Requires a decoder that
// check_same_decoder() has accepted.
void load_values(const Weights& weights, const model::Place& place, model::LayerState& state);

}  // namespace dynmo::weights
