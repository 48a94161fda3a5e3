// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sources of dynamism by name: the one list is sources.def, everything else follows from it.

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

// The sources of sources.def with their defaults.
[[nodiscard]] std::vector<SourceEntry> built_in_sources();

struct LoadOptions {
  LoadInputs inputs;
  SourceOptions sources;
};

// Names of load models: "none" (the dense model, the same in every step), then the sources, whose
// name is that of their table with - for _.
[[nodiscard]] std::vector<std::string> load_names(const SourceOptions& sources = {});

// kBadInput: an unknown name (with the nearest known one), options of that source that make no
// sense, a shape or device that does. Options of other sources are not looked at.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_load_model(std::string_view source,
                                                                   const LoadOptions& options);

// The same costs in every step. kBadInput where cost::validate refuses them.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_static_load(cost::ModelCost model);

}  // namespace dynmo::dynamism
