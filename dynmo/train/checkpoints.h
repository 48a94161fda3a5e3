// SPDX-License-Identifier: Apache-2.0
#pragma once

// A run's checkpoints in terms of pipelines: every rank writes the layers it owns, rank 0 commits;
// any number of ranks, any cut reads them back (dynmo/checkpoint has the format and the protocol).

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/expected.h"
#include "dynmo/model/layer.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/config.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// The name in a file of a layer's parameter: Hugging Face's for the families that have one.
using TensorName = std::function<std::string(LayerId, std::string_view parameter)>;

// In the manifest of weights without optimizer state, which no run continues.
inline constexpr const char* kImportedIdentity = "imported";

// Called by all ranks between steps; writes to run_directory/checkpoints. Where one cannot write,
// all fail with its error, and the checkpoints that are there stay as they are.
[[nodiscard]] Expected<void> save(transport::Transport& transport, transport::Tag tag,
                                  const runtime::Pipeline& pipeline,
                                  const std::filesystem::path& run_directory, const Config& config,
                                  const TensorName& name);

struct Restored {
  checkpoint::VerifiedCheckpoint checkpoint;
  std::int64_t step = 0;           // next to run
  plan::Plan plan;                 // that was running; of any number of ranks
  std::vector<std::string> notes;  // damaged ones passed over; differences that change bits
};

// The newest checkpoint of run.directory whose files all verify. kNoCheckpoint: there is none.
// kBadInput: it belongs to another training (model, data, batch, optimizer, seed, steps, freezing).
[[nodiscard]] Expected<Restored> restore(const Config& config);

// States of the layers that `plan` gives to `rank`. kBadInput: a tensor is missing or of another
// shape.
[[nodiscard]] Expected<runtime::LayerStates> load_states(const Restored& restored,
                                                         const model::Model& model,
                                                         const plan::Plan& plan, Rank rank,
                                                         const TensorName& name);

}  // namespace dynmo::train
