// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/trace_import.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/core/median.h"
#include "dynmo/observe/trace_events_impl.h"

namespace dynmo::observe {
namespace {

enum Pass { kForward, kBackward, kBackwardInput, kBackwardWeight, kPasses };
constexpr std::array<std::string_view, kPasses> kSuffixes = {".forward", ".backward",
                                                             ".backward_input", ".backward_weight"};

// Returns whether PyTorch or a library on it has made a range, which the user cannot rename. Such
// ranges are the forward of a wrapper, steps of optimizers, and the runs of compiled code and
// autograd.
bool is_of_library(std::string_view name) {
  for (const std::string_view prefix :
       {"Optimizer.", "FSDP::", "Torch-Compiled Region", "TorchDynamo", "## Call",
        "CompiledFunction", "ProfilerStep#", "nn.Module: ", "autograd::", "torch::autograd::",
        "c10d::", "gloo:", "nccl:", "DDP::", "[pl]"}) {
    if (name.starts_with(prefix)) return true;
  }
  for (const std::string_view suffix : kSuffixes) {
    if (!name.ends_with(suffix)) continue;
    name.remove_suffix(suffix.size());
    break;
  }
  name.remove_prefix(name.rfind('.') + 1);  // "torch.nn.parallel."; npos + 1 is 0
  constexpr std::array<std::string_view, 12> kWrappers = {"DistributedDataParallel",
                                                          "FullyShardedDataParallel",
                                                          "FSDPModule",
                                                          "DataParallel",
                                                          "OptimizedModule",
                                                          "CheckpointWrapper",
                                                          "OffloadWrapper",
                                                          "DeepSpeedEngine",
                                                          "PipelineEngine",
                                                          "_CompiledModule",
                                                          "ScriptModule",
                                                          "RecursiveScriptModule"};
  return std::ranges::find(kWrappers, name) != kWrappers.end();
}

// Time of an event: its own, or that of the kernels launched in it by its thread.
class Clock {
 public:
  explicit Clock(const TraceEvents& events) : device_(!events.kernel_us.empty()) {
    for (const TraceEvent& launch : events.launches) {
      const auto kernel = events.kernel_us.find(launch.number.value_or(-1));
      if (kernel == events.kernel_us.end()) continue;
      Launches& launches = threads_[launch.thread];
      launches.start_us.push_back(launch.start_us);
      launches.sum_us.push_back(launches.sum_us.back() + kernel->second);
    }
  }

  [[nodiscard]] bool device() const { return device_; }
  [[nodiscard]] double seconds(const TraceEvent& event) const {
    if (!device_) return event.duration_us * 1e-6;
    const auto found = threads_.find(event.thread);
    if (found == threads_.end()) return 0;
    const auto& starts = found->second.start_us;
    const auto at = [&](double time) {
      return found->second.sum_us[static_cast<std::size_t>(
          std::lower_bound(starts.begin(), starts.end(), time) - starts.begin())];
    };
    return (at(event.end_us()) - at(event.start_us)) * 1e-6;
  }

 private:
  struct Launches {
    std::vector<double> start_us;      // ascending
    std::vector<double> sum_us = {0};  // of the kernels of the launches before each
  };
  bool device_;
  std::map<int, Launches> threads_;
};

// One run of a layer's forward, and the backward that it caused.
struct Occurrence {
  int layer = 0;
  const TraceEvent* range = nullptr;
  double input_s = 0;
  double weight_s = 0;
  bool has_nodes = false;
};

struct Layer {
  std::string name;
  std::array<std::vector<double>, kPasses> seconds;  // of its ranges
};

// Share of a node's time that is spent on gradients of weights. Products with weights compute two
// gradients of the same arithmetic; those of attention go by other names. A compiled layer's node
// has both.
double weight_share(std::string_view node) {
  if (node.find("AccumulateGrad") != std::string_view::npos) return 1;
  if (node.starts_with("EmbeddingBackward")) return 1;
  for (const std::string_view product : {"AddmmBackward", "MmBackward", "LinearBackward",
                                         "ConvolutionBackward", "CompiledFunctionBackward"}) {
    if (node.starts_with(product)) return 0.5;
  }
  return 0;
}

class Importer {
 public:
  Importer(const TraceEvents& events, std::string_view origin)
      : events_(events), origin_(origin), clock_(events) {}

