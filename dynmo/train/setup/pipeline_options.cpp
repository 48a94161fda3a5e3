// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/pipeline_options.h"

#include <algorithm>
#include <cstdint>

#include "dynmo/cost/cluster.h"
#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/model/precision.h"
#include "dynmo/plan/balance.h"

namespace dynmo::train {

Bytes rank_memory(const config::Config& config) {
  return config.pipeline.memory > Bytes{0} ? config.pipeline.memory : cost::kUnlimitedMemory;
}

plan::RankOrder rank_order(const config::Config& config) {
  return config.pipeline.place == "hosts" ? plan::RankOrder::kBestOfNodes : plan::RankOrder::kKeep;
}

runtime::PipelineOptions pipeline_options(const ResolvedRun& run, int lane,
                                          runtime::Balancing balancing,
                                          const cost::Cluster& cluster) {
  const config::Config& c = run.config();
  runtime::PipelineOptions options;
  options.seed = static_cast<std::uint64_t>(c.train.seed);
  options.steps = c.train.steps;
  options.micro_batches = static_cast<int>(c.batch.micro_batches);
  options.accumulation = static_cast<int>(c.batch.accumulation);
  options.replicas = static_cast<int>(c.pipeline.replicas);
  options.boundary_shape = run.model().boundary_shape;
  options.boundary_type = model::scalar_type(cost::parse_precision(c.model.precision).value());
  options.row_room = c.sources.get<dynamism::EarlyExitOptions>().row_room;
  options.ties = run.model().ties;
  options.optimizer.beta1 = c.optimizer.beta1;
  options.optimizer.beta2 = c.optimizer.beta2;
  options.optimizer.epsilon = c.optimizer.epsilon;
  options.optimizer.weight_decay = c.optimizer.weight_decay;
  options.learning_rate.peak = c.optimizer.learning_rate;
  options.learning_rate.minimum = c.optimizer.minimum_learning_rate;
  options.learning_rate.warmup_steps = c.optimizer.warmup_steps;
  options.learning_rate.total_steps = c.train.steps;
  options.learning_rate.decay = config::parse_decay(c.optimizer.decay).value();
  options.learning_rate.decay_share = c.optimizer.decay_share;
  options.clip_norm = c.optimizer.clip_norm;
  options.on_nan = c.train.on_nan == "skip" ? runtime::OnNan::kSkip : runtime::OnNan::kStop;
  options.make_sources = sources_of(run.options(), run.model());
  options.imported = !c.train.init.empty();
  options.balancing = balancing;
  options.policy.balancer = plan::parse_balancer(c.balance.balancer).value();
  options.policy.minimum_gain = c.balance.minimum_gain;
  options.policy.noise_factor = c.balance.noise_factor;
  if (c.elastic.pack == "auto") {
    options.policy.rank_use = control::RankUse::kFewest;
    options.policy.pack_slack = c.elastic.pack_slack;
  }
  // A search finds the schedule, too.
  if (options.policy.balancer == plan::Balancer::kSearch || c.pipeline.schedule == "auto") {
    options.policy.propose.schedules = plan::ScheduleChoice::kBest;
  }
  options.policy.propose.rank_order = rank_order(c);
  options.cluster = cluster;
  options.recompute = plan::parse_recompute(c.pipeline.recompute).value();
  options.memory = rank_memory(c);
  options.profile_window = static_cast<int>(c.balance.window);
  options.release_after = c.elastic.release_after;
  options.min_ranks = static_cast<int>(c.elastic.ranks_min);
  options.lane = lane;
  if (!c.emulated.slow_ranks.empty()) {
    options.emulated_speed = [slow = c.emulated](std::int64_t step, Rank position) {
      const bool now = step >= slow.slow_from && (slow.slow_until == 0 || step < slow.slow_until);
      const bool here = std::ranges::find(slow.slow_ranks, position.value) != slow.slow_ranks.end();
      return now && here ? slow.slow_speed : 1;
    };
  }
  options.staging.device = run.options().rank_device.device;
  options.staging.beside = run.options().rank_device.copies;
  return options;
}

}  // namespace dynmo::train
