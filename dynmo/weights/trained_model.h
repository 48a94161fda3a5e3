// SPDX-License-Identifier: Apache-2.0
#pragma once

// A whole trained model in one process, to generate text and to export (export.h).

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/expected.h"
#include "dynmo/data/tokenizer.h"
#include "dynmo/dynamism/source_options.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/layer.h"

namespace dynmo::weights {

struct TrainedModel {
  std::filesystem::path checkpoint;
  std::int64_t step = 0;
  // Folder that knows the tokenizer: data.path of the run, or a Hugging Face folder.
  std::string data;
  // data::tokenizer_name of the folder above, or "" if it is not known.
  std::string tokenizer;
  std::string left_out;            // as hugging_face.h returns it
  std::vector<std::string> notes;  // newer checkpoints that were skipped, with reasons
  model::DecoderConfig config;
  dynamism::SourceOptions sources = {};  // those of its run that shape layers
  model::Model layers;
  std::vector<model::Place> places;       // by LayerId
  std::vector<model::LayerState> states;  // by LayerId; values only
  // Set if a source chooses pairs for attention. Then the whole text is read for each token.
  bool sparse_attention = false;
  // Set if tokens leave at earlier heads. They do so here, too.
  bool early_exit = false;
  // The table of the source whose layers no other library has. Empty if there is none, or if it is
  // [moe].
  std::string own_layers = {};
  bool experts_choose = false;  // experts choose tokens, also later ones (moe.router)
};

// Opens a model. `path` and errors are those of read_weights() and check_finite() (weights.h).
[[nodiscard]] Expected<TrainedModel> open_trained(const std::filesystem::path& path);

// Returns a layer's parameter under its full name. The model owns the bytes.
[[nodiscard]] checkpoint::TensorView view_of(const TrainedModel& model, LayerId layer,
                                             const model::Parameter& parameter);

// Returns the tokenizer of the run's data, or that of `name` (open_tokenizer) if it is not empty.
// Returns kBadInput if the data are missing or have another tokenizer now, and `name` is empty.
// Also returns it if the tokenizer's vocabulary is larger than the model's.
[[nodiscard]] Expected<std::unique_ptr<const data::Tokenizer>> tokenizer_of(
    const TrainedModel& model, const std::string& name);

// Writes RUN/checkpoints/step-00000000 and RUN/config.toml with the weights and the decoder of a
// Hugging Face folder. `dynmo generate` works on the result, and a run starts from it with
// train.init. The checkpoint has no optimizer state.
//
// Returns a line for the user with what is left out of the folder's config, or "". Returns
// kBadInput like read_weights(), or if `run` has checkpoints already.
[[nodiscard]] Expected<std::string> import_hugging_face(const std::filesystem::path& directory,
                                                        const std::filesystem::path& run);

}  // namespace dynmo::weights
