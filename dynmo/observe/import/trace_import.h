// SPDX-License-Identifier: Apache-2.0
#pragma once

// Imports a profile from traces of PyTorch's profiler (`export_chrome_trace`), for models that run
// in other programs. The times are those of layers that the user names in the forward pass, or
// those of the stages of a pipeline, which PyTorch names itself.
//
// Named layers: each layer's forward runs in a range `NAME.forward`, made by
// `torch.profiler.record_function("NAME.forward")`. Layers are in the order of their first range,
// by file, or by stage if all run in a pipeline's forward. Every occurrence is a micro-batch.
// Ranges that wrappers (DDP, FSDP, compiled modules), optimizers and autograd make are not layers,
// and their contents are read. A layer's times are medians over the occurrences.
//
// Backward nodes belong to the layer of the forward operation that made them: PyTorch gives both
// the same sequence number. The time of a node is W if it accumulates gradients of weights, or is
// the embedding's. It is half I and half W for products with weights, else I. A layer may have
// ranges `NAME.backward_input` and `NAME.backward_weight`, or `NAME.backward` (half each). They
// replace the nodes. If the trace has device kernels, times are those of the kernels launched
// inside a range or node.
//
// Stages: `torch.distributed.pipelining` runs each action in a range such as `PP:2F0`, by stage and
// micro-batch. A range begins with the wait for a message. So its time is that from its first
// operation to its end, or that of its kernels. B is divided into I and W by its nodes.

#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/observe/import/trace_shares.h"

namespace dynmo::observe {

struct TraceImport {
  cost::ModelCost model;      // bytes and update_s are those of formulas, else 0
  int micro_batches = 0;      // maximum occurrences of a forward, over all files
  bool device_times = false;  // of kernels, not of the threads that launch them
  double unclaimed_s = 0;     // backward nodes of no layer, all micro-batches together
  int overlapped = 0;         // ranges of two actions at once, which are left out
  std::string sharing;        // the rule that shared out the times of stages; "": named layers
};

// A trace in memory, and its name in messages.
struct TraceText {
  std::string_view text;
  std::string origin;
};

// Imports the traces of all ranks, or of one. Replicas of a layer or stage may be in several files.
// Returns kBadInput, one line with file and JSON pointer or range, if a text is no trace. Refuses
// files without ranges or backward, a layer's other range without its forward, and absent stages.
// Refuses overlapping layers, and recomputed activations of named layers, too. `layers` is for
// traces without named layers.
[[nodiscard]] Expected<TraceImport> import_traces(std::span<const TraceText> traces,
                                                  const StageLayers& layers = {});
// Reads the next bytes of a file into the buffer, and returns their number, which is 0 at the end.
using ReadTrace = std::function<Expected<std::size_t>(std::span<char>)>;
// Opens a file for reading. A caller that knows a compression gives a function that decodes it.
using OpenTrace = std::function<Expected<ReadTrace>(const std::filesystem::path&)>;
// Opens a file whose bytes are the text. Fails with kBadInput.
[[nodiscard]] Expected<ReadTrace> open_plain_trace(const std::filesystem::path& path);

// Like import_traces(), for files of any size. Memory holds one file at a time, at about an eighth
// of its text.
[[nodiscard]] Expected<TraceImport> read_traces(std::span<const std::filesystem::path> paths,
                                                const StageLayers& layers = {},
                                                const OpenTrace& open = open_plain_trace);

}  // namespace dynmo::observe
