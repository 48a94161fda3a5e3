// SPDX-License-Identifier: Apache-2.0
// Stages of PyTorch's pipelines in traces, and traces of several ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/core/rng.h"
#include "dynmo/cost/files.h"
#include "dynmo/observe/import/trace_import.h"
#include "tests/support/mutate.h"
#include "tests/support/temp_folder.h"

namespace dynmo::observe {
namespace {

const std::filesystem::path kRecorded = std::filesystem::path(DYNMO_TRACE_DATA) / "pipeline";

// The events of one rank, in the form of PyTorch's profiler.
class RankTrace {
 public:
  RankTrace& range(const std::string& name, double start, double duration) {
    return add("user_annotation", name, 1, start, duration, Json::object());
  }
  RankTrace& operation(double start, double duration, int sequence = 1) {
    return add("cpu_op", "aten::mm", 1, start, duration, {{"Sequence number", sequence}});
  }
  RankTrace& node(const std::string& name, double start, double duration, int thread = 1) {
    return add("cpu_op", "autograd::engine::evaluate_function: " + name, thread, start, duration,
               {{"Sequence number", 1}, {"Fwd thread id", 1}});
  }
  // A kernel that takes `duration`, launched at `start`.
  RankTrace& kernel(int thread, double start, double duration) {
    const int id = static_cast<int>(events_.size());
    add("cuda_runtime", "cudaLaunchKernel", thread, start, 1, {{"correlation", id}});
    return add("kernel", "gemm", 7, start + 1000, duration, {{"correlation", id}});
  }
  // A micro-batch of a stage that takes 10 forward, and twice as long backward.
  RankTrace& micro_batch(int stage, double start, double scale = 1) {
    range(fmt::format("PP:{}F0", stage), start, 14 * scale);
    operation(start + 4 * scale, 5);
    range(fmt::format("PP:{}B0", stage), start + 100, 25 * scale);
    return node("MmBackward0", start + 100 + 5 * scale, 20 * scale);
  }

  [[nodiscard]] std::string text() const {
    return Json{{"schemaVersion", 1}, {"traceEvents", events_}}.dump();
  }

 private:
  RankTrace& add(const std::string& category, const std::string& name, int thread, double start,
                 double duration, Json arguments) {
    events_.push_back({{"ph", "X"},
                       {"cat", category},
                       {"name", name},
                       {"pid", 1},
                       {"tid", thread},
                       {"ts", start},
                       {"dur", duration},
                       {"args", std::move(arguments)}});
    return *this;
  }

