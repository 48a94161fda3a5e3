// SPDX-License-Identifier: Apache-2.0
// What measuring every layer in every step costs, as a share of the step: the clock reads of the
// engine, counted and priced at what one takes here, the making of costs and their noise from the
// window, and the metrics for TensorBoard and Prometheus. Two ranks as threads train the small
// model of docs/performance.md with half the micro-batches; a step with and one without clock reads
// cannot be told apart.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <vector>

#include "bench/random_training.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/model/llama.h"
#include "dynmo/observe/metrics/metrics_log.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/transport/in_process.h"

namespace {

using namespace dynmo;  // NOLINT: a program

constexpr int kRanks = 2;
constexpr int kMicroBatches = 4;
constexpr std::int64_t kRows = 4;
constexpr int kSteps = 50;
constexpr int kWarmUp = 42;  // the window is full after 40

double clock_read_s() {
  using Clock = std::chrono::steady_clock;
  constexpr int kReads = 1'000'000;
  std::int64_t sum = 0;
  const auto start = Clock::now();
  for (int i = 0; i < kReads; ++i) sum += Clock::now().time_since_epoch().count() & 1;
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return sum >= 0 ? seconds / kReads : 0;
}

// Returns the time in which a leader writes the metrics of a step, on average.
Expected<double> metrics_s() {
  const auto folder = std::filesystem::temp_directory_path() / "dynmo-profile-bench";
  observe::MetricsLog log(observe::RunFolder(folder), WorldRank(0),
                          {.tensorboard = true, .prometheus = true});
  constexpr int kRecords = 2000;
  observe::StepRecord record;
  record.step_s = 0.05;
  const auto start = std::chrono::steady_clock::now();
  for (record.step = 0; record.step < kRecords; ++record.step) log.add(record);
  log.flush();
  const double seconds = seconds_since(start);
  std::filesystem::remove_all(folder);
  if (const auto failure = log.take_failure()) {
    return make_error(ErrorCode::kBadInput, "{}", *failure);
  }
  return seconds / kRecords;
}

void print(const char* what, std::vector<double> values, double unit) {
  std::sort(values.begin(), values.end());
  fmt::print("{:<34}{:>10.4f} ({:.4f} to {:.4f})\n", what, unit * values[values.size() / 2],
             unit * values.front(), unit * values.back());
}

}  // namespace

int main() {
  model::LlamaConfig config;
  config.shape.heads = config.shape.kv_heads = 4;
  const model::Model model = model::make_llama(config);
  const int layers = static_cast<int>(model.size());
  const plan::Plan plan =
      plan::make_plan({layers / 2, layers - layers / 2}, schedule::ScheduleKind::k1F1B);
  runtime::PipelineOptions options = bench::training_options(config, kRows, kSteps, kMicroBatches);
  options.policy.minimum_gain = 1e9;  // decides in every step, never moves
  const double read_s = clock_read_s();
  std::vector<double> steps;
  std::vector<double> reads;
  std::vector<double> shares;
  std::vector<double> plan_shares;
  std::mutex mutex;
  const auto done =
      transport::run_ranks(kRanks, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        runtime::Pipeline pipeline(
            transport, model, options,
            {plan, runtime::initial_states(model, plan, Rank(transport.rank().value), 1)});
        for (int i = 0; i < kSteps; ++i) {
          DYNMO_ASSIGN(const auto report, pipeline.step([&](std::int64_t step, MicroBatchId id) {
            return bench::random_batch(config, kRows, 0, step, id);
          }));
          // Two reads around an action, a message, a layer's forward and update; three around its
          // two gradients.
          const auto own = pipeline.states().size();
          const auto count =
              static_cast<double>(2 * report.actions.size() + 2 * report.messages.size() +
                                  own * (5 * kMicroBatches + 2));
          const std::lock_guard lock(mutex);
          if (i < kWarmUp) continue;
          steps.push_back(report.step_s);
          reads.push_back(count);
          shares.push_back((report.profile_s + count * read_s) / report.step_s);
          plan_shares.push_back(report.plan_s / report.step_s);
        }
        return {};
      });
  if (!done) {
    fmt::print(stderr, "profile_bench: {}\n", done.error().message);
    return 1;
  }
  const auto metrics = metrics_s();
  if (!metrics) {
    fmt::print(stderr, "profile_bench: {}\n", metrics.error().message);
    return 1;
  }
  std::vector<double> metric_shares;
  for (const double step : steps) metric_shares.push_back(*metrics / step);
  fmt::print("{} ranks, {} layers, {} micro-batches, {} steps of each rank; median (range)\n",
             kRanks, layers, kMicroBatches, kSteps - kWarmUp);
  print("step, ms", steps, 1e3);
  print("clock reads a step and rank", reads, 1);
  fmt::print("{:<34}{:>10.1f}\n", "one read, ns", 1e9 * read_s);
  print("profiling, % of the step", shares, 100);
  print("deciding, % of the step", plan_shares, 100);
  print("metrics, % of the step", metric_shares, 100);
  return 0;
}
