// SPDX-License-Identifier: Apache-2.0
// What products with compressed matrices take relative to dense ones, predicted beside measured: by
// the fit that a training makes (kernels/sparse_break_even.h) and by density / 0.4. Matrices have 5
// to 50 % of their weights, spread evenly, in rows of very unequal length (CV 1) and in blocks.
// Measured are medians of the ratios of each round, with their range. Then the steps of trainings
// on one rank that prune: from those before an event, and from what is left behind it, either rule
// predicts the ones behind it as the controller does.
//
//   product_times_bench [ROUNDS] [THREADS] [TRAININGS]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "bench/random_training.h"
#include "dynmo/control/profiler.h"
#include "dynmo/core/rng.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/kernels/sparse_break_even.h"
#include "dynmo/kernels/sparse_products.h"
#include "dynmo/model/llama.h"
#include "dynmo/runtime/known_costs.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/transport/in_process.h"

namespace {

using namespace dynmo;                      // NOLINT: a program
namespace sparse = dynmo::kernels::sparse;  // NOLINT

constexpr double kDensities[] = {0.05, 0.1, 0.2, 0.3, 0.4, 0.5};

double median(std::vector<double> all) {
  std::ranges::sort(all);
  return all[all.size() / 2];
}

// Densities of rows with that mean and a CV of 1: lognormal, and no row has more than all its
// weights, so that the mean and the spread are found by bisection.
std::vector<double> uneven_rows(std::int64_t rows, double density, Rng& rng) {
  std::vector<double> normal(static_cast<std::size_t>(rows));
  for (double& x : normal) x = rng.normal();
  std::vector<double> found(normal.size());
  const auto mean_at = [&](double level, double std) {
    double sum = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      found[i] = std::min(1.0, std::exp(level + std * normal[i]));
      sum += found[i];
    }
    return sum / static_cast<double>(rows);
  };
  double low = 0;
  double high = 20;
  for (int i = 0; i < 60; ++i) {
    const double std = (low + high) / 2;
    double below = -100;
    double above = 100;
    for (int k = 0; k < 80; ++k) {
      const double level = (below + above) / 2;
      (mean_at(level, std) < density ? below : above) = level;
    }
    mean_at(below, std);
    double squares = 0;
    for (const double row : found) squares += (row / density - 1) * (row / density - 1);
    (squares < static_cast<double>(rows) ? low : high) = std;
  }
  return found;
}

enum class Spread { kEven, kUneven, kBlocks };
constexpr const char* kNames[] = {"even", "uneven rows", "in blocks"};

at::Tensor mask_of(std::int64_t rows, std::int64_t columns, double density, Spread spread,
                   Rng& rng) {
  constexpr std::int64_t kEdge = 32;  // of a block
  constexpr double kInside = 0.75;    // density of a block that has weights
  std::vector<double> of_row(static_cast<std::size_t>(rows), density);
  if (spread == Spread::kUneven) of_row = uneven_rows(rows, density, rng);
  at::Tensor blocks = at::zeros({(rows + kEdge - 1) / kEdge, (columns + kEdge - 1) / kEdge});
  for (std::int64_t i = 0; i < blocks.numel(); ++i) {
    blocks.data_ptr<float>()[i] = rng.uniform() < density / kInside ? 1 : 0;
  }
  at::Tensor mask = at::zeros({rows, columns}, at::kBool);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      const float block = blocks.data_ptr<float>()[i / kEdge * blocks.size(1) + j / kEdge];
      const double keep =
          spread == Spread::kBlocks ? kInside * block : of_row[static_cast<std::size_t>(i)];
      mask.data_ptr<bool>()[i * columns + j] = rng.uniform() < keep;
    }
  }
  return mask;
}

// A matrix with its activations.
struct Matrix {
  Matrix(kernels::MatrixSize size, std::int64_t tokens, double density, Spread spread) {
    Rng rng(
        mix_key({static_cast<std::uint64_t>(size.rows), static_cast<std::uint64_t>(1000 * density),
                 static_cast<std::uint64_t>(spread)}));
    mask = mask_of(size.rows, size.columns, density, spread, rng);
    weight = at::full({size.rows, size.columns}, 0.01) * mask;
    pattern = sparse::make_pattern(mask);
    values = weight.masked_select(mask);
    gradient = at::zeros_like(values);
    whole = at::zeros_like(weight);
    x = at::full({tokens, size.columns}, 0.01);
    dy = at::full({tokens, size.rows}, 0.01);
  }

