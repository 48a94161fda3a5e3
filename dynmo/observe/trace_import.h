// SPDX-License-Identifier: Apache-2.0
#pragma once

// A profile from a trace of PyTorch's profiler (`export_chrome_trace`), for models that run
// elsewhere: users name their layers in the forward pass, the trace holds the rest.
//
// Convention: each layer's forward runs in a range `NAME.forward`, made by
// `torch.profiler.record_function("NAME.forward")`; layers are in order of their first. Every
// occurrence is a micro-batch. Ranges that wrappers (DDP, FSDP, compiled modules), optimizers and
// autograd make themselves are no layers: they are looked through. A layer's times are medians over
// them. Backward nodes belong to the layer whose forward operation made them: PyTorch gives both
// the same sequence number. Their time is W for what accumulates gradients of weights and for the
// embedding's gradient, half I and half W for products with weights, else I. Ranges
// `NAME.backward_input` and `NAME.backward_weight`, or `NAME.backward` (half each), take the place
// of the nodes where a layer has them. Where the trace has device kernels, times are those of the
// kernels launched inside a range or node.

#include <filesystem>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::observe {

struct TraceImport {
  cost::ModelCost model;      // bytes and update_s are 0: a trace does not hold them
  int micro_batches = 0;      // most occurrences of a layer's forward
  bool device_times = false;  // of kernels, not of the threads that launch them
  double unclaimed_s = 0;     // backward nodes of no layer, all micro-batches together
};

// kBadInput, one line with file and JSON pointer or range: not a trace, no forward ranges or no
// backward, a range of a layer without forward, layers that overlap, recomputed activations.
[[nodiscard]] Expected<TraceImport> import_trace(const Json& trace, std::string_view origin);
[[nodiscard]] Expected<TraceImport> read_trace(const std::filesystem::path& path);

}  // namespace dynmo::observe
