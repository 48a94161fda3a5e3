// SPDX-License-Identifier: Apache-2.0
#pragma once

// Imports a profile from a trace of PyTorch's profiler (`export_chrome_trace`), for models that run
// in other programs. Users name their layers in the forward pass. The trace has the rest.
//
// Convention: each layer's forward runs in a range `NAME.forward`, made by
// `torch.profiler.record_function("NAME.forward")`. Layers are in the order of their first range.
// Every occurrence is a micro-batch. Ranges that wrappers (DDP, FSDP, compiled modules), optimizers
// and autograd make are not layers, and their contents are read. A layer's times are medians over
// the occurrences.
//
// Backward nodes belong to the layer of the forward operation that made them: PyTorch gives both
// the same sequence number. Their time is W if they accumulate gradients of weights, and for the
// embedding's gradient. It is half I and half W for products with weights, else I. A layer may have
// ranges `NAME.backward_input` and `NAME.backward_weight`, or `NAME.backward` (half each). They
// replace the nodes. If the trace has device kernels, times are those of the kernels launched
// inside a range or node.

#include <filesystem>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::observe {

struct TraceImport {
  cost::ModelCost model;      // bytes and update_s are 0: a trace does not have them
  int micro_batches = 0;      // maximum occurrences of a layer's forward
  bool device_times = false;  // of kernels, not of the threads that launch them
  double unclaimed_s = 0;     // backward nodes of no layer, all micro-batches together
};

// Imports a trace. Returns kBadInput, one line with file and JSON pointer or range, if the JSON is
// not a trace. Other causes are no forward ranges, no backward, and a range of a layer without
// forward. Overlapping layers and recomputed activations are refused, too.
[[nodiscard]] Expected<TraceImport> import_trace(const Json& trace, std::string_view origin);
[[nodiscard]] Expected<TraceImport> read_trace(const std::filesystem::path& path);

}  // namespace dynmo::observe