  void dense() {
    at::linear(x, weight);
    at::mm(dy, weight);
    whole.addmm_(dy.t(), x);
  }
  void compressed() {
    static_cast<void>(sparse::times(*pattern, values, x));
    static_cast<void>(sparse::times_transposed(*pattern, values, dy));
    sparse::add_product(*pattern, gradient, dy, x);
  }
  [[nodiscard]] bool right() {
    gradient.zero_();
    sparse::add_product(*pattern, gradient, dy, x);
    const auto same = [](const at::Tensor& a, const at::Tensor& b) {
      return at::allclose(a, b, 1e-4, 1e-5);
    };
    return same(sparse::times(*pattern, values, x), at::linear(x, weight)) &&
           same(sparse::times_transposed(*pattern, values, dy), at::mm(dy, weight)) &&
           same(gradient, at::mm(dy.t(), x).masked_select(mask));
  }

  at::Tensor mask;
  at::Tensor weight;
  std::shared_ptr<const sparse::Pattern> pattern;
  at::Tensor values;
  at::Tensor gradient;
  at::Tensor whole;
  at::Tensor x;
  at::Tensor dy;
};

struct Errors {
  std::vector<double> fit;
  std::vector<double> density;
};

void print(const char* title, const Errors& errors) {
  fmt::print(
      "{}: median error {:.1f} %, largest {:.1f} %; of min(1, density / 0.4): {:.1f} %, {:.1f} %\n",
      title, 100 * median(errors.fit), 100 * *std::ranges::max_element(errors.fit),
      100 * median(errors.density), 100 * *std::ranges::max_element(errors.density));
}

// A model with matrices of these sizes; false where a product is wrong.
bool compare(const std::vector<kernels::MatrixSize>& sizes, std::int64_t tokens, int rounds,
             Errors& all) {
  const cost::ProductFit fit = kernels::product_fit(kernels::measure_products(sizes, tokens));
  fmt::print("\nproduct_fixed = {:.4f}, product_weights = {:.4f}, product_segments = {:.4f}\n",
             fit.fixed, fit.weights, fit.segments);
  Errors here;
  for (const kernels::MatrixSize& size : sizes) {
    for (const Spread spread : {Spread::kEven, Spread::kUneven, Spread::kBlocks}) {
      for (const double density : kDensities) {
        Matrix m(size, tokens, density, spread);
        if (!m.right()) return false;
        std::vector<double> ratios;
        for (int round = 0; round <= rounds; ++round) {
          const double dense_s = kernels::by_the_clock([&] { m.dense(); });
          const double ours_s = kernels::by_the_clock([&] { m.compressed(); });
          if (round > 0) ratios.push_back(ours_s / dense_s);
        }
        const double measured = median(ratios);
        const cost::Occupancy left =
            cost::occupancy(m.pattern->kept(), m.pattern->segments(), size.rows, size.columns);
        const double by_fit = fit.time(left);
        const double by_density = std::min(1.0, left.weights / 0.4);
        here.fit.push_back(std::abs(by_fit / measured - 1));
        here.density.push_back(std::abs(by_density / measured - 1));
        fmt::print(
            "{:>5} x {:<5}{:<12}{:>5.1f} %{:>6.1f} %{:>8.3f} ({:.3f} to {:.3f}){:>8.3f}"
            "{:>+7.1f} %{:>8.3f}{:>+7.1f} %\n",
            size.rows, size.columns, kNames[static_cast<int>(spread)], 100 * left.weights,
            100 * left.segments, measured, *std::ranges::min_element(ratios),
            *std::ranges::max_element(ratios), by_fit, 100 * (by_fit / measured - 1), by_density,
            100 * (by_density / measured - 1));
      }
    }
  }
  print("these sizes", here);
  all.fit.insert(all.fit.end(), here.fit.begin(), here.fit.end());
  all.density.insert(all.density.end(), here.density.begin(), here.density.end());
  return true;
}

// A third of the blocks of examples/train/pruning.toml, and its events closer together.
constexpr std::int64_t kSteps = 33;
constexpr std::int64_t kAfter = 4;  // steps before and behind an event that are measured
constexpr int kMicroBatches = 2;
constexpr std::int64_t kRows = 8;

dynamism::PruningOptions events() {
  dynamism::PruningOptions options;
  options.start = 4;
  options.end = 28;
  options.every = 8;
  return options;
}

// A controller of either rule predicts the same steps.
struct Rule {
  const char* name;
  std::optional<cost::ProductFit> fit;  // none: as measured
  std::optional<control::Profiler> profiler = {};
  double change = 1;  // of the step's work, by the newest event
};

double work_s(const control::Profiler& profiler) {
  const std::vector<double> layers =
      cost::layer_work_s(*profiler.costs(/*frozen_layers=*/0), kMicroBatches);
  return std::accumulate(layers.begin(), layers.end(), 0.0);
}

