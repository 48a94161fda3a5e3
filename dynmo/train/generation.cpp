// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/generation.h"

#include <cstdint>
#include <utility>

#include "dynmo/train/setup/pipeline_options.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

runtime::PipelineOptions options_of(const config::Config& config, const Inputs& inputs,
                                    const RunLane& lane, const cost::Cluster& cluster) {
  runtime::PipelineOptions options =
      pipeline_options(config, inputs.model, lane.number, lane.balancing, cluster);
  options.probed = [&inputs] { return inputs.batches.training(0, MicroBatchId(0)); };
  options.asks = lane.asks;
  return options;
}

}  // namespace

GroupRun::GroupRun(transport::Transport& group, const config::Config& config, const Inputs& inputs,
                   const RunLane& lane, cost::Cluster cluster, runtime::RankState state)
    : config_(config),
      inputs_(inputs),
      cluster_(std::move(cluster)),
      transport_(std::make_unique<transport::CountingTransport>(group)),
      pipeline_(std::make_unique<runtime::Pipeline>(*transport_, inputs.model.layers,
                                                    options_of(config, inputs, lane, cluster_),
                                                    std::move(state))) {
  checkpointer_ = std::make_unique<Checkpointer>(
      *transport_, transport::control_tag(transport::Control::kCheckpoint), lane.directory, config,
      lane.writer, inputs.tensor_name, lane.checkpoints_wait, inputs.batches.identity());
}

Expected<runtime::StepReport> GroupRun::step() { return pipeline_->step(inputs_.training()); }

Expected<double> GroupRun::validate(model::Pass pass) {
  double sum = 0;
  for (std::int64_t i = 0; i < config_.train.validation_steps; ++i) {
    DYNMO_ASSIGN(const double loss, pipeline_->validate(
                                        [&](std::int64_t, MicroBatchId id) {
                                          return inputs_.batches.validation(i, id);
                                        },
                                        pass));
    sum += loss;
  }
  return sum / static_cast<double>(config_.train.validation_steps);
}

Expected<void> GroupRun::checkpoint(bool due) {
  DYNMO_TRY(checkpointer_->poll());
  if (due) DYNMO_TRY(checkpointer_->start(*pipeline_));
  return {};
}

}  // namespace dynmo::train
