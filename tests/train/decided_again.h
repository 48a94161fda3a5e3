// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs small trainings with ranks as threads that write load traces. Compares their decisions with
// those of the simulator, which decides again from the trace.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <regex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/dynamism/load_log.h"
#include "dynmo/observe/load_trace_writer.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/scenario/run.h"
#include "dynmo/train/traces.h"
#include "dynmo/transport/in_process.h"

namespace dynmo::train::testing {

using runtime::Pipeline;
using runtime::PipelineOptions;

// The parts of a decision that must be equal: step, whether layers move, plan, recomputed layers,
// cause and reason.
using Decided =
    std::tuple<std::int64_t, bool, plan::Plan, plan::LayerSet, std::string, std::string>;

// A simulation numbers the ranks of one replica, a run those of all.
inline Decided decided(std::int64_t step, const control::Decision& decision) {
  static const std::regex kNames("layers on ranks? [0-9, ]+ take");
  return {step,
          decision.migrate,
          decision.plan,
          decision.recomputed,
          std::regex_replace(decision.why, kNames, "layers on a rank take"),
          decision.reason};
}

// Runs one policy over the load with its recording, as `dynmo simulate` does.
inline std::vector<Decided> simulated(std::unique_ptr<dynamism::LoadModel> load, int ranks,
                                      const PipelineOptions& options,
                                      const std::vector<scenario::Event>& events) {
  EXPECT_NE(load->recording(), nullptr);
  scenario::Job job;
  job.scenario.cluster.pipeline_ranks = ranks;
  job.scenario.cluster.data_parallel = options.replicas;
  job.scenario.training.steps = options.steps;
  job.scenario.training.micro_batches = options.micro_batches;
  if (options.memory < cost::kUnlimitedMemory) job.scenario.cluster.memory = options.memory;
  if (options.recompute == plan::Recompute::kAuto) job.scenario.training.recompute = "auto";
  job.scenario.policy.minimum_gain = options.policy.minimum_gain;
  job.scenario.policy.noise_factor = options.policy.noise_factor;
  job.scenario.policy.window = options.profile_window;
  job.scenario.policy.pack_slack = options.policy.pack_slack;
  job.scenario.policy.release_after = options.release_after;
  job.scenario.policy.ranks_min = options.min_ranks;
  job.scenario.events = events;
  job.device = cost::find_device("h100").value();
  job.load = std::move(load);
  const bool packs = options.policy.rank_use == control::RankUse::kFewest;
  const auto policy = scenario::parse_policy(packs ? "optimal+pack" : "optimal").value();
  const auto run = scenario::run(job, *job.load, policy);
  EXPECT_TRUE(run) << run.error().message;
  std::vector<Decided> result;
  if (!run) return result;
  for (const scenario::DecisionAt& at : run->decisions) {
    result.push_back(decided(at.step, at.decision));
  }
  return result;
}

struct Told {
  Expected<void> status;
  std::vector<Decided> decisions;
};

// Called on every rank's thread.
struct OnRank {
  // Returns the plan to train under, given one that has measured the layers.
  std::function<Expected<plan::Plan>(const Pipeline& measuring)> first_plan =
      [](const Pipeline& measuring) { return measuring.plan(); };
  std::function<Expected<runtime::StepReport>(Pipeline&, const Pipeline::Batches&)> step =
      [](Pipeline& pipeline, const Pipeline::Batches& batches) { return pipeline.step(batches); };
};

// Trains `layers` on one rank for each part of the cut, and writes the load trace to `trace`. One
// pipeline measures under the cut and another one trains, as behind train::first_plan().
inline Told train(const model::Model& layers, const PipelineOptions& options,
                  const std::vector<int>& cut, const Pipeline::Batches& batches,
                  const std::filesystem::path& trace, const OnRank& on_rank = {}) {
  Told told;
  const plan::Plan even = plan::make_plan(cut, schedule::ScheduleKind::k1F1B);
  told.status =
      transport::run_ranks(even.ranks, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        const Rank rank(transport.rank().value);
        const auto states = [&](const plan::Plan& plan) {
          return runtime::RankState{plan,
                                    runtime::initial_states(layers, plan, rank, options.seed)};
        };
        PipelineOptions whole = options;
        whole.recompute = plan::Recompute::kNone;
        Pipeline measuring(transport, layers, whole, states(even));
        DYNMO_TRY(measuring.measure(batches, 4));
        DYNMO_ASSIGN(const plan::Plan plan, on_rank.first_plan(measuring));
        Pipeline pipeline(transport, layers, options, states(plan));
        DYNMO_TRY(pipeline.use(measuring.profiler()));
        DYNMO_ASSIGN(const auto writer, observe::LoadTraceWriter::open(trace, 1));
        const bool first = rank == Rank(0);
        if (first) {
          writer->start({.plan = plan,
                         .measured_under = even,
                         .measured = pipeline.profiler().observations()});
        }
        for (std::int64_t step = 0; step < options.steps; ++step) {
          DYNMO_ASSIGN(const runtime::StepReport report, on_rank.step(pipeline, batches));
          if (!first) continue;
          if (report.decision) told.decisions.push_back(decided(step, *report.decision));
          writer->add(load_trace_step(report, pipeline));
        }
        return first ? writer->close() : Expected<void>();
      });
  return told;
}

inline void expect_the_same(const Told& told, const std::filesystem::path& trace, int ranks,
                            const PipelineOptions& options,
                            const std::vector<scenario::Event>& events = {}) {
  ASSERT_TRUE(told.status) << told.status.error().message;
  auto load = dynamism::read_trace(trace);
  ASSERT_TRUE(load) << load.error().message;
  const std::vector<Decided> again = simulated(std::move(*load), ranks, options, events);
  ASSERT_EQ(again.size(), told.decisions.size());
  for (std::size_t i = 0; i < again.size(); ++i) {
    EXPECT_EQ(again[i], told.decisions[i])
        << "step " << std::get<0>(told.decisions[i]) << ": " << std::get<5>(told.decisions[i])
        << "\nagain step " << std::get<0>(again[i]) << ": " << std::get<5>(again[i]);
  }
}

}  // namespace dynmo::train::testing
