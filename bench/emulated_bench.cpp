// SPDX-License-Identifier: Apache-2.0
// The real engine against the simulator: 8 emulated ranks (threads that sleep for their layers'
// costs and pass on real messages) run each schedule; the measured step beside the predicted one.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/model/emulated/layer.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/transport/in_process.h"

namespace {

using namespace dynmo;  // NOLINT: a program

constexpr int kRanks = 8;
constexpr int kMicroBatches = 16;
constexpr int kLayers = 32;
constexpr int kSteps = 5;

// Unequal layers of 5 to 10 ms a pass.
cost::ModelCost costs() {
  Rng rng(7);
  cost::ModelCost model;
  for (int i = 0; i < kLayers; ++i) {
    cost::LayerCost layer;
    layer.name = fmt::format("layer{}", i);
    layer.forward_s = 0.005 * (1 + rng.uniform());
    layer.backward_input_s = layer.forward_s;
    layer.backward_weight_s = 0.005;
    layer.parameter_bytes = Bytes{1 << 16};
    layer.boundary_bytes = Bytes{1 << 20};
    model.layers.push_back(layer);
  }
  return model;
}

plan::Plan plan_of(schedule::ScheduleKind kind) {
  using schedule::ScheduleKind;
  const int stages = kind == ScheduleKind::kInterleaved || kind == ScheduleKind::kZbV ? 2 : 1;
  const std::vector<int> counts(static_cast<std::size_t>(kRanks * stages),
                                kLayers / (kRanks * stages));
  return plan::make_plan(counts,
                         kind == ScheduleKind::kZbV ? schedule::wave_placement(kRanks, stages)
                                                    : schedule::loop_placement(kRanks, stages),
                         kRanks, kind);
}

// Seconds of each step but the first, on the last clock to stop.
std::vector<double> measure(const plan::Plan& plan, const model::Model& model,
                            const cost::ModelCost& model_costs) {
  runtime::PipelineOptions options;
  options.steps = kSteps + 1;
  options.micro_batches = kMicroBatches;
  options.boundary_shape = model::emulated_boundary(model_costs);
  options.learning_rate.total_steps = options.steps;
  options.balancing = runtime::Balancing::kNever;
  std::vector<double> longest(kSteps + 1, 0.0);
  std::mutex mutex;
  const auto done =
      transport::run_ranks(kRanks, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        runtime::Pipeline pipeline(
            transport, model, options,
            {plan, runtime::initial_states(model, plan, Rank(transport.rank().value), 1)});
        for (std::size_t i = 0; i < longest.size(); ++i) {
          DYNMO_ASSIGN(
              const auto report,
              pipeline.step([](std::int64_t, MicroBatchId) -> runtime::MicroBatch { return {}; }));
          const std::lock_guard lock(mutex);
          longest[i] = std::max(longest[i], report.step_s);
        }
        return {};
      });
  if (!done) {
    fmt::print(stderr, "{}\n", done.error().message);
    std::exit(1);
  }
  longest.erase(longest.begin());
  std::sort(longest.begin(), longest.end());
  return longest;
}

}  // namespace

int main() {
  const cost::ModelCost model_costs = costs();
  const model::Model model =
      model::make_emulated({.costs = [&](std::int64_t) { return model_costs; }}).value();
  const cost::Cluster cluster = cost::equal_ranks(kRanks);
  fmt::print("emulated: {} ranks, {} layers, {} micro-batches, median of {} steps\n", kRanks,
             kLayers, kMicroBatches, kSteps);
  fmt::print("{:12} {:>10} {:>10} {:>8} {:>18}\n", "schedule", "predicted", "measured", "error",
             "fastest, slowest");
  for (const auto kind : {schedule::ScheduleKind::kGpipe, schedule::ScheduleKind::k1F1B,
                          schedule::ScheduleKind::kInterleaved, schedule::ScheduleKind::kZbH1,
                          schedule::ScheduleKind::kZbV}) {
    const plan::Plan plan = plan_of(kind);
    const double predicted =
        plan::evaluate(plan, {model_costs, cluster, kMicroBatches}).value().step_time_s;
    const std::vector<double> times = measure(plan, model, model_costs);
    const double median = times[times.size() / 2];
    fmt::print("{:12} {:8.1f} ms {:7.1f} ms {:+7.2f} % {:8.1f} {:8.1f}\n", schedule::name(kind),
               predicted * 1e3, median * 1e3, (median / predicted - 1) * 100, times.front() * 1e3,
               times.back() * 1e3);
  }
  return 0;
}
