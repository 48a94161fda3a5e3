// SPDX-License-Identifier: Apache-2.0
#pragma once

// A run's checkpoints in terms of pipelines: what a layer's file holds, and how any number of ranks
// and replicas, any cut reads them back (checkpointer.h writes them, dynmo/checkpoint has the
// format).

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

// The name in a file of a layer's parameter: Hugging Face's for the families that have one.
using TensorName = std::function<std::string(LayerId, std::string_view parameter)>;

// A layer's file: its parameters, masks, moments, buffers, counts. The bytes are the state's own,
// but for the values of compressed matrices, which others read as matrices.
struct FileOfLayer {
  checkpoint::LayerFile file = {};
  std::vector<at::Tensor> values = {};  // that the file's tensors are views of
};
[[nodiscard]] FileOfLayer layer_file(const model::Layer& layer, const model::LayerState& state,
                                     const TensorName& name);
// The entries of a manifest beside the files: step, plan, config, what the bits depend on, and what
// is known of the data.
[[nodiscard]] Json state_json(const runtime::Pipeline& pipeline, const config::Config& config,
                              const DataIdentity& data);

struct Restored {
  checkpoint::VerifiedCheckpoint checkpoint;
  std::int64_t step = 0;           // next to run
  plan::Plan plan;                 // that was running; of any number of ranks
  DataIdentity data;               // that it was trained on
  Json sources = Json::object();   // state of the sources of dynamism, by name
  std::vector<std::string> notes;  // damaged ones passed over; differences that change bits
};

// The newest checkpoint of run.directory whose files all verify. kNoCheckpoint: there is none.
// kBadInput: it belongs to another training (config.h: identity).
[[nodiscard]] Expected<Restored> restore(const config::Config& config);

// Says that the data are not those that the checkpoint was trained on; "" if they are, or if it is
// not known.
[[nodiscard]] std::string changed_data(const Restored& restored, const DataIdentity& data,
                                       const std::string& path);

// States of the layers that `plan` gives to `rank`. kBadInput: a tensor is missing or of another
// shape.
[[nodiscard]] Expected<runtime::LayerStates> load_states(const Restored& restored,
                                                         const model::Model& model,
                                                         const plan::Plan& plan, Rank rank,
                                                         const TensorName& name);

}  // namespace dynmo::train