  Expected<TraceImport> run() {
    DYNMO_TRY(find_layers());
    DYNMO_TRY(add_backward_ranges());
    DYNMO_TRY(check_overlaps());
    add_nodes();
    return result();
  }

 private:
  Expected<void> find_layers() {
    std::string looked_through;
    for (const TraceEvent& range : events_.ranges) {
      const std::string_view suffix = kSuffixes[kForward];
      if (!range.name.ends_with(suffix) || range.name.size() == suffix.size()) continue;
      if (is_of_library(range.name)) {
        looked_through = fmt::format(" but '{}', which a library makes", range.name);
        continue;
      }
      const std::string name = range.name.substr(0, range.name.size() - suffix.size());
      const auto [found, is_new] = ids_.emplace(name, static_cast<int>(layers_.size()));
      if (is_new) layers_.push_back({.name = name, .seconds = {}});
      Occurrence occurrence;
      occurrence.layer = found->second;
      occurrence.range = &range;
      occurrences_.push_back(occurrence);
      layers_[static_cast<std::size_t>(found->second)].seconds[kForward].push_back(
          clock_.seconds(range));
    }
    for (Occurrence& one : occurrences_) by_thread_[one.range->thread].push_back(&one);
    if (!layers_.empty()) return {};
    return make_error(ErrorCode::kBadInput,
                      "{}: no range is called NAME.forward{}; run each layer's forward in "
                      "torch.profiler.record_function(\"NAME.forward\")",
                      origin_, looked_through);
  }

  Expected<void> add_backward_ranges() {
    for (const TraceEvent& range : events_.ranges) {
      for (const Pass pass : {kBackward, kBackwardInput, kBackwardWeight}) {
        if (!range.name.ends_with(kSuffixes[pass]) || is_of_library(range.name)) continue;
        const std::string name = range.name.substr(0, range.name.size() - kSuffixes[pass].size());
        const auto found = ids_.find(name);
        if (found == ids_.end()) {
          return make_error(ErrorCode::kBadInput,
                            "{}: range '{}' is of a layer without forward, wanted '{}.forward' too",
                            origin_, range.name, name);
        }
        layers_[static_cast<std::size_t>(found->second)].seconds[pass].push_back(
            clock_.seconds(range));
      }
    }
    return {};
  }

  // Forward ranges of a thread must follow one another, outside of the backward pass.
  Expected<void> check_overlaps() const {
    std::map<int, const TraceEvent*> last;
    for (const Occurrence& occurrence : occurrences_) {
      const TraceEvent*& before = last[occurrence.range->thread];
      if (before != nullptr && occurrence.range->start_us < before->end_us()) {
        return make_error(ErrorCode::kBadInput,
                          "{}: range '{}' begins inside '{}', wanted layers that do not overlap; "
                          "name only the inner or only the outer ones",
                          origin_, occurrence.range->name, before->name);
      }
      before = occurrence.range;
    }
    for (const TraceEvent& node : events_.nodes) {
      const Occurrence* inner = last_before(node.end_us(), node.thread);
      if (inner == nullptr || inner->range->start_us < node.start_us) continue;
      return make_error(ErrorCode::kBadInput,
                        "{}: range '{}' runs inside the backward pass, wanted a run without "
                        "recomputed activations (torch.utils.checkpoint)",
                        origin_, inner->range->name);
    }
    return {};
  }

  // Finds the last occurrence on the thread that starts before `time`.
  [[nodiscard]] Occurrence* last_before(double time, int thread) const {
    const auto found = by_thread_.find(thread);
    if (found == by_thread_.end()) return nullptr;
    const auto after = std::lower_bound(
        found->second.begin(), found->second.end(), time,
        [](const Occurrence* one, double start) { return one->range->start_us < start; });
    return after == found->second.begin() ? nullptr : *std::prev(after);
  }

  [[nodiscard]] Occurrence* occurrence_of(const TraceEvent& operation) const {
    Occurrence* last = last_before(operation.start_us, operation.thread);
    return last != nullptr && operation.start_us < last->range->end_us() ? last : nullptr;
  }

  // The occurrence whose forward made `node`; null if that lies in no layer.
  [[nodiscard]] Occurrence* maker_of(const TraceEvent& node) const {
    const auto found = operations_.find(*node.number);
    if (found == operations_.end()) return nullptr;
    const auto after =
        std::lower_bound(found->second.begin(), found->second.end(), node.start_us,
                         [](const TraceEvent* one, double start) { return one->start_us < start; });
    return after == found->second.begin() ? nullptr : occurrence_of(**std::prev(after));
  }

