// SPDX-License-Identifier: Apache-2.0
#pragma once

// A run's checkpoints in terms of pipelines. They have one file for each layer, which any number of
// ranks and replicas reads under any cut. They are written by checkpointer.h, and dynmo/checkpoint
// has the format.

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/model/layer.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/setup/token_batches.h"

namespace dynmo::train {

// Returns the name of a layer's parameter in a file: Hugging Face's for the families that have one.
using TensorName = std::function<std::string(LayerId, std::string_view parameter)>;

// A layer's file: its parameters, masks, moments, buffers, counts. It refers to the bytes of the
// state. Values of compressed matrices are converted to matrices, as other programs read them.
struct FileOfLayer {
  checkpoint::LayerFile file = {};
  std::vector<at::Tensor> values = {};  // storage of converted tensors in `file`
};
[[nodiscard]] FileOfLayer layer_file(const model::Layer& layer, const model::LayerState& state,
                                     const TensorName& name);
// Returns the entries of a manifest beside the files. They are step, plan, config, the data's
// identity, and the settings that affect bits.
[[nodiscard]] Json state_json(const runtime::Pipeline& pipeline, const config::Config& config,
                              const DataIdentity& data);

struct Restored {
  checkpoint::VerifiedCheckpoint checkpoint;
  std::int64_t step = 0;           // next step
  plan::Plan plan;                 // plan at that step, for any number of ranks
  DataIdentity data;               // of the training
  Json sources = Json::object();   // state of the sources of dynamism, by name
  std::vector<std::string> notes;  // skipped damaged checkpoints; differences that change bits
};

// Returns the newest checkpoint of run.directory whose files all verify. Returns kNoCheckpoint if
// there is none, and kBadInput if it belongs to another training (config.h: identity).
[[nodiscard]] Expected<Restored> restore(const config::Config& config);

// Returns a line if the data differ from those of the checkpoint. Returns "" if they do not differ,
// or if that is not known.
[[nodiscard]] std::string changed_data(const Restored& restored, const DataIdentity& data,
                                       const std::string& path);

// Loads the states of the layers that `plan` gives to `rank`. Returns kBadInput if a tensor is
// missing or has another shape.
[[nodiscard]] Expected<runtime::LayerStates> load_states(const Restored& restored,
                                                         const model::Model& model,
                                                         const plan::Plan& plan, Rank rank,
                                                         const TensorName& name);

}  // namespace dynmo::train
