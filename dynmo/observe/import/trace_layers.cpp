// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <unordered_map>
#include <utility>

#include "dynmo/observe/import/trace_parts_impl.h"

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

// One run of a layer's forward, and the backward that it caused.
struct Occurrence {
  int layer = 0;
  const TraceEvent* range = nullptr;
  double input_s = 0;
  double weight_s = 0;
  bool has_nodes = false;
};

struct FoundLayer {
  std::string name;
  int stage = -1;
  std::array<std::vector<double>, kPasses> seconds;  // of its ranges
};

class LayerFinder {
 public:
  LayerFinder(const TraceEvents& events, const TraceClock& clock, const StageActions& actions,
              std::string_view origin)
      : events_(events), clock_(clock), actions_(actions), origin_(origin) {}

  Expected<NamedLayers> run() {
    find_layers();
    DYNMO_TRY(add_backward_ranges());
    DYNMO_TRY(check_overlaps());
    add_nodes();
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      result_.layers.push_back({.name = layers_[i].name,
                                .stage = layers_[i].stage,
                                .times = times_of_layer(layers_[i], static_cast<int>(i))});
    }
    return std::move(result_);
  }

 private:
  void find_layers() {
    for (const TraceEvent& range : events_.ranges) {
      const std::string& full = events_.name(range);
      const std::string_view suffix = kSuffixes[kForward];
      if (!full.ends_with(suffix) || full.size() == suffix.size()) continue;
      if (is_of_library(full)) {
        result_.looked_through = full;
        continue;
      }
      const std::string name = full.substr(0, full.size() - suffix.size());
      const auto [found, is_new] = ids_.emplace(name, static_cast<int>(layers_.size()));
      if (is_new) {
        const StageAction* around = actions_.at(range.start_us);
        const bool in_forward = around != nullptr && around->pass == 'F';
        layers_.push_back({.name = name, .stage = in_forward ? around->stage : -1, .seconds = {}});
      }
      Occurrence occurrence;
      occurrence.layer = found->second;
      occurrence.range = &range;
      occurrences_.push_back(occurrence);
      layers_[static_cast<std::size_t>(found->second)].seconds[kForward].push_back(
          clock_.seconds(range));
    }
    for (Occurrence& one : occurrences_) by_thread_[one.range->thread].push_back(&one);
  }

  Expected<void> add_backward_ranges() {
    if (layers_.empty()) return {};
    for (const TraceEvent& range : events_.ranges) {
      const std::string& full = events_.name(range);
      for (const Pass pass : {kBackward, kBackwardInput, kBackwardWeight}) {
        if (!full.ends_with(kSuffixes[pass]) || is_of_library(full)) continue;
        const std::string name = full.substr(0, full.size() - kSuffixes[pass].size());
        const auto found = ids_.find(name);
        if (found == ids_.end()) {
          return make_error(ErrorCode::kBadInput,
                            "{}: range '{}' is of a layer without forward, wanted '{}.forward' too",
                            origin_, full, name);
        }
        layers_[static_cast<std::size_t>(found->second)].seconds[pass].push_back(
            clock_.seconds(range));
      }
    }
    return {};
  }

  // Checks that the forward ranges of a thread follow one another, outside of the backward pass.
  Expected<void> check_overlaps() const {
    std::map<int, const TraceEvent*> last;
    for (const Occurrence& occurrence : occurrences_) {
      const TraceEvent*& before = last[occurrence.range->thread];
      if (before != nullptr && occurrence.range->start_us < before->end_us()) {
        return make_error(ErrorCode::kBadInput,
                          "{}: range '{}' begins inside '{}', wanted layers that do not overlap; "
                          "name only the inner or only the outer ones",
                          origin_, events_.name(*occurrence.range), events_.name(*before));
      }
      before = occurrence.range;
    }
    for (const TraceEvent& node : events_.nodes) {
      const Occurrence* inner = last_before(node.end_us(), node.thread);
      if (inner == nullptr || inner->range->start_us < node.start_us) continue;
      return make_error(ErrorCode::kBadInput,
                        "{}: range '{}' runs inside the backward pass, wanted a run without "
                        "recomputed activations (torch.utils.checkpoint)",
                        origin_, events_.name(*inner->range));
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

  // Returns the occurrence whose forward made `node`, or null if no layer's did.
  [[nodiscard]] Occurrence* maker_of(const TraceEvent& node) const {
    const auto found = operations_.find(*node.number);
    if (found == operations_.end()) return nullptr;
    const auto after =
        std::lower_bound(found->second.begin(), found->second.end(), node.start_us,
                         [](const TraceEvent* one, double start) { return one->start_us < start; });
    return after == found->second.begin() ? nullptr : occurrence_of(**std::prev(after));
  }

  void add_nodes() {
    if (layers_.empty()) return;
    for (const TraceEvent& operation : events_.operations) {
      operations_[*operation.number].push_back(&operation);
    }
    std::map<int, Occurrence*> last;  // of each thread that runs the backward pass
    for (const std::size_t i : outer_nodes(events_)) {
      const TraceEvent& node = events_.nodes[i];
      Occurrence*& owner = last[node.thread];
      if (node.number) owner = maker_of(node);  // else that of the node before
      add_node(node, owner);
    }
  }

  void add_node(const TraceEvent& node, Occurrence* owner) {
    const double seconds = clock_.seconds(node);
    if (owner == nullptr) {
      result_.unclaimed_s += seconds;
      return;
    }
    // A pipeline that runs I and W apart runs a node once for each.
    const StageAction* around = actions_.at(node.start_us);
    const bool apart = around != nullptr && around->stage != 0;
    const double share = apart && around->pass == 'I'   ? 0
                         : apart && around->pass == 'W' ? 1
                                                        : weight_share(events_.name(node));
    owner->has_nodes = true;
    owner->weight_s += share * seconds;
    owner->input_s += (1 - share) * seconds;
  }

  [[nodiscard]] PartTimes times_of_layer(const FoundLayer& layer, int id) const {
    PartTimes times;
    times.forward_s = layer.seconds[kForward];
    const auto& input = layer.seconds[kBackwardInput];
    const auto& weight = layer.seconds[kBackwardWeight];
    if (!input.empty() || !weight.empty()) {
      times.input_s = input;
      times.weight_s = weight;
    } else if (!layer.seconds[kBackward].empty()) {
      for (const double seconds : layer.seconds[kBackward]) {
        times.input_s.push_back(seconds / 2);
        times.weight_s.push_back(seconds / 2);
      }
    } else {
      for (const Occurrence& occurrence : occurrences_) {
        if (occurrence.layer != id || !occurrence.has_nodes) continue;  // the trace ended before
        times.input_s.push_back(occurrence.input_s);
        times.weight_s.push_back(occurrence.weight_s);
      }
    }
    return times;
  }

  const TraceEvents& events_;
  const TraceClock& clock_;
  const StageActions& actions_;
  std::string origin_;
  std::map<std::string, int> ids_;
  std::vector<FoundLayer> layers_;
  std::vector<Occurrence> occurrences_;  // in order of start
  std::map<int, std::vector<Occurrence*>> by_thread_;
  // Forward operations by sequence number. Several may have one number: the last of them made the
  // node. A new thread uses the numbers again, so the latest operation before a node counts.
  std::unordered_map<std::int64_t, std::vector<const TraceEvent*>> operations_;
  NamedLayers result_;
};

}  // namespace

Expected<NamedLayers> named_layers(const TraceEvents& events, const TraceClock& clock,
                                   const StageActions& actions, std::string_view origin) {
  return LayerFinder(events, clock, actions, origin).run();
}

}  // namespace dynmo::observe
