// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plans in the formats of others: torchtitan's and Megatron-Core's keys, and the order of a step
// for PyTorch's pipelining. None of them can say every plan, so each form is checked first.

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/decoder_shape.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/parallelism.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"

namespace dynmo::plan {

enum class EmitForm {
  kTorchtitan,  // module_fqns_per_model_part, the schedule's name and its order
  kMegatron,    // --pipeline-model-parallel-layout
  kCsv,         // the order alone, PyTorch's "compute_only"
};
[[nodiscard]] std::span<const EmitForm> emit_forms();
[[nodiscard]] std::string_view name(EmitForm form);
[[nodiscard]] Expected<EmitForm> parse_emit_form(std::string_view name);
// Returns whether stages of the form are lists of whole modules.
[[nodiscard]] bool takes_whole_blocks(EmitForm form);

enum class ModuleNames {
  kTranslated,  // "blocks.3" becomes torchtitan's "layers.3"; names that are not DynMo's are kept
  kKept,        // the layers are called like the model's modules
};

struct EmitProblem {
  const Plan& plan;
  const cost::ModelCost& model;  // the layers that the plan places
  int micro_batches = 1;
  LayerSet recomputed = {};
  ModuleNames names = ModuleNames::kTranslated;
  cost::Parallelism parallelism = {};
  cost::DecoderShape shape = {};  // of formulas; 0: not known
};

// Returns kBadInput if Megatron-Core cannot divide a size among the devices of a rank. These are
// heads, the width of an MLP or an expert, and the tokens of a sequence. Key-value heads may also
// divide the devices.
[[nodiscard]] Expected<void> check_divided(EmitForm form, const cost::DecoderShape& shape,
                                           const cost::Parallelism& parallelism);

// Returns kBadInput with what the form cannot say, and what it can. Causes: parts of a block or
// head, an idle rank, unlike numbers of stages, another order of ranks, a frozen stage, an order,
// and those of check_divided().
[[nodiscard]] Expected<void> check_emit(EmitForm form, const EmitProblem& problem);

struct EmittedFile {
  std::string name;
  std::string text;
};
struct Emitted {
  std::vector<EmittedFile> files;
  std::string note;  // what the user has to set beside them, on one line
};

// Returns the names of the files that emit() makes. The form kTorchtitan has torchtitan.json (its
// key "parallelism"), torchtitan.args (the same as flags) and schedule.csv. kMegatron has
// megatron.args, and kCsv has schedule.csv.
[[nodiscard]] std::vector<std::string_view> emitted_names(EmitForm form);

// Returns the files. `folder` is where they will be written, because one file has the path of
// another. torchtitan's stages are "tok_embeddings", "layers.N", "norm" and "lm_head". The middle
// stage of a V is written as two. Errors are those of check_emit().
[[nodiscard]] Expected<Emitted> emit(EmitForm form, const EmitProblem& problem,
                                     const std::filesystem::path& folder);

// Makes the folder if there is none, and writes the files there. Fails with kBadInput.
[[nodiscard]] Expected<void> write_emitted(const Emitted& emitted,
                                           const std::filesystem::path& folder);

}  // namespace dynmo::plan
