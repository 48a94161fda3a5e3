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

// GPT of 32 blocks, hidden 1024, sequence 2048, a vocabulary of 50304; with `source` "moe" 8
// experts, 2 a token.
[[nodiscard]] cost::TransformerShape default_shape(std::string_view source);

// Whether embedding and head, and the heads of early exits, are part of a model. A head of 50304
// words is worth 3.5 dense blocks of hidden size 1024 and is one layer here, so where the blocks
// get cheap it alone bounds the step: over 8 ranks at 1.3 to 1.5 x work / ranks for pruning,
// freezing and mixture of depths.
enum class Ends { kKept, kLeftOut };

struct NamedLoad {
  std::string name;
  std::unique_ptr<LoadModel> load;
};

// The six sources at their defaults on default_shape and `device`, for benchmarks; but freezing by
// plasticity, whose steps differ between seeds, and exits by similarity and without a loss of the
// tokens that stay, so that their heads do one head's work together. At step 6000
// of 10000 every one of them is in force, and all differ between seeds. kBadInput for a device that
// makes no sense.
[[nodiscard]] Expected<std::vector<NamedLoad>> default_loads(const cost::Device& device,
                                                             std::uint64_t seed,
                                                             Ends ends = Ends::kKept);

}  // namespace dynmo::dynamism
