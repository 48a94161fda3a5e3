// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dynmo/observe/load_trace_writer.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/runtime/step_report.h"

namespace dynmo::train {

// Returns the data for the load trace of a step that the pipeline has just done.
[[nodiscard]] inline observe::LoadTraceWriter::Step load_trace_step(
    const runtime::StepReport& report, const runtime::Pipeline& pipeline) {
  return {.step = report.step,
          .frozen_layers = report.frozen_layers,
          .announced = pipeline.announced(),
          .moved = report.moved_layers > 0,
          .profiler = pipeline.profiler(),
          .observed = pipeline.observed(),
          .moving = pipeline.coming_plan() != nullptr};
}

}  // namespace dynmo::train
