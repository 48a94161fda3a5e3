// SPDX-License-Identifier: Apache-2.0
#pragma once

// The values of a decoder's parameters, whoever wrote them: one of our checkpoints or Hugging
// Face's transformers.

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
  std::filesystem::path origin;  // folder they were read from
  std::int64_t step = 0;         // of a checkpoint
  std::string data;              // data.path of its run; the folder itself if a Hugging Face one
  std::string tokenizer = {};    // data::tokenizer_name of those data; "" where it is not known
  model::DecoderConfig config;
  // The sources of a checkpoint's run, which shaped its layers.
  dynamism::SourceOptions sources = {};
  // Tensors by checkpoint_name; F32, F16 or BF16. Both of a tied pair are there, and the matrix of
  // a head that was trained in slices is one.
  TensorMap tensors;
  // Buffers of layers, by the same names: a router's bias.
  TensorMap buffers = {};
  std::vector<checkpoint::Safetensors> files;  // that hold their bytes, but for those in `joined`
  std::vector<std::shared_ptr<const std::vector<std::byte>>> joined = {};
  std::string left_out = {};            // of a Hugging Face config (hugging_face.h), or ""
  std::vector<std::string> notes = {};  // newer checkpoints passed over, and why
};

// `path` is a Hugging Face folder (config.json), a run's (its newest verified checkpoint is taken)
// or one checkpoint's. kNoCheckpoint: it is none of them. kBadInput: a file is damaged, a tensor
// missing, of another shape or number type, or not of the model, or the model is not implemented
// (hugging_face.h).
[[nodiscard]] Expected<Weights> read_weights(const std::filesystem::path& path);

// kBadInput unless a run of `config` may start from them, naming the first key of [model] that
// differs and its value there. Whether embeddings are tied may differ if they are tied there.
[[nodiscard]] Expected<void> check_same_decoder(const Weights& weights,
                                                const model::DecoderConfig& config);
// The same of the keys of [moe] that decide which experts there are and how many a token has; how a
// run balances them may differ.
[[nodiscard]] Expected<void> check_same_experts(const Weights& weights,
                                                const dynamism::SourceOptions& sources);

// Reads all values. kBadInput, naming the first tensor with a NaN or Inf among them.
[[nodiscard]] Expected<void> check_finite(const Weights& weights);

// The layers of a decoder, replaced by those of its sources. kBadInput of a source.
[[nodiscard]] Expected<model::Recipe> shaped_recipe(const model::DecoderConfig& config,
                                                    const dynamism::SourceOptions& sources);

// kBadInput unless there are weights of all parameters that `layers` at these places have.
[[nodiscard]] Expected<void> check_same_layers(const Weights& weights,
                                               const std::vector<model::Place>& places,
                                               const model::Model& layers);

// Fills the values of a layer at a place of a decoder that check_same_decoder accepted, and the
// buffers that there are.
void load_values(const Weights& weights, const model::Place& place, model::LayerState& state);

}  // namespace dynmo::weights
