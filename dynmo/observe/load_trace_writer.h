// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes down what a run's layers cost over its steps ("dynmo-load-trace-1", dynamism/load_log.h),
// so that `dynmo simulate` and run.device = "emulated" can replay it.

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "dynmo/control/profiler.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/observe/run_folder.h"

namespace dynmo::observe {

// A line every `every` steps, and at each step that begins with a change or a move; of every step
// also what was measured, so that its decisions can be made again (dynamism/recording.h). One
// thread.
class LoadTraceWriter {
 public:
  // kBadInput, naming the path. Requires every >= 1.
  [[nodiscard]] static Expected<std::unique_ptr<LoadTraceWriter>> open(
      const std::filesystem::path& path, std::int64_t every,
      dynamism::TraceLines::Device device = dynamism::TraceLines::Device::kReal);

  // Goes on with the file that another rank has written, or this one before the run went back:
  // first cuts off all lines from step `step` on, and a line that was left half written. What
  // decisions follow from is not recorded any more.
  [[nodiscard]] static Expected<std::unique_ptr<LoadTraceWriter>> go_on(
      const std::filesystem::path& path, std::int64_t every, std::int64_t step,
      dynamism::TraceLines::Device device = dynamism::TraceLines::Device::kReal);

  // Before the first step.
  void start(dynamism::RunStart start) { lines_.start(std::move(start)); }
  // A step of which a pipeline knows all this when it is done: what was announced before it, the
  // profiler, and what it was told of the step. After an error nothing more is written. The line is
  // in the file when add() returns.
  struct Step {
    std::int64_t step = 0;
    int frozen_layers = 0;
    cost::Announced announced = cost::Announced::kNothing;
    bool moved = false;  // layers, at the boundary before it
    const control::Profiler& profiler;
    const cost::Observation& observed;
    bool moving = false;  // layers moved during it to the plan of the next one
  };
  void add(const Step& step);
  // The first error of writing.
  [[nodiscard]] Expected<void> close();

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  LoadTraceWriter(std::filesystem::path path, std::FILE* file, std::int64_t every,
                  dynamism::TraceLines::Device device)
      : path_(std::move(path)), file_(file), every_(every), records_(every == 1), lines_(device) {}
  void fail(const char* reason);

  std::filesystem::path path_;
  std::unique_ptr<std::FILE, CloseFile> file_;
  std::int64_t every_;
  bool records_;           // of every step what was measured
  std::int64_t next_ = 0;  // step of the next line
  dynamism::TraceLines lines_;
  std::optional<Error> error_;
};

// The load traces of a run by the step at which it began or was resumed.
[[nodiscard]] std::map<std::int64_t, std::filesystem::path> load_traces(const RunFolder& folder);

}  // namespace dynmo::observe