// Adds the errors of the steps predicted behind the events that compress.
Expected<void> train(transport::Transport& transport, std::uint64_t seed, Errors& errors) {
  model::LlamaConfig config;
  config.shape.hidden = 128;
  config.shape.blocks = 4;
  config.shape.heads = 4;
  config.shape.kv_heads = 2;
  config.shape.intermediate = 2048;
  config.shape.sequence = 64;
  config.shape.vocabulary = 256;
  const model::Model layers = model::make_llama(config);
  const plan::Plan plan =
      plan::make_plan({static_cast<int>(layers.size())}, schedule::ScheduleKind::k1F1B);
  runtime::PipelineOptions options = bench::training_options(config, kRows, kSteps, kMicroBatches);
  options.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_pruning_source(events()));
    return sources;
  };
  runtime::Pipeline pipeline(
      transport, layers, options,
      runtime::RankState{.plan = plan,
                         .layers = runtime::initial_states(layers, plan, Rank(0), seed)});
  std::array rules = {
      Rule{"fit", std::nullopt},
      Rule{"d / 0.4", cost::ProductFit{.fixed = 0, .weights = 1 / 0.4, .segments = 0}}};
  for (Rule& rule : rules) {
    rule.profiler.emplace(runtime::known_costs(layers, options), options.profile_window);
  }
  const dynamism::PruningOptions pruning = events();
  std::vector<double> seconds;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    Expected<void> done;
    seconds.push_back(kernels::by_the_clock([&] {
      const auto report = pipeline.step([&](std::int64_t at, MicroBatchId id) {
        return bench::random_batch(config, kRows, seed, at, id);
      });
      if (!report) done = report.error();
    }));
    DYNMO_TRY(done);
    const bool event =
        step > pruning.start && step <= pruning.end && (step - pruning.start) % pruning.every == 0;
    for (Rule& rule : rules) {
      if (event) {
        const double before = work_s(*rule.profiler);
        const cost::ProductFit measured = pipeline.state().product_fit.value_or(cost::ProductFit());
        rule.profiler->know(runtime::known_costs(layers, options, pipeline.state().pruned,
                                                 rule.fit.value_or(measured)));
        rule.change = work_s(*rule.profiler) / before;
      }
      rule.profiler->add(pipeline.observed().layers, std::vector<Rank>(layers.size(), Rank(0)));
    }
    const std::int64_t last = step - kAfter;  // perhaps an event, of which enough is known
    if (last <= pruning.start || last > pruning.end ||
        (last - pruning.start) % pruning.every != 0) {
      continue;
    }
    const double before = median({seconds.end() - 2 * kAfter - 1, seconds.end() - kAfter - 1});
    const std::vector<double> behind(seconds.end() - kAfter, seconds.end());
    fmt::print(
        "training {}, event in step {:>2}: {:.3f} s before, {:.3f} ({:.3f} to {:.3f}) behind", seed,
        last, before, median(behind), *std::ranges::min_element(behind),
        *std::ranges::max_element(behind));
    for (const Rule& rule : rules) {
      const double error = before * rule.change / median(behind) - 1;
      if (rule.change != 1) {  // a matrix was compressed
        (&rule == rules.data() ? errors.fit : errors.density).push_back(std::abs(error));
      }
      fmt::print(";  {}: {:.3f}, {:+.1f} %", rule.name, before * rule.change, 100 * error);
    }
    fmt::print("\n");
  }
  return {};
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::max(2, std::atoi(arguments[1])) : 20;
  const int threads = count > 2 ? std::max(1, std::atoi(arguments[2])) : 1;
  at::set_num_threads(threads);
  const at::NoGradGuard no_graph;
  fmt::print("512 tokens, fp32, {} threads, {} rounds; median (range)\n", threads, rounds);
  fmt::print("{:<13}{:<12}{:>7}{:>8}{:>26}{:>8}{:>9}{:>8}{:>9}\n", "matrix", "weights", "left",
             "segm.", "measured / dense", "fit", "error", "d / 0.4", "error");
  Errors all;
  // One of bench/sparse_bench; a block of examples/train/pruning.toml; one of a small Llama.
  const std::vector<std::vector<kernels::MatrixSize>> models = {
      {{.rows = 1024, .columns = 1024}},
      {{.rows = 128, .columns = 128, .matrices = 2},
       {.rows = 2048, .columns = 128, .matrices = 2},
       {.rows = 128, .columns = 2048}},
      {{.rows = 512, .columns = 512, .matrices = 4},
       {.rows = 1376, .columns = 512, .matrices = 2},
       {.rows = 512, .columns = 1376}}};
  for (const auto& sizes : models) {
    if (compare(sizes, 512, rounds, all)) continue;
    fmt::print(stderr, "product_times_bench: products differ\n");
    return 1;
  }
  print("\nall", all);

  const int trainings = count > 3 ? std::atoi(arguments[3]) : 3;
  fmt::print("\n");
  Errors steps;
  for (int seed = 1; seed <= trainings; ++seed) {
    const auto done = transport::run_ranks(1, [&](transport::Transport& transport) {
      at::set_num_threads(threads);
      return train(transport, static_cast<std::uint64_t>(seed), steps);
    });
    if (done) continue;
    fmt::print(stderr, "product_times_bench: {}\n", done.error().message);
    return 1;
  }
  if (trainings > 0) print("steps behind events", steps);
  return 0;
}
