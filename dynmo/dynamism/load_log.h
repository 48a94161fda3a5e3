// SPDX-License-Identifier: Apache-2.0
#pragma once

// Loads as a file, "dynmo-load-trace-1" (docs/formats.md): JSON lines, first what does not change,
// then one line for each recorded step. A trace of a load model and one written by a real training
// run take the same road from there.

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

// The lines of a trace one step after another, for those who have no load model but measure: the
// costs of every step or of every tenth, as the profiler has them.
class TraceLines {
 public:
  // The header says if the layers slept for given times.
  enum class Device { kReal, kEmulated };
  explicit TraceLines(Device device = Device::kReal) : emulated_(device == Device::kEmulated) {}

  struct Measured {
    const cost::Observation& step;
    bool moving = false;  // it ran under the plan before the newest decision
  };
  // The line of `step` (before the first one, the header too), each ended by a newline. `change`:
  // what training itself has changed since the line before. kBadInput: a step not above the
  // last, costs that cost::validate refuses, other layers than the first step's. `measured`: what
  // the costs follow from, for a Recording.
  [[nodiscard]] Expected<std::string> add(std::int64_t step, cost::Announced change,
                                          const cost::ModelCost& model,
                                          const Measured* measured = nullptr);
  // Sets the start of the run, for the header. Requires that no line was added.
  void start(RunStart start) { start_ = std::move(start); }
  // The next line follows others of the same layers, up to that of step `newest`; -1: the header
  // alone. Requires that no line was added.
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

// Steps 0, every, 2 every, ... below `steps`, and those at which announced_at says something, as
// text. Numbers are written so that they read back exactly. kBadInput: steps or every below 1, or
// as TraceLines::add says.
[[nodiscard]] Expected<std::string> trace_text(const LoadModel& load, std::int64_t steps,
                                               std::int64_t every);

// The same into a file, durably.
[[nodiscard]] Expected<void> record(const LoadModel& load, std::int64_t steps, std::int64_t every,
                                    const std::filesystem::path& path);

// A load model that replays: at a recorded step exactly what was recorded, between two of them the
// earlier, after the end the last, before the first the first. announced_at is what recorded steps
// say. Takes any bytes: kBadInput names `origin`, line and JSON pointer. A last line that does not
// end in a newline and cannot be read is what a killed process left half written: it is passed
// over.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> parse_trace(std::string_view text,
                                                               std::string_view origin);
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> read_trace(const std::filesystem::path& path);

}  // namespace dynmo::dynamism
