// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/import/trace_import.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/cost/files.h"
#include "tests/support/mutate.h"

namespace dynmo::observe {
namespace {

const std::filesystem::path kData = DYNMO_TRACE_DATA;

Json event(const std::string& category, const std::string& name, int thread, double start,
           double duration, Json arguments = Json::object()) {
  return {{"ph", "X"},     {"cat", category}, {"name", name},    {"pid", 1},
          {"tid", thread}, {"ts", start},     {"dur", duration}, {"args", std::move(arguments)}};
}

Json range(const std::string& name, double start, double duration) {
  return event("user_annotation", name, 1, start, duration);
}

Json operation(int sequence, double start, double duration) {
  return event("cpu_op", "aten::something", 1, start, duration,
               {{"Sequence number", sequence}, {"Fwd thread id", 0}});
}

Json node(const std::string& name, int sequence, double start, double duration, int thread = 1) {
  Json arguments = Json::object();
  if (sequence >= 0) arguments = {{"Sequence number", sequence}, {"Fwd thread id", 1}};
  return event("cpu_op", "autograd::engine::evaluate_function: " + name, thread, start, duration,
               std::move(arguments));
}

Json trace_of(std::vector<Json> events) {
  return {{"schemaVersion", 1}, {"traceEvents", std::move(events)}};
}

Expected<TraceImport> import_trace(const Json& trace, const std::string& origin) {
  const std::string text = trace.dump();
  return import_traces(std::vector{TraceText{.text = text, .origin = origin}});
}

std::string message(std::vector<Json> events) {
  return import_trace(trace_of(std::move(events)), "t.json").error().message;
}

double middle_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.at(values.size() / 2);
}

// I and W of each layer in each micro-batch by PyTorch's own arrows from a forward operation to its
// backward node, which the import does not read.
struct Arrows {
  std::map<std::string, std::vector<double>> input, weight;
};

Arrows follow_arrows(const Json& trace) {
  std::vector<Json> ranges;
  std::vector<Json> nodes;
  std::map<std::int64_t, double> made_at;
  std::map<double, double> arrows;  // start of the node's own event -> forward operation
  for (const Json& one : trace["traceEvents"]) {
    const std::string name = one["name"];
    if (one["cat"] == "user_annotation") ranges.push_back(one);
    if (name.find("evaluate_function") != std::string::npos) nodes.push_back(one);
    if (one["ph"] == "s") made_at[one["id"]] = one["ts"];
  }
  for (const Json& one : trace["traceEvents"]) {
    if (one["ph"] == "f") arrows[one["ts"]] = made_at.at(one["id"]);
  }
  Arrows result;
  for (const Json& one : ranges) {
    const std::string name = one["name"];
    result.input[name].push_back(0);
    result.weight[name].push_back(0);
  }
  std::string owner;
  std::size_t occurrence = 0;
  for (const Json& one : nodes) {
    const double start = one["ts"];
    const double duration = one["dur"];
    const auto arrow = arrows.lower_bound(start);
    if (arrow != arrows.end() && arrow->first < start + duration) {
      std::map<std::string, std::size_t> seen;
      for (const Json& candidate : ranges) {
        const double begin = candidate["ts"];
        const std::size_t count = seen[candidate["name"]]++;
        if (arrow->second < begin || arrow->second > begin + candidate["dur"].get<double>())
          continue;
        owner = candidate["name"];
        occurrence = count;
      }
    }
    const std::string name = one["name"];
    const bool product = name.ends_with(": AddmmBackward0");
    const bool weight = name.ends_with("AccumulateGrad") || name.ends_with("EmbeddingBackward0");
    result.weight[owner].at(occurrence) += weight ? duration : product ? duration / 2 : 0;
    result.input[owner].at(occurrence) += weight ? 0 : product ? duration / 2 : duration;
  }
  return result;
}

TEST(TraceImport, ReadsATraceOfPyTorch) {
  const Json trace = read_json(kData / "pytorch_trace.json").value();
  const TraceImport imported = import_trace(trace, "pytorch_trace.json").value();
  const Arrows arrows = follow_arrows(trace);
  EXPECT_EQ(imported.micro_batches, 3);
  EXPECT_FALSE(imported.device_times);
  EXPECT_EQ(imported.unclaimed_s, 0);
  ASSERT_EQ(imported.model.size(), 4);
  const std::vector<std::string> names = {"embedding", "block0.mlp", "block1.mlp", "head"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    const cost::LayerCost& layer = imported.model.layers[i];
    EXPECT_EQ(layer.name, names[i]);
    EXPECT_GT(layer.forward_s, 0);
    EXPECT_NEAR(layer.backward_input_s, middle_of(arrows.input.at(names[i] + ".forward")) * 1e-6,
                1e-12);
    EXPECT_NEAR(layer.backward_weight_s, middle_of(arrows.weight.at(names[i] + ".forward")) * 1e-6,
                1e-12);
  }
  // The second block is eight times as wide.
  EXPECT_GT(imported.model.layers[2].forward_s, 4 * imported.model.layers[1].forward_s);
  EXPECT_GT(imported.model.layers[2].backward_input_s,
            4 * imported.model.layers[1].backward_input_s);
  EXPECT_EQ(imported.model.layers[0].backward_input_s, 0);
  EXPECT_EQ(cost::parse_profile(cost::profile_json(imported.model), "p").value(), imported.model);
}

TEST(TraceImport, TakesTheMedianOfMicroBatches) {
  std::vector<Json> events;
  const std::vector<double> forward = {90, 10, 30};  // the first warms up
  for (int m = 0; m < 3; ++m) {
    const double start = 1000 * m;
    events.push_back(range("a.forward", start, forward[static_cast<std::size_t>(m)]));
    events.push_back(operation(m, start + 1, 5));
    events.push_back(node("MmBackward0", m, start + 500, 8 + 2 * m));
    events.push_back(node("torch::autograd::AccumulateGrad", -1, start + 600, 1));
  }
  const cost::LayerCost layer = import_trace(trace_of(events), "t.json").value().model.layers[0];
  EXPECT_DOUBLE_EQ(layer.forward_s, 30e-6);
  EXPECT_DOUBLE_EQ(layer.backward_input_s, 5e-6);
  EXPECT_DOUBLE_EQ(layer.backward_weight_s, 6e-6);
}

// As on a GPU: the engine's own thread runs the backward pass; numbers of an operation that made no
// node return with the next one, whose layer the node belongs to.
TEST(TraceImport, FindsTheLayerAcrossThreads) {
  const TraceImport imported =
      import_trace(
          trace_of({range("a.forward", 0, 10), operation(1, 1, 1), operation(2, 5, 1),
                    range("b.forward", 20, 10), operation(2, 21, 1),
                    node("ReluBackward0", 2, 100, 7, 2), node("ReluBackward0", 1, 110, 4, 2),
                    node("ReluBackward0", 9, 120, 1, 2),
                    node("torch::autograd::AccumulateGrad", -1, 130, 2, 2)}),
          "t.json")
          .value();
  EXPECT_DOUBLE_EQ(imported.model.layers[1].backward_input_s, 7e-6);
  EXPECT_DOUBLE_EQ(imported.model.layers[0].backward_input_s, 4e-6);
  EXPECT_DOUBLE_EQ(imported.unclaimed_s, 3e-6);
}

// Written after PyTorch's sources, not recorded on a GPU.
TEST(TraceImport, CountsKernelsWhereThereAreSome) {
  const auto launch = [](int thread, double start, int id) {
    return event("cuda_runtime", "cudaLaunchKernel", thread, start, 1, {{"correlation", id}});
  };
  const auto kernel = [](double start, double duration, int id) {
    return event("kernel", "gemm", 7, start, duration, {{"correlation", id}, {"stream", 7}});
  };
  const TraceImport imported =
      import_trace(trace_of({range("a.forward", 0, 10), operation(1, 1, 6), launch(1, 2, 11),
                             launch(1, 4, 12), kernel(100, 50, 11), kernel(150, 25, 12),
                             node("AddmmBackward0", 1, 20, 10, 2), launch(2, 22, 13),
                             kernel(200, 80, 13), launch(2, 40, 14), kernel(300, 999, 14),
                             event("gpu_user_annotation", "a.forward", 7, 100, 75)}),
                   "t.json")
          .value();
  EXPECT_TRUE(imported.device_times);
  EXPECT_EQ(imported.micro_batches, 1);
  EXPECT_DOUBLE_EQ(imported.model.layers[0].forward_s, 75e-6);
  EXPECT_DOUBLE_EQ(imported.model.layers[0].backward_input_s, 40e-6);
  EXPECT_DOUBLE_EQ(imported.model.layers[0].backward_weight_s, 40e-6);
}

TEST(TraceImport, RangesOfTheBackwardReplaceNodes) {
  const auto layers =
      import_trace(
          trace_of({range("a.forward", 0, 10), operation(1, 1, 1), range("b.forward", 20, 10),
                    range("b.backward_weight", 40, 3), range("b.backward_input", 50, 4),
                    range("a.backward", 60, 10), node("ReluBackward0", 1, 61, 2)}),
          "t.json")
          .value()
          .model.layers;
  EXPECT_DOUBLE_EQ(layers[1].backward_weight_s, 3e-6);
  EXPECT_DOUBLE_EQ(layers[1].backward_input_s, 4e-6);
  EXPECT_DOUBLE_EQ(layers[0].backward_input_s, 5e-6);
  EXPECT_DOUBLE_EQ(layers[0].backward_weight_s, 5e-6);
}

// Two layers in every step, inside of what libraries make around and between them.
TEST(TraceImport, LooksThroughTheRangesOfLibraries) {
  const auto steps = [](const std::string& around, const std::string& inside) {
    std::vector<Json> events;
    for (int m = 0; m < 3; ++m) {
      const double start = 1000 * m;
      if (!around.empty()) events.push_back(range(around, start, 500));
      for (int layer = 0; layer < 2; ++layer) {
        const double at = start + 10 + 40 * layer;
        const int sequence = 10 * m + layer;
        events.push_back(range(fmt::format("layers.{}.forward", layer), at, 30));
        if (!inside.empty()) events.push_back(range(inside, at + 1, 28));
        events.push_back(operation(sequence, at + 2, 20));
        events.push_back(node("AddmmBackward0", sequence, start + 300 - 60 * layer, 50));
      }
      events.push_back(range("Optimizer.step#AdamW.step", start + 600, 50));
    }
    return trace_of(events);
  };
  const auto plain = import_trace(steps("", ""), "t.json");
  ASSERT_TRUE(plain) << plain.error().message;
  ASSERT_EQ(plain->model.size(), 2);
  for (const std::string name :
       {"DistributedDataParallel.forward", "FullyShardedDataParallel.forward",
        "torch.nn.DataParallel.forward", "OptimizedModule.forward", "DeepSpeedEngine.forward",
        "FSDP::pre_forward", "Torch-Compiled Region: 0/0", "Optimizer.step#SGD.forward",
        "autograd::Function.backward", "nn.Module: Block_0.forward"}) {
    for (const auto& [around, inside] :
         {std::pair(name, std::string()), {"", name}, {name, name}}) {
      const auto imported = import_trace(steps(around, inside), "t.json");
      ASSERT_TRUE(imported) << imported.error().message;
      EXPECT_EQ(imported->model, plain->model) << name;
    }
  }
  EXPECT_EQ(
      message({range("DistributedDataParallel.forward", 0, 10), operation(1, 1, 1)}),
      "t.json: no range is called NAME.forward or PP:0F0 but 'DistributedDataParallel.forward', "
      "which a library makes; run each layer's forward in "
      "torch.profiler.record_function(\"NAME.forward\"), or a pipeline whose schedule names its "
      "actions");
}

TEST(TraceImport, ACompiledLayersNodeIsHalfInputsAndHalfWeights) {
  const auto layer = import_trace(trace_of({range("a.forward", 0, 10), operation(1, 1, 6),
                                            node("CompiledFunctionBackward", 1, 20, 10)}),
                                  "t.json")
                         .value()
                         .model.layers[0];
  EXPECT_DOUBLE_EQ(layer.backward_input_s, 5e-6);
  EXPECT_DOUBLE_EQ(layer.backward_weight_s, 5e-6);
}

// A damaged trace is an Error or is read; it throws nothing.
TEST(TraceImport, SurvivesDamage) {
  const std::string whole =
      trace_of({range("a.forward", 0, 10), operation(1, 1, 6), node("AddmmBackward0", 1, 20, 10, 2),
                event("cuda_runtime", "launch", 1, 2, 1, {{"correlation", 1}}),
                event("kernel", "gemm", 7, 5, 5, {{"correlation", 1}})})
          .dump();
  int read = 0;
  for (std::uint64_t seed = 0; seed < 5000; ++seed) {
    Rng rng(seed);
    const std::string text = mutate(whole, rng);
    const std::vector traces = {TraceText{.text = text, .origin = "t.json"}};
    EXPECT_NO_THROW(read += import_traces(traces) ? 1 : 0) << "seed " << seed;
  }
  EXPECT_GT(read, 0);
}

TEST(TraceImport, FaultsSayWhatToChange) {
  EXPECT_EQ(import_trace(Json::object(), "t.json").error().message,
            "t.json: /traceEvents is missing, wanted the events of a trace as PyTorch's "
            "export_chrome_trace writes them");
  EXPECT_EQ(message({operation(1, 0, 1)}),
            "t.json: no range is called NAME.forward or PP:0F0; run each layer's forward in "
            "torch.profiler.record_function(\"NAME.forward\"), or a pipeline whose schedule names "
            "its actions");
  EXPECT_EQ(message({range("a.forward", 0, 1)}),
            "t.json: nothing of the backward pass belongs to a layer, wanted a trace of training "
            "steps, with ProfilerActivity.CPU among its activities");
  EXPECT_EQ(message({range("a.forward", 0, 1), range("b.backward", 2, 1)}),
            "t.json: range 'b.backward' is of a layer without forward, wanted 'b.forward' too");
  EXPECT_EQ(message({range("a.forward", 0, 10), range("a.b.forward", 2, 1)}),
            "t.json: range 'a.b.forward' begins inside 'a.forward', wanted layers that do not "
            "overlap; name only the inner or only the outer ones");
  EXPECT_EQ(message({range("a.forward", 0, 10), operation(1, 1, 1), node("X", 1, 20, 10),
                     range("a.forward", 21, 5)}),
            "t.json: range 'a.forward' runs inside the backward pass, wanted a run without "
            "recomputed activations (torch.utils.checkpoint)");
  Json broken = range("a.forward", 0, 1);
  broken["dur"] = "1 ms";
  EXPECT_EQ(message({operation(1, 0, 1), broken}),
            "t.json: /traceEvents/1/dur is \"1 ms\", wanted microseconds, 0 to 1e+18");
  broken.erase("ts");
  EXPECT_EQ(message({broken}),
            "t.json: /traceEvents/0/ts is missing, wanted microseconds, 0 to 1e+18");
}

}  // namespace
}  // namespace dynmo::observe
