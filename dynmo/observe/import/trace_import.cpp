// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/import/trace_import.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dynmo/core/median.h"
#include "dynmo/observe/import/trace_events_impl.h"
#include "dynmo/observe/import/trace_parts_impl.h"

namespace dynmo::observe {
namespace {

// Joins the files, one after another. A file's events are not kept.
class TraceJoiner {
 public:
  Expected<void> add(const TraceEvents& events, std::string_view origin) {
    const TraceClock clock(events);
    const StageActions actions = find_actions(events);
    DYNMO_ASSIGN(NamedLayers found, named_layers(events, clock, actions, origin));
    DYNMO_TRY(check_ranges(found, actions, origin));
    DYNMO_TRY(check_clock(clock, origin));
    result_.unclaimed_s += found.unclaimed_s;
    result_.overlapped += actions.overlapped;
    for (NamedLayer& layer : found.layers) add_layer(std::move(layer));
    if (layers_.empty()) {
      for (const auto& [stage, times] : stage_times(events, clock, actions)) {
        stages_[stage].append(times);
      }
    }
    senders_.insert(actions.senders.begin(), actions.senders.end());
    receivers_.insert(actions.receivers.begin(), actions.receivers.end());
    ++files_;
    return {};
  }

  Expected<TraceImport> finish(const StageLayers& layers) && {
    if (!layers_.empty()) {
      if (!layers.blocks.empty() || layers.formulas.size() > 0) {
        return make_error(ErrorCode::kBadInput,
                          "{}: the layers are named by ranges '{}.forward', wanted no --blocks and "
                          "no --model",
                          first_, layers_.front().name);
      }
      take_layers();
    } else {
      DYNMO_TRY(take_stages(layers));
    }
    double backward_s = 0;
    for (const cost::LayerCost& layer : result_.model.layers) {
      backward_s += layer.backward_input_s + layer.backward_weight_s;
    }
    if (!(backward_s > 0)) {
      return make_error(ErrorCode::kBadInput,
                        "{}: nothing of the backward pass belongs to a {}, wanted a trace of "
                        "training steps, with ProfilerActivity.CPU among its activities",
                        first_, layers_.empty() ? "stage" : "layer");
    }
    DYNMO_TRY(cost::validate(result_.model));
    return std::move(result_);
  }

 private:
  // Checks that every file has named layers, or every file has a pipeline's actions.
  Expected<void> check_ranges(const NamedLayers& found, const StageActions& actions,
                              std::string_view origin) {
    const bool named = !found.layers.empty();
    if (files_ == 0) first_ = origin;
    if (files_ > 0 && named != !layers_.empty()) {
      return make_error(ErrorCode::kBadInput,
                        "{}: has {}named layers, and {} has {}, wanted the same in all traces",
                        origin, named ? "" : "no ", first_, named ? "none" : "some");
    }
    if (named || !actions.list.empty()) return {};
    return make_error(
        ErrorCode::kBadInput,
        "{}: no range is called NAME.forward or PP:0F0{}; run each layer's forward in "
        "torch.profiler.record_function(\"NAME.forward\"), or a pipeline whose schedule names its "
        "actions",
        origin,
        found.looked_through.empty()
            ? ""
            : fmt::format(" but '{}', which a library makes", found.looked_through));
  }

  Expected<void> check_clock(const TraceClock& clock, std::string_view origin) {
    if (files_ == 0) result_.device_times = clock.device();
    if (clock.device() == result_.device_times) return {};
    return make_error(ErrorCode::kBadInput,
                      "{}: has {} of a device, and {} has {}, wanted the same in all traces",
                      origin, clock.device() ? "kernels" : "no kernels", first_,
                      clock.device() ? "none" : "some");
  }

  void add_layer(NamedLayer&& layer) {
    const auto [found, is_new] = ids_.emplace(layer.name, layers_.size());
    if (is_new) {
      layers_.push_back(std::move(layer));
    } else {
      layers_[found->second].times.append(layer.times);
    }
  }

  [[nodiscard]] StageTimes medians(const PartTimes& times) {
    result_.micro_batches =
        std::max(result_.micro_batches, static_cast<int>(times.forward_s.size()));
    return {.forward_s = median(times.forward_s),
            .input_s = median(times.input_s),
            .weight_s = median(times.weight_s)};
  }

  void take_layers() {
    if (std::ranges::all_of(layers_, [](const NamedLayer& layer) { return layer.stage >= 0; })) {
      std::ranges::stable_sort(layers_, {}, &NamedLayer::stage);
    }
    for (const NamedLayer& layer : layers_) {
      const StageTimes times = medians(layer.times);
      cost::LayerCost cost;
      cost.name = layer.name;
      cost.forward_s = times.forward_s;
      cost.backward_input_s = times.input_s;
      cost.backward_weight_s = times.weight_s;
      result_.model.layers.push_back(std::move(cost));
    }
  }

  Expected<void> take_stages(const StageLayers& layers) {
    DYNMO_TRY(check_stages());
    std::vector<StageTimes> stages;
    for (const auto& [stage, times] : stages_) stages.push_back(medians(times));
    DYNMO_ASSIGN(SharedTimes shared, share_out(stages, layers));
    result_.model = std::move(shared.model);
    result_.sharing = std::move(shared.rule);
    return {};
  }

  // Checks that the stages are 0, 1, ..., and that the last one sends nothing.
  [[nodiscard]] Expected<void> check_stages() const {
    int next = 0;
    for (const auto& [stage, times] : stages_) {
      if (stage != next) break;
      if (times.forward_s.empty()) {
        return make_error(ErrorCode::kBadInput, "{}: stage {} has no forward, wanted PP:{}F0",
                          first_, stage, stage);
      }
      ++next;
    }
    const bool absent = next < static_cast<int>(stages_.size()) || senders_.contains(next - 1) ||
                        receivers_.contains(next);
    if (!absent) return {};
    return make_error(ErrorCode::kBadInput,
                      "{}: no trace has stage {}, wanted the traces of all ranks", first_, next);
  }

  std::string first_;  // file
  int files_ = 0;
  std::unordered_map<std::string, std::size_t> ids_;
  std::vector<NamedLayer> layers_;
  std::map<int, PartTimes> stages_;
  std::set<int> senders_;
  std::set<int> receivers_;
  TraceImport result_;
};

}  // namespace

Expected<TraceImport> import_traces(std::span<const TraceText> traces, const StageLayers& layers) {
  TraceJoiner joiner;
  for (const TraceText& trace : traces) {
    DYNMO_ASSIGN(const TraceEvents events, parse_events(trace.text, trace.origin));
    DYNMO_TRY(joiner.add(events, trace.origin));
  }
  return std::move(joiner).finish(layers);
}

Expected<TraceImport> read_traces(std::span<const std::filesystem::path> paths,
                                  const StageLayers& layers, const OpenTrace& open) {
  TraceJoiner joiner;
  for (const std::filesystem::path& path : paths) {
    DYNMO_ASSIGN(const TraceEvents events, read_events(path, open));
    DYNMO_TRY(joiner.add(events, path.string()));
  }
  return std::move(joiner).finish(layers);
}

}  // namespace dynmo::observe
