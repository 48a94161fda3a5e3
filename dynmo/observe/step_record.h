// SPDX-License-Identifier: Apache-2.0
#pragma once

// A step record is the report of one rank on one step, one JSON line each ("dynmo-step-1",
// docs/formats.md). Reports, charts and summaries are derived from records alone.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/observe/step_facts.h"

namespace dynmo::observe {

struct StepRecord : StepFacts {
  std::int64_t step = 0;
  int rank = 0;
  Generation generation = 0;
  std::int64_t tokens = 0;        // trained on in this step, by all replicas
  int first_layer = 0;            // of this rank's first stage
  int layers = 0;                 // of this rank's stages; 0 on an idle rank
  bool emulated = false;          // the layers slept for given times
  Json sources = Json::object();  // of dynamism, by name: an object of numbers each
  friend bool operator==(const StepRecord&, const StepRecord&) = default;
};

[[nodiscard]] Json record_json(const StepRecord& record);
// Parses a record. Returns kBadInput with `origin` and JSON pointer.
[[nodiscard]] Expected<StepRecord> parse_record(const Json& json, std::string_view origin);

// Visits or returns all records of a text or file, in its order. Errors name the line. Ignores an
// unreadable last line without a newline, which a killed process left half written.
[[nodiscard]] Expected<void> visit_records(std::string_view text, std::string_view origin,
                                           const std::function<void(StepRecord)>& visit);
[[nodiscard]] Expected<std::vector<StepRecord>> parse_records(std::string_view text,
                                                              std::string_view origin);
[[nodiscard]] Expected<std::vector<StepRecord>> read_records(const std::filesystem::path& path);

}  // namespace dynmo::observe
