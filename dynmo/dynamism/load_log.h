// SPDX-License-Identifier: Apache-2.0
#pragma once

// Loads as a file, "dynmo-load-trace-1" (docs/formats.md). It is JSON lines: first a header with
// constant data, then one line for each recorded step. Traces of load models and of real training
// runs are used equally.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/recording.h"

namespace dynmo::dynamism {

// Makes the lines of a trace, step after step, for callers that measure without a load model. The
// costs are those of every step or of every tenth, from the profiler.
class TraceLines {
 public:
  // The header says whether the layers slept for given times.
  enum class Device { kReal, kEmulated };
  explicit TraceLines(Device device = Device::kReal) : emulated_(device == Device::kEmulated) {}

  struct Measured {
    const cost::Observation& step;
    bool moving = false;  // it ran under the plan before the newest decision
  };
  // Returns the line of `step`, ended by a newline. The first call returns the header before it.
  // `change` is what training itself has changed since the last line. `measured`, for a Recording,
  // has the measurements behind the costs. Returns kBadInput for a step not above the last, costs
  // that cost::validate refuses, or other layers than the first step's.
  [[nodiscard]] Expected<std::string> add(std::int64_t step, cost::Announced change,
                                          const cost::ModelCost& model,
                                          const Measured* measured = nullptr);
  // Sets the start of the run, for the header. Requires that no line was added.
  void start(RunStart start) { start_ = std::move(start); }
  // Continues after existing lines of the same layers. `newest` is the step of the last line, or -1
  // if there is only the header. Requires that no line was added.
  void go_on(std::int64_t newest) {
    has_header_ = true;
    last_step_ = newest;
  }

 private:
  bool emulated_;
  std::optional<RunStart> start_;
  bool has_header_ = false;
  std::int64_t last_step_ = -1;
  cost::ModelCost last_;  // no layers: not known
};

// Returns the lines of steps 0, every, 2 every, ... below `steps`, and of those with a change by
// announced_at(). Numbers are written so that they read back exactly. Returns kBadInput for steps
// or every below 1, or as TraceLines::add does.
[[nodiscard]] Expected<std::string> trace_text(const LoadModel& load, std::int64_t steps,
                                               std::int64_t every);

// Writes the text of trace_text() to a file, durably. Returns the errors of trace_text(), and
// kBadInput if the disk fails.
[[nodiscard]] Expected<void> record(const LoadModel& load, std::int64_t steps, std::int64_t every,
                                    const std::filesystem::path& path);

// Parses a trace to a load model that replays it. At a recorded step it has exactly the recorded
// costs. At another step it has those of the last recorded step before it, or of the first one.
// Changes of announced_at() are those of the recorded steps.
//
// The text may have any bytes. Returns kBadInput with `origin`, line and JSON pointer. Ignores an
// unreadable last line without a newline, which a killed process left half written.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> parse_trace(std::string_view text,
                                                               std::string_view origin);
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> read_trace(const std::filesystem::path& path);

}  // namespace dynmo::dynamism
