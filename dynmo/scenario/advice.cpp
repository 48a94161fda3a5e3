// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "dynmo/scenario/grid.h"
#include "dynmo/scenario/job.h"
#include "dynmo/scenario/planning_impl.h"

namespace dynmo::scenario {
namespace {

constexpr std::int64_t kAdvisedSteps = 4;

plan::ModelCosts costs_of(const dynamism::LoadModel& load, std::int64_t steps) {
  plan::ModelCosts costs;
  for (std::int64_t i = 0; i < kAdvisedSteps; ++i) {
    costs.push_back(load.at((2 * i + 1) * steps / (2 * kAdvisedSteps)));
  }
  return costs;
}

// The costs of a shape are made again. The head of other costs is divided evenly.
Expected<plan::ModelCosts> sliced_costs(const Job& job, const plan::ModelCosts& costs,
                                        std::int64_t slices) {
  const Scenario& scenario = job.scenario;
  if (scenario.model.profile.empty() && scenario.dynamism.trace.empty()) {
    Scenario other = scenario;
    other.model.shape.head_slices = slices;
    DYNMO_ASSIGN(const Job sliced, make_job(other));
    return costs_of(*sliced.load, scenario.training.steps);
  }
  plan::ModelCosts sliced;
  for (const cost::ModelCost& model : costs) {
    DYNMO_ASSIGN(cost::ModelCost one, plan::with_head_slices(model, slices));
    sliced.push_back(std::move(one));
  }
  return sliced;
}

// Makes the changes of a scenario's keys that plan/question/advice.h replays.
class Changes {
 public:
  Changes(const Job& job, const plan::ModelCosts& costs, const cost::Cluster& planned)
      : job_(job), costs_(costs), planned_(planned) {}

  [[nodiscard]] std::vector<plan::AdviceChange> against(plan::StepLimit limit) {
    using Key = plan::AdviceKey;
    if (limit == plan::StepLimit::kSlowRank) {
      Scenario::Cluster other = job_.scenario.cluster;
      other.slow_speed = 1;
      if (!other.slow_ranks.empty()) add_cluster(Key::kSpeed, "1", other);
    } else if (limit == plan::StepLimit::kMessages) {
      add_larger_micro_batches();
      const cost::Link& inside = planned_.inside_node;
      const cost::Link& between = planned_.between_nodes;
      add_latency(Key::kInsideLatency, &Scenario::Cluster::inside_latency_s, inside.latency_s);
      add_latency(Key::kBetweenLatency, &Scenario::Cluster::between_latency_s, between.latency_s);
      add_bandwidth(Key::kInsideBandwidth, &Scenario::Cluster::inside_bandwidth,
                    inside.bandwidth_bytes_per_s);
      add_bandwidth(Key::kBetweenBandwidth, &Scenario::Cluster::between_bandwidth,
                    between.bandwidth_bytes_per_s);
      add_bandwidth(Key::kNicBandwidth, &Scenario::Cluster::nic_bandwidth,
                    job_.scenario.cluster.nic_bandwidth);
    }
    return std::move(found_);
  }

 private:
  using Number = double Scenario::Cluster::*;

  void add_cluster(plan::AdviceKey key, std::string value, const Scenario::Cluster& other) {
    auto grid = make_grid(other, job_.device, other.data_parallel);
    if (!grid) return;
    found_.push_back({.set = {key, std::move(value)},
                      .models = costs_,
                      .cluster = std::move(grid->planned),
                      .micro_batches = job_.scenario.training.micro_batches});
  }
  // Adds half of a latency, or twice a bandwidth, as exactly as the text of the value has it.
  void add_latency(plan::AdviceKey key, Number number, double now_s) {
    std::string value = fmt::format("{:.3g}us", now_s / 2 * 1e6);
    Scenario::Cluster other = job_.scenario.cluster;
    const auto parsed = parse_seconds(value);
    if (!parsed || *parsed <= 0) return;
    other.*number = *parsed;
    add_cluster(key, std::move(value), other);
  }
  void add_bandwidth(plan::AdviceKey key, Number number, double now) {
    if (!std::isfinite(now) || now <= 0) return;
    std::string value = fmt::format("{:.3g}GB/s", 2 * now * 1e-9);
    Scenario::Cluster other = job_.scenario.cluster;
    const auto parsed = parse_bytes_per_second(value);
    if (!parsed || *parsed <= 0) return;
    other.*number = *parsed;
    add_cluster(key, std::move(value), other);
  }
  // Adds fewer, larger micro-batches with the same tokens. Measured layers cannot change their
  // size.
  void add_larger_micro_batches() {
    Scenario other = job_.scenario;
    const bool shaped = other.model.profile.empty() && other.dynamism.trace.empty();
    if (!shaped || other.training.micro_batches % 2 != 0) return;
    other.model.micro_batch_size *= 2;
    other.training.micro_batches /= 2;
    const auto job = make_job(other);
    if (!job) return;
    const int micro_batches = other.training.micro_batches;
    plan::AdviceChange& change = found_.emplace_back();
    change.set = {plan::AdviceKey::kMicroBatchSize, std::to_string(other.model.micro_batch_size)};
    change.with = plan::KeyValue{plan::AdviceKey::kMicroBatches, std::to_string(micro_batches)};
    change.models = costs_of(*job->load, other.training.steps);
    change.cluster = planned_;
    change.micro_batches = micro_batches;
  }

  const Job& job_;
  const plan::ModelCosts& costs_;
  const cost::Cluster& planned_;
  std::vector<plan::AdviceChange> found_ = {};
};

}  // namespace

std::optional<plan::Advice> advise(const Job& job) {
  const Scenario& scenario = job.scenario;
  const auto kind = schedule::parse_schedule_kind(scenario.training.schedule);
  const auto grid = make_grid(scenario.cluster, job.device, scenario.cluster.data_parallel);
  if (!kind || !grid) return std::nullopt;
  const plan::ModelCosts costs = costs_of(*job.load, scenario.training.steps);
  auto advice =
      plan::advise({.models = costs,
                    .cluster = grid->planned,
                    .micro_batches = scenario.training.micro_batches,
                    .schedule = *kind,
                    .recompute = recompute_of(scenario),
                    .head_slices = scenario.model.shape.head_slices,
                    .sliced = [&](std::int64_t slices) { return sliced_costs(job, costs, slices); },
                    .changes =
                        [&](plan::StepLimit limit) {
                          return Changes(job, costs, grid->planned).against(limit);
                        }});
  if (advice && !scenario.events.empty()) {
    advice->fewest.reset();
    const bool fewer = advice->remedy && advice->remedy->key == plan::AdviceKey::kRanks;
    if (fewer) advice->remedy.reset();
  }
  return advice;
}

}  // namespace dynmo::scenario
