// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sources of dynamism by name. Only sources.def lists them, and everything else follows from
// it.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/source_entry.h"
#include "dynmo/dynamism/source_options.h"

namespace dynmo::dynamism {

// Returns the sources of sources.def with their defaults.
[[nodiscard]] std::vector<SourceEntry> built_in_sources();

struct LoadOptions {
  LoadInputs inputs;
  SourceOptions sources;
};

// Returns the names of load models. The first is "none" (the dense model, the same in every step).
// The others are sources, with the name of their table and - for _.
[[nodiscard]] std::vector<std::string> load_names(const SourceOptions& sources = {});

// Makes a load model. Returns kBadInput for an unknown name (with the nearest one), or for bad
// options of that source, shape or device. Options of other sources are not checked.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_load_model(std::string_view source,
                                                                   const LoadOptions& options);

// Makes a load model with the same costs in every step. Returns kBadInput if cost::validate refuses
// them.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_static_load(cost::ModelCost model);

}  // namespace dynmo::dynamism
