// SPDX-License-Identifier: Apache-2.0
#pragma once

// A step record is what one rank reports of one step: one JSON line each ("dynmo-step-1",
// docs/formats.md). What a report, a chart or a summary shows is derived from these and nothing
// else.

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"

namespace dynmo::observe {

// Numbers that a rank does not know (loss on other than the last stage's) are NaN: null in JSON.
struct StepRecord {
  std::int64_t step = 0;
  int rank = 0;
  Generation generation = 0;
  double loss = 0;          // mean of the step's micro-batches
  std::int64_t tokens = 0;  // trained on in this step, by all replicas
  double step_s = 0;        // from the first action to the end of the update
  double predicted_s = 0;   // by replay of the plan before the step
  double busy_s = 0;        // of this rank: compute, and the update of the step before
  double idle_s = 0;        // of this rank: step_s - busy_s, 0 or more
  int first_layer = 0;      // of this rank's first stage
  int layers = 0;           // of this rank's stages; 0 on an idle rank
  int frozen_layers = 0;    // of the model
  double imbalance = 0;     // max / mean - 1 of the ranks' busy time
  double bubble = 0;        // idle time of all ranks / (ranks x time of what busy_s is of)
  Bytes memory_bytes;       // resident
  double profile_s = 0;     // spent beside the step on profiling,
  double plan_s = 0;        // planning
  double migrate_s = 0;     // and moving
  int moved_layers = 0;     // of the model, before this step
  Bytes moved_bytes;
  double reduction_s = 0;   // this rank's, summing gradients over replicas, not hidden by compute
  double checkpoint_s = 0;  // this rank stood still for checkpoints, since the step before
  Bytes sent_bytes;         // by this rank since the end of the step before
  double gradient_norm = 0;
  double learning_rate = 0;
  bool emulated = false;          // the layers slept for given times
  Json sources = Json::object();  // of dynamism, by name: an object of numbers each
  friend bool operator==(const StepRecord&, const StepRecord&) = default;
};

[[nodiscard]] Json record_json(const StepRecord& record);
// kBadInput with `origin` and JSON pointer.
[[nodiscard]] Expected<StepRecord> parse_record(const Json& json, std::string_view origin);

// All records of a text or file, in its order. Errors name the line. A last line that does not end
// in a newline and cannot be read is what a killed process left half written: it is passed over.
[[nodiscard]] Expected<std::vector<StepRecord>> parse_records(std::string_view text,
                                                              std::string_view origin);
[[nodiscard]] Expected<std::vector<StepRecord>> read_records(const std::filesystem::path& path);

}  // namespace dynmo::observe
