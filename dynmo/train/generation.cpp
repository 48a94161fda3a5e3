// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/generation.h"

#include <cstdint>
#include <utility>

#include "dynmo/c10d/device_kinds.h"
#include "dynmo/runtime/regroup.h"
#include "dynmo/train/setup/pipeline_options.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

runtime::PipelineOptions options_of(const ResolvedRun& run, const RunLane& lane,
                                    const cost::Cluster& cluster,
                                    c10d::ChannelTransport* channels) {
  runtime::PipelineOptions options = pipeline_options(run, lane.number, lane.balancing, cluster);
  options.channels = channels;
  options.probed = [&run] { return run.batches().training(0, MicroBatchId(0)); };
  options.asks = lane.asks;
  return options;
}

}  // namespace

GroupRun::GroupRun(transport::Transport& group, const ResolvedRun& run, const RunLane& lane,
                   cost::Cluster cluster, runtime::RankState state)
    : run_(run),
      cluster_(std::move(cluster)),
      channels_(run.options().rank_device.in(group).channels),
      transport_(std::make_unique<transport::CountingTransport>(group)),
      pipeline_(std::make_unique<runtime::Pipeline>(*transport_, run.model().layers,
                                                    options_of(run, lane, cluster_, channels_),
                                                    std::move(state))) {
  checkpointer_ = std::make_unique<Checkpointer>(
      *transport_, transport::control_tag(transport::Control::kCheckpoint), lane.directory,
      run.config(), lane.writer, tensor_names(run.model()), lane.checkpoints_wait,
      run.batches().identity());
}

Expected<runtime::StepReport> GroupRun::step() { return pipeline_->step(run_.training()); }

Expected<double> GroupRun::validate(model::Pass pass) {
  const std::int64_t steps = run_.config().train.validation_steps;
  double sum = 0;
  for (std::int64_t i = 0; i < steps; ++i) {
    DYNMO_ASSIGN(
        const double loss,
        pipeline_->validate(
            [&](std::int64_t, MicroBatchId id) { return run_.batches().validation(i, id); }, pass));
    sum += loss;
  }
  return sum / static_cast<double>(steps);
}

Expected<void> GroupRun::close_channels() {
  return channels_ == nullptr ? Expected<void>() : channels_->close();
}

Expected<void> GroupRun::checkpoint(bool due) {
  DYNMO_TRY(checkpointer_->poll());
  if (due) DYNMO_TRY(checkpointer_->start(*pipeline_));
  return {};
}

void Passage::leave(std::unique_ptr<GroupRun> part) {
  cluster = part->cluster();
  state = part->close();
}

Expected<void> Passage::form(transport::Transport& group, const ResolvedRun& run,
                             const RunLane& lane, cost::Cluster measured, const plan::Plan& plan,
                             std::optional<std::int64_t> step) {
  const transport::Grid grid(group, static_cast<int>(run.config().pipeline.replicas));
  const model::Model& layers = run.model().layers;
  const runtime::Staging staging{.device = run.options().rank_device.device};
  c10d::free_cached_memory(staging.device);
  DYNMO_TRY(step ? runtime::regroup_at(*step, grid, layers, plan, state, staging)
                 : runtime::regroup(grid, layers, plan, state, staging));
  next =
      std::make_unique<GroupRun>(group, run, lane, std::move(measured), std::exchange(state, {}));
  return {};
}

void Passage::take_back() {
  if (next != nullptr) state = std::exchange(next, nullptr)->close();
  if (controller) state.controller = std::exchange(controller, std::nullopt);
}

}  // namespace dynmo::train
