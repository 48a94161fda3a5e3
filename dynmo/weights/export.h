// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes a trained model as a folder that Hugging Face's transformers reads.

#include <filesystem>
#include <string>
#include <vector>

#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/weights/trained_model.h"

namespace dynmo::weights {

// Returns kBadInput unless `directory` is absent or empty.
[[nodiscard]] Expected<void> check_export_folder(const std::filesystem::path& directory);

struct ExportOptions {
  // Replaces the files of a model in the folder, and nothing else. Else the folder must be absent
  // or empty.
  bool overwrite = false;
  checkpoint::DType dtype = checkpoint::DType::kF32;  // or kBF16, rounded to nearest even
  // A file has at most so many bytes of tensors, or one larger tensor.
  Bytes shard_bytes{50'000'000'000};
};

// Writes config.json and model.safetensors, or shards with model.safetensors.index.json. Hugging
// Face's LlamaForCausalLM, Qwen2ForCausalLM, GPT2LMHeadModel or MixtralForCausalLM reads them. A
// tied pair is written once, under the embedding's name, as these classes do. If the tokenizer is
// known, its end of a document is eos_token_id, also of generation_config.json. Returns the names
// of the files. Returns kBadInput if transformers has no such model (mixtral.h).
[[nodiscard]] Expected<std::vector<std::string>> export_hugging_face(
    const TrainedModel& model, const std::filesystem::path& directory,
    const ExportOptions& options = {});

// Copies the files of the model's tokenizer to `directory`, as they are next to its data. Returns
// their names, or none if the tokenizer is bytes. Fails like tokenizer_of().
[[nodiscard]] Expected<std::vector<std::string>> export_tokenizer(
    const TrainedModel& model, const std::filesystem::path& directory);

}  // namespace dynmo::weights
