// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes the costs of a run's layers over its steps ("dynmo-load-trace-1", dynamism/load_log.h).
// `dynmo simulate` and run.device = "emulated" can replay them.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>

#include "dynmo/control/profiler.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/process/append_file.h"

namespace dynmo::observe {

// Writes a line every `every` steps, and at each step that begins with a change or a move. If
// `every` is 1, lines also have the measurements, so that decisions can be repeated
// (dynamism/recording.h). One thread uses it.
class LoadTraceWriter {
 public:
  // Opens the file. Returns kBadInput with the path. Requires every >= 1.
  [[nodiscard]] static Expected<std::unique_ptr<LoadTraceWriter>> open(
      const std::filesystem::path& path, std::int64_t every,
      dynamism::TraceLines::Device device = dynamism::TraceLines::Device::kReal);

  // Continues the file of another rank, or the own file after the run went back. First removes all
  // lines from step `step` on, and a half-written line. Later lines have no measurements for
  // decisions. Fails with kBadInput.
  [[nodiscard]] static Expected<std::unique_ptr<LoadTraceWriter>> go_on(
      const std::filesystem::path& path, std::int64_t every, std::int64_t step,
      dynamism::TraceLines::Device device = dynamism::TraceLines::Device::kReal);

  // Sets what the first line says of the run. Call it before the first step.
  void start(dynamism::RunStart start) { lines_.start(std::move(start)); }
  // A step at its end, as the pipeline knows it.
  struct Step {
    std::int64_t step = 0;
    int frozen_layers = 0;
    cost::Announced announced = cost::Announced::kNothing;
    bool moved = false;  // layers moved at the boundary before it
    const control::Profiler& profiler;
    const cost::Observation& observed;
    bool moving = false;  // layers moved during it to the plan of the next step
  };
  // Writes the line of a step, which is in the file when add() returns. After an error it writes
  // nothing.
  void add(const Step& step);
  // Closes the file. Returns the first error of writing.
  [[nodiscard]] Expected<void> close();

 private:
  using File = process::LineFile;
  LoadTraceWriter(File file, std::int64_t every, dynamism::TraceLines::Device device)
      : file_(std::move(file)), every_(every), records_(every == 1), lines_(device) {}

  File file_;
  std::int64_t every_;
  bool records_;           // measurements of every step
  std::int64_t next_ = 0;  // step of the next line
  dynamism::TraceLines lines_;
  Expected<void> done_;  // or the first error
};

// Returns the load traces of a run by the step at which it began or was resumed.
[[nodiscard]] std::map<std::int64_t, std::filesystem::path> load_traces(const RunFolder& folder);

// Removes the load traces that begin after `step`. They belong to a run that has returned to a step
// before them.
void remove_load_traces_after(const RunFolder& folder, std::int64_t step);

}  // namespace dynmo::observe