  void add_nodes() {
    for (const TraceEvent& operation : events_.operations) {
      operations_[*operation.number].push_back(&operation);
    }
    std::map<int, Occurrence*> last;  // of each thread that runs the backward pass
    std::map<int, double> busy_until_us;
    for (const TraceEvent& node : events_.nodes) {
      double& busy = busy_until_us[node.thread];
      if (node.start_us < busy) continue;  // part of the node around it
      busy = node.end_us();
      Occurrence*& owner = last[node.thread];
      if (node.number) owner = maker_of(node);  // those without follow what made their gradient
      add_node(node, owner);
    }
  }

  void add_node(const TraceEvent& node, Occurrence* owner) {
    const double seconds = clock_.seconds(node);
    if (owner == nullptr) {
      result_.unclaimed_s += seconds;
      return;
    }
    const double share = weight_share(node.name);
    owner->has_nodes = true;
    owner->weight_s += share * seconds;
    owner->input_s += (1 - share) * seconds;
  }

  Expected<TraceImport> result() {
    double backward_s = 0;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      cost::LayerCost cost = layer_cost(layers_[i], static_cast<int>(i));
      backward_s += cost.backward_input_s + cost.backward_weight_s;
      result_.micro_batches =
          std::max(result_.micro_batches, static_cast<int>(layers_[i].seconds[kForward].size()));
      result_.model.layers.push_back(std::move(cost));
    }
    if (!(backward_s > 0)) {
      return make_error(ErrorCode::kBadInput,
                        "{}: nothing of the backward pass belongs to a layer, wanted a trace of "
                        "training steps, with ProfilerActivity.CPU among its activities",
                        origin_);
    }
    result_.device_times = clock_.device();
    DYNMO_TRY(cost::validate(result_.model));
    return std::move(result_);
  }

  [[nodiscard]] cost::LayerCost layer_cost(const Layer& layer, int id) const {
    cost::LayerCost cost;
    cost.name = layer.name;
    cost.forward_s = median(layer.seconds[kForward]);
    std::vector<double> input;
    std::vector<double> weight;
    for (const Occurrence& occurrence : occurrences_) {
      if (occurrence.layer != id || !occurrence.has_nodes) continue;  // the trace ended before
      input.push_back(occurrence.input_s);
      weight.push_back(occurrence.weight_s);
    }
    cost.backward_input_s = median(std::move(input));
    cost.backward_weight_s = median(std::move(weight));
    if (!layer.seconds[kBackwardInput].empty() || !layer.seconds[kBackwardWeight].empty()) {
      cost.backward_input_s = median(layer.seconds[kBackwardInput]);
      cost.backward_weight_s = median(layer.seconds[kBackwardWeight]);
    } else if (!layer.seconds[kBackward].empty()) {
      cost.backward_input_s = cost.backward_weight_s = median(layer.seconds[kBackward]) / 2;
    }
    return cost;
  }

  const TraceEvents& events_;
  std::string origin_;
  Clock clock_;
  std::map<std::string, int> ids_;
  std::vector<Layer> layers_;
  std::vector<Occurrence> occurrences_;  // in order of start
  std::map<int, std::vector<Occurrence*>> by_thread_;
  // Forward operations by sequence number. The last one of a number made the node. Earlier ones
  // call it, or made no node. Numbers return with a new thread, so the latest before a node counts.
  std::unordered_map<std::int64_t, std::vector<const TraceEvent*>> operations_;
  TraceImport result_;
};

}  // namespace

Expected<TraceImport> import_trace(const Json& trace, std::string_view origin) {
  DYNMO_ASSIGN(const TraceEvents events, sort_events(trace, origin));
  return Importer(events, origin).run();
}

Expected<TraceImport> read_trace(const std::filesystem::path& path) {
  // Traces of long runs are large; more would not fit the memory of most machines once it is read.
  constexpr std::size_t kMaxTraceBytes = std::size_t{2} << 30;
  DYNMO_ASSIGN(const std::string text, read_file(path, kMaxTraceBytes));
  if (text.starts_with("\x1f\x8b")) {
    return make_error(ErrorCode::kBadInput, "{}: is compressed, wanted JSON; gunzip it first",
                      path.string());
  }
  DYNMO_ASSIGN(const Json trace, parse_json(text, path.string()));
  return import_trace(trace, path.string());
}

}  // namespace dynmo::observe