  std::vector<Json> events_;
};

Expected<TraceImport> import_ranks(const std::vector<RankTrace>& ranks,
                                   const StageLayers& layers = {}) {
  std::vector<std::string> texts;
  for (const RankTrace& rank : ranks) texts.push_back(rank.text());
  std::vector<TraceText> traces;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    traces.push_back({texts[i], fmt::format("rank{}.json", i)});
  }
  return import_traces(traces, layers);
}

std::string fault_of(const std::vector<RankTrace>& ranks, const StageLayers& layers = {}) {
  const auto imported = import_ranks(ranks, layers);
  return imported ? "taken" : imported.error().message;
}

// Seconds of the actions of a stage, by pass, in a recorded trace: those of the whole range, and
// those of the operations in it.
struct Bounds {
  std::vector<double> range_s, operations_s;
};

std::map<std::string, Bounds> bounds_of(const std::vector<std::filesystem::path>& paths) {
  std::map<std::string, Bounds> bounds;
  for (const auto& path : paths) {
    const Json trace = read_json(path).value();
    for (const Json& range : trace["traceEvents"]) {
      std::string name = range["name"];
      if (!name.starts_with("PP:") || name.find('_') != std::string::npos) continue;
      const double start = range["ts"];
      const double end = start + range["dur"].get<double>();
      double inside = 0;
      for (const Json& one : trace["traceEvents"]) {
        const double at = one["ts"];
        if (one["cat"] == "cpu_op" && at >= start && at < end) inside += one["dur"].get<double>();
      }
      name.erase(name.find_last_not_of("0123456789") + 1);  // the micro-batch
      bounds[name].range_s.push_back((end - start) * 1e-6);
      bounds[name].operations_s.push_back(inside * 1e-6);
    }
  }
  return bounds;
}

double middle(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.at(values.size() / 2);
}

// Expects a time between that of the operations and that of the range.
void expect_within(double time_s, const Bounds& bounds, const std::string& name) {
  EXPECT_LE(time_s, middle(bounds.range_s) + 1e-9) << name;
  EXPECT_GE(time_s, middle(bounds.operations_s) - 1e-9) << name;
}

TEST(TraceStages, ReadsThePipelinesOfPyTorch) {
  for (const std::string kind : {"1f1b", "interleaved", "zero_bubble"}) {
    const std::vector<std::filesystem::path> paths = {kRecorded / (kind + ".0.json"),
                                                      kRecorded / (kind + ".1.json")};
    const auto imported = read_traces(paths);
    ASSERT_TRUE(imported) << imported.error().message;
    const auto bounds = bounds_of(paths);
    ASSERT_EQ(imported->model.size(), kind == "1f1b" ? 2 : 4) << kind;
    EXPECT_EQ(imported->micro_batches, 3);
    EXPECT_FALSE(imported->device_times);
    for (int stage = 0; stage < imported->model.size(); ++stage) {
      const cost::LayerCost& layer = imported->model.layers[static_cast<std::size_t>(stage)];
      const auto of = [&](char pass) { return fmt::format("PP:{}{}", stage, pass); };
      EXPECT_EQ(layer.name, fmt::format("stages.{}", stage));
      expect_within(layer.forward_s, bounds.at(of('F')), kind + of('F'));
      EXPECT_GT(layer.backward_input_s, 0);
      EXPECT_GT(layer.backward_weight_s, 0);
      if (bounds.contains(of('B'))) {
        expect_within(layer.backward_input_s + layer.backward_weight_s, bounds.at(of('B')),
                      kind + of('B'));
      } else if (stage > 0) {
        expect_within(layer.backward_input_s, bounds.at(of('I')), kind + of('I'));
        expect_within(layer.backward_weight_s, bounds.at(of('W')), kind + of('W'));
      }
    }
  }
}

// A range of PyTorch begins when the rank is ready. The message may come later.
TEST(TraceStages, TheWaitForAMessageIsNoWork) {
  RankTrace rank;
  rank.range("PP:0F0", 0, 1000).operation(990, 9);
  rank.range("PP:0B0", 2000, 500).node("MmBackward0", 2460, 10).node("ReluBackward0", 2470, 30);
  const auto layer = import_ranks({rank}).value().model.layers.at(0);
  EXPECT_DOUBLE_EQ(layer.forward_s, 10e-6);
  // 10 of the nodes' 40 are half I and half W.
  EXPECT_DOUBLE_EQ(layer.backward_weight_s, 40e-6 * 5 / 40);
  EXPECT_DOUBLE_EQ(layer.backward_input_s, 40e-6 * 35 / 40);
}

TEST(TraceStages, InputsAndWeightsApartAreAsMeasured) {
  RankTrace rank;
  for (const int stage : {0, 1}) {
    const double at = 1000 * stage;
    rank.range(fmt::format("PP:{}F0", stage), at, 10).operation(at, 9);
    rank.range(fmt::format("PP:{}I0", stage), at + 100, 30);
    if (stage == 1) rank.node("MmBackward0", at + 110, 20);
    rank.range(fmt::format("PP:{}W0", stage), at + 200, 60);
    rank.node("MmBackward0", at + 210, 30).node("AccumulateGrad", at + 250, 10);
  }
  const auto layers = import_ranks({rank}).value().model.layers;
  EXPECT_DOUBLE_EQ(layers.at(1).backward_input_s, 20e-6);
  EXPECT_DOUBLE_EQ(layers.at(1).backward_weight_s, 50e-6);
  // The first stage runs all as W.
  EXPECT_DOUBLE_EQ(layers.at(0).backward_input_s, 50e-6 * 15 / 40);
  EXPECT_DOUBLE_EQ(layers.at(0).backward_weight_s, 50e-6 * 25 / 40);
}

// Written after PyTorch's sources, not recorded on a GPU.
TEST(TraceStages, CountsTheKernelsOfAllThreads) {
  RankTrace rank;
  rank.range("PP:0F0", 0, 100).operation(1, 5).kernel(1, 2, 70).kernel(1, 150, 999);
  rank.range("PP:0B0", 200, 100).node("ReluBackward0", 210, 10, 2).kernel(2, 212, 30);
  rank.node("AddmmBackward0", 230, 10, 2).kernel(2, 232, 60);
  const auto imported = import_ranks({rank}).value();
  EXPECT_TRUE(imported.device_times);
  EXPECT_DOUBLE_EQ(imported.model.layers.at(0).forward_s, 70e-6);
  EXPECT_DOUBLE_EQ(imported.model.layers.at(0).backward_input_s, 60e-6);
  EXPECT_DOUBLE_EQ(imported.model.layers.at(0).backward_weight_s, 30e-6);
  EXPECT_EQ(fault_of({rank, RankTrace().micro_batch(1, 0)}),
            "rank1.json: has no kernels of a device, and rank0.json has some, wanted the same in "
            "all traces");
}

TEST(TraceStages, TwoActionsAtOnceAreLeftOut) {
  RankTrace rank;
  rank.micro_batch(0, 0).micro_batch(1, 1000).range("PP:(1F1;0B1)OVERLAP_F_B", 3000, 500);
  rank.operation(3001, 400);
  const auto imported = import_ranks({rank}).value();
  EXPECT_EQ(imported.overlapped, 1);
  EXPECT_DOUBLE_EQ(imported.model.layers.at(1).forward_s, 10e-6);
}

// Eight ranks of two stages each, in any order of files: each stage as in its file alone.
TEST(TraceStages, RanksTogetherAreAsEachAlone) {
  Rng rng(7);
  std::vector<RankTrace> ranks;
  std::vector<cost::LayerCost> alone(16);
  for (int r = 0; r < 8; ++r) {
    RankTrace rank;
    RankTrace first;
    RankTrace second;
    for (int m = 0; m < 5; ++m) {
      const double scale = 1 + static_cast<double>(rng.below(1000)) / 1000;
      const double start = 1000 * m;
      rank.micro_batch(r, start, scale).micro_batch(r + 8, start + 500, 2 * scale);
      first.micro_batch(0, start, scale);
      second.micro_batch(0, start + 500, 2 * scale);
    }
    rank.range(fmt::format("PP:{}SEND_F0", r), 5000, 1);
    ranks.push_back(rank);
    alone[static_cast<std::size_t>(r)] = import_ranks({first}).value().model.layers.at(0);
    alone[static_cast<std::size_t>(r + 8)] = import_ranks({second}).value().model.layers.at(0);
  }
  for (int order = 0; order < 2; ++order) {
    const auto together = import_ranks(ranks).value();
    ASSERT_EQ(together.model.size(), 16);
    for (std::size_t i = 0; i < alone.size(); ++i) {
      alone[i].name = fmt::format("stages.{}", i);
      EXPECT_EQ(together.model.layers[i], alone[i]);
    }
    std::reverse(ranks.begin(), ranks.end());
  }
}

TEST(TraceStages, ReplicasOfAStageGiveOneMedian) {
  std::vector<RankTrace> replicas(3);
  for (int i = 0; i < 3; ++i) replicas[static_cast<std::size_t>(i)].micro_batch(0, 0, 1 + i);
  const auto imported = import_ranks(replicas).value();
  EXPECT_EQ(imported.micro_batches, 3);
  EXPECT_DOUBLE_EQ(imported.model.layers.at(0).forward_s, 20e-6);
}

// Layers that the user names in a pipeline, with two stages a rank.
TEST(TraceStages, NamedLayersAreInTheOrderOfTheirStages) {
  std::vector<RankTrace> ranks(2);
  for (int stage = 3; stage >= 0; --stage) {
    RankTrace& rank = ranks[static_cast<std::size_t>(stage % 2)];
    const double at = 100 * stage;
    rank.range(fmt::format("PP:{}F0", stage), at, 40);
    for (int i = 0; i < 2; ++i) {
      const double start = at + 1 + 15 * i;
      rank.range(fmt::format("layer{}.forward", 2 * stage + i), start, 10 + stage);
      rank.range(fmt::format("layer{}.backward", 2 * stage + i), 1000 + start, 8);
    }
  }
  const auto imported = import_ranks(ranks).value();
  EXPECT_EQ(imported.sharing, "");
  ASSERT_EQ(imported.model.size(), 8);
  for (int i = 0; i < 8; ++i) {
    const cost::LayerCost& layer = imported.model.layers[static_cast<std::size_t>(i)];
    EXPECT_EQ(layer.name, fmt::format("layer{}", i));
    const int microseconds = 10 + i / 2;
    EXPECT_DOUBLE_EQ(layer.forward_s, microseconds * 1e-6);
    EXPECT_DOUBLE_EQ(layer.backward_input_s, 4e-6);
  }
  EXPECT_NE(fault_of(ranks, {.blocks = {1, 1, 1, 1}, .formulas = {}, .formulas_of = ""})
                .find("wanted no --blocks"),
            std::string::npos);
  EXPECT_EQ(fault_of({ranks[0], RankTrace().micro_batch(1, 0)}),
            "rank1.json: has no named layers, and rank0.json has some, wanted the same in all "
            "traces");
}

// A pipeline with I and W apart runs the node of a product once for each.
TEST(TraceStages, NodesOfNamedLayersFollowTheAction) {
  RankTrace rank;
  rank.range("PP:1F0", 0, 20).range("a.forward", 1, 10).operation(2, 5);
  rank.range("PP:1I0", 100, 20).node("MmBackward0", 101, 7);
  rank.range("PP:1W0", 200, 20).node("MmBackward0", 201, 11);
  const auto layer = import_ranks({rank}).value().model.layers.at(0);
  EXPECT_DOUBLE_EQ(layer.backward_input_s, 7e-6);
  EXPECT_DOUBLE_EQ(layer.backward_weight_s, 11e-6);
}

TEST(TraceStages, FaultsNameStageAndFile) {
  RankTrace second;
  second.micro_batch(1, 0);
  EXPECT_EQ(fault_of({second}), "rank0.json: no trace has stage 0, wanted the traces of all ranks");
  RankTrace first;
  first.micro_batch(0, 0).range("PP:0SEND_F0", 50, 1);
  EXPECT_EQ(fault_of({first}), "rank0.json: no trace has stage 1, wanted the traces of all ranks");
  EXPECT_EQ(fault_of({first, RankTrace().micro_batch(2, 0)}),
            "rank0.json: no trace has stage 1, wanted the traces of all ranks");
  RankTrace forward;
  forward.range("PP:0F0", 0, 10).operation(1, 2);
  EXPECT_EQ(fault_of({forward}),
            "rank0.json: nothing of the backward pass belongs to a stage, wanted a trace of "
            "training steps, with ProfilerActivity.CPU among its activities");
  RankTrace backward;
  backward.range("PP:0B0", 0, 10).node("MmBackward0", 1, 2);
  EXPECT_EQ(fault_of({backward}), "rank0.json: stage 0 has no forward, wanted PP:0F0");
  for (const std::string other : {"PP:0F", "PP:F0", "PP:0X0", "PP:0F0 ", "PP:-1F0", "PP:99999999F0",
                                  "0F0", "PP:0UNSHARD", "PP:(0F1)"}) {
    RankTrace rank;
    rank.range(other, 0, 10).operation(1, 2);
    EXPECT_NE(fault_of({rank}).find("no range is called"), std::string::npos) << other;
  }
}

TEST(TraceStages, FaultsOfTheTextNameTheEvent) {
  const auto fault = [](const std::string& text) {
    const auto imported = import_traces(std::vector{TraceText{text, "t.json"}});
    return imported ? "taken" : imported.error().message;
  };
  EXPECT_NE(fault("{\"traceEvents\": 5}").find("/traceEvents is no list"), std::string::npos);
  EXPECT_NE(fault("5").find("/traceEvents is missing"), std::string::npos);
  EXPECT_NE(fault("").find("t.json: wanted JSON: parse error at line 1, column 1"),
            std::string::npos);
  EXPECT_NE(fault("{\"traceEvents\": [\n{\"ph\": \"X\",}]}").find("line 2, column 12"),
            std::string::npos);
  EXPECT_EQ(fault(R"([1, {"ts": 1, "ts": 2}])"),
            "t.json: /traceEvents/1/ts is given twice, wanted each key once");
  EXPECT_EQ(fault(R"({"traceEvents": [], "traceEvents": []})"),
            "t.json: /traceEvents is given twice, wanted one");
  // A key beside the events is none of an event.
  EXPECT_EQ(fault(R"({"ts": 1, "ts": 2, "traceEvents": []})"), fault(R"({"traceEvents": []})"));
  EXPECT_EQ(fault(std::string(70, '[')), "t.json: wanted JSON of at most 64 levels");
  EXPECT_NE(fault("\x1f\x8b\x08").find("gunzip"), std::string::npos);
  EXPECT_NE(fault("version https://git-lfs.github.com/spec/v1\n").find("Git LFS pointer"),
            std::string::npos);
  EXPECT_EQ(fault(R"([{"ph": "X", "cat": "user_annotation", "name": "a\nb.forward", "ts": 1,
                       "dur": 1},
                      {"ph": "X", "cat": "user_annotation", "name": "c.forward", "ts": 1.5,
                       "dur": 1}])"),
            "t.json: range 'c.forward' begins inside 'a b.forward', wanted layers that do not "
            "overlap; name only the inner or only the outer ones");
}

