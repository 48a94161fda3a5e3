// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/start.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "dynmo/core/digest.h"
#include "dynmo/core/progress.h"
#include "dynmo/dynamism/pruning/options.h"
#include "dynmo/observe/table.h"
#include "dynmo/process/rank_environment.h"
#include "dynmo/process/sockets.h"
#include "dynmo/runtime/known_costs.h"
#include "dynmo/train/setup/pipeline_options.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"
#include "dynmo/weights/weights.h"

namespace dynmo::train {
namespace {

// Returns whether the plan of a checkpoint can run on `positions` positions with `layers` layers.
// (The layers that "auto" recomputes are chosen by costs, which a checkpoint does not have.)
bool continues_with(const plan::Plan& plan, const config::Config& config, int positions,
                    std::size_t layers) {
  const auto micro_batches = static_cast<int>(config.batch.micro_batches);
  return config.pipeline.recompute != "auto" && plan.ranks == positions &&
         plan.layers() == static_cast<int>(layers) &&
         plan::schedule_of(plan, micro_batches, /*frozen_layers=*/0).has_value();
}

// Returns this rank's host, with its switches if Slurm names them, and its device.
transport::Host host_of_rank(const std::string& name, const TrainOptions::RankDevice& device) {
  const auto switches = process::switches_of_host();
  transport::Host host = {.name = name.empty() ? process::host_name() : name,
                          .switches = switches ? *switches : "",
                          .fault = switches ? "" : switches.error().message};
  if (device.memory != cost::kUnlimitedMemory) {
    host.device = device.device.str();
    host.device_memory = planned_memory(device);
  }
  return host;
}

}  // namespace

Expected<Restored> restore_the_same(transport::Transport& group, const config::Config& config) {
  constexpr int kTries = 5;
  constexpr std::chrono::milliseconds kPause{500};
  for (int tries = 1;; ++tries) {
    Expected<Restored> restored = restore(config);
    if (!restored && restored.error().code != ErrorCode::kNoCheckpoint) return restored;
    std::string mine = "no checkpoint";
    if (restored) {
      const checkpoint::Manifest& manifest = restored->checkpoint.manifest;
      const Digest digest =
          digest_of(manifest.state.dump() + checkpoint::encode_entries(manifest.files));
      mine = fmt::format("that of step {} ({})", restored->step, digest.hex());
    }
    DYNMO_ASSIGN(const auto all,
                 transport::gather_texts(
                     group, transport::control_tag(transport::Control::kSettings), mine));
    const auto other = std::ranges::find_if(all, [&](const auto& it) { return it != all.front(); });
    if (other == all.end()) return restored;
    if (tries == kTries) {
      return make_error(ErrorCode::kNoCheckpoint,
                        "rank {} finds {} as the newest checkpoint, rank 0 {}: wanted a "
                        "run.directory in which all ranks find the same; try again if its storage "
                        "shows new files late",
                        other - all.begin(), *other, all.front());
    }
    std::this_thread::sleep_for(kPause);
  }
}

Bytes planned_memory(const TrainOptions::RankDevice& device) {
  constexpr std::int64_t kPercent = 92;
  return device.memory == cost::kUnlimitedMemory ? device.memory
                                                 : Bytes{device.memory.value / 100 * kPercent};
}

Expected<transport::MeasuredCluster> measure_group(transport::Transport& group,
                                                   const ResolvedRun& run, const std::string& host,
                                                   const cost::Cluster& known) {
  return transport::measured_cluster(group, host_of_rank(host, run.options().rank_device),
                                     static_cast<int>(run.config().pipeline.replicas),
                                     rank_memory(run.config()), known);
}

Expected<Start> begin_run(transport::Transport& group, const ResolvedRun& run,
                          const Beginning& beginning) {
  const config::Config& config = run.config();
  Start start;
  auto& notes = start.notes;
  start.restored = beginning.restored;
  if (beginning.resumes && !start.restored) {
    DYNMO_ASSIGN(start.restored, restore_the_same(group, config));
  }
  if (start.restored) {
    notes = start.restored->notes;
    notes.push_back(fmt::format("resume   step {} of {}, from {}", start.restored->step,
                                config.train.steps, start.restored->checkpoint.path.string()));
    std::string changed = changed_data(*start.restored, run.batches().identity(),
                                       config.data.blend.empty() ? config.data.path : "data.blend");
    if (!changed.empty()) notes.push_back(std::move(changed));
  }
  // Otherwise layers are measured, and a new plan is made.
  const transport::Grid grid(group, static_cast<int>(config.pipeline.replicas));
  DYNMO_ASSIGN(auto measured, measure_group(group, run, beginning.host));
  start.cluster = std::move(measured.cluster);
  if (!measured.note.empty()) notes.push_back(std::move(measured.note));
  const Bytes room = std::ranges::min(start.cluster.ranks, {}, &cost::ClusterRank::memory).memory;
  if (config.pipeline.memory == Bytes{0} && room != cost::kUnlimitedMemory) {
    notes.push_back(
        fmt::format("memory   plans fill at most {} of a rank, by the size of its "
                    "device and the ranks on it (pipeline.memory = 0)",
                    format_bytes(room)));
  }
  if (start.restored &&
      continues_with(start.restored->plan, config, grid.positions(), run.model().layers.size())) {
    // (A checkpoint has no costs, so only messages decide which ranks are neighbours.)
    const auto known = runtime::known_costs(
        run.model().layers, pipeline_options(run, 0, runtime::Balancing::kNever), {});
    start.first = FirstPlan{.plan = start.restored->plan, .profiler = {}};
    DYNMO_ASSIGN(start.first.plan,
                 placed_by_hosts(start.restored->plan, config, known, start.cluster));
  } else {
    std::vector<std::int64_t> cut = config.pipeline.cut;
    if (beginning.after_loss && std::ssize(cut) != grid.positions()) cut.clear();
    DYNMO_ASSIGN(start.first, first_plan(group, run, cut, start.cluster));
  }
  if (!run.batches().note().empty()) notes.push_back(run.batches().note());
  if (run.model().weights && !start.restored) {
    const weights::Weights& weights = *run.model().weights;
    notes.push_back(fmt::format("weights  of {}{}{}", weights.origin.string(),
                                weights.left_out.empty() ? "" : "; ", weights.left_out));
    notes.insert(notes.end(), weights.notes.begin(), weights.notes.end());
  }
  return start;
}

Expected<runtime::LayerStates> first_states(const Start& start, const ResolvedRun& run,
                                            Rank position) {
  const RunModel& model = run.model();
  const plan::Plan& plan = start.first.plan;
  if (start.restored) {
    return load_states(*start.restored, model.layers, plan, position, tensor_names(model));
  }
  auto states =
      runtime::initial_states(model.layers, plan, position,
                              static_cast<std::uint64_t>(run.config().train.seed), model.ties);
  if (!model.weights) return states;
  for (auto& [id, state] : states) {
    weights::load_values(*model.weights, model.places[id.index()], state);
    model::derive(*model.layers[id.index()], state);
    note_progress();
  }
  return states;
}

std::vector<std::string> start_lines(const ResolvedRun& run, const transport::Grid& grid,
                                     const runtime::Pipeline& pipeline) {
  const config::Config& config = run.config();
  std::vector<std::string> lines;
  if (emulates(config)) {
    const double scale = config.emulated.time_scale;
    lines.push_back(fmt::format(
        "device   EMULATED: layers sleep for {}the times of {}, hold {:g} of their bytes; "
        "losses are 0",
        scale == 1 ? std::string() : fmt::format("{:g} x ", scale),
        config.emulated.profile.empty() ? config.emulated.trace : config.emulated.profile,
        config.emulated.memory_scale));
  }
  if (on_device(config)) {
    lines.push_back(fmt::format("device   {}", run.options().rank_device.in(grid.world()).text));
    lines.emplace_back(
        config.run.deterministic
            ? "device   equal bits each time; run.deterministic = false allows faster operations"
            : "device   the fastest operations, whose last bits differ from run to run "
              "(run.deterministic = false)");
    const std::string& why = run.options().rank_device.no_kernels;
    if (!why.empty()) {
      lines.push_back(fmt::format("kernels  PyTorch's, none of our own: {}", why));
    }
  }
  if (on_device(config) && config.sources.enabled<dynamism::PruningOptions>() &&
      config.sources.get<dynamism::PruningOptions>().form == dynamism::PruningForm::kWeights) {
    lines.emplace_back(
        "pruning  masks with dense products: on a device it saves neither time nor memory, and "
        "pruning.form = units saves both");
  }
  const auto layers = std::ssize(run.model().layers);
  if (const auto& again = pipeline.recomputed(); !again.empty()) {
    lines.push_back(
        fmt::format("memory   {} of {} layers run forward again instead of keeping activations "
                    "(pipeline.recompute = {})",
                    again.size(), layers, config.pipeline.recompute));
  }
  const std::string ranks =
      grid.replicas() > 1 ? fmt::format("each of {} x {} ranks", grid.replicas(), grid.positions())
                          : observe::format_count(grid.positions(), "rank");
  const plan::Plan& plan = pipeline.plan();
  lines.push_back(fmt::format("plan     {} on {}, {}: {}", observe::format_count(layers, "layer"),
                              ranks, schedule::name(plan.schedule), plan::to_string(plan)));
  lines.push_back(cut_line(plan, run.model().layers));
  return lines;
}

dynamism::RunStart load_trace_start(const FirstPlan& first, const config::Config& config) {
  dynamism::RunStart start{.plan = first.plan,
                           .measured_under = first.plan,
                           .measured = {},
                           .replicas = static_cast<int>(config.pipeline.replicas),
                           .accumulation = static_cast<int>(config.batch.accumulation)};
  if (!first.profiler) return start;
  start.measured_under = first.measured_under;
  start.measured = first.profiler->observations();
  return start;
}

}  // namespace dynmo::train