// Values larger than any of a trace end the reading. So memory stays bounded.
TEST(TraceStages, AnEndlessValueIsRefused) {
  const TempFolder folder;
  const auto path = folder.write("t.json", "[\"" + std::string(std::size_t{17} << 20, 'x') + "\"]");
  EXPECT_EQ(read_traces(std::vector{path}).error().message,
            path.string() + ": a value has more than 16.0 MiB, wanted a trace");
}

// Files are read in pieces, and texts are not: both say the same.
TEST(TraceStages, DamagedFilesAreRefusedOrRead) {
  RankTrace rank;
  rank.micro_batch(0, 0);
  const std::string small = rank.text();
  for (int m = 1; m < 800; ++m) rank.micro_batch(0, 1000 * m);
  const std::string whole = rank.text();
  ASSERT_GT(whole.size(), std::size_t{1} << 18) << "several pieces";
  const TempFolder folder;
  int taken = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    const std::string text = mutate(seed % 5 == 0 ? whole : small, rng);
    const auto path = folder.write("t.json", text);
    const auto read = read_traces(std::vector{path});
    const auto parsed = import_traces(std::vector{TraceText{text, path.string()}});
    ASSERT_EQ(read.has_value(), parsed.has_value()) << "seed " << seed;
    if (read) {
      EXPECT_EQ(read->model, parsed->model) << "seed " << seed;
      ++taken;
    } else {
      EXPECT_EQ(read.error().message, parsed.error().message) << "seed " << seed;
      EXPECT_EQ(read.error().code, ErrorCode::kBadInput);
      EXPECT_EQ(read.error().message.find('\n'), std::string::npos) << "seed " << seed;
    }
  }
  EXPECT_GT(taken, 0);
}

}  // namespace
}  // namespace dynmo::observe
