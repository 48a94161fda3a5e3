// SPDX-License-Identifier: Apache-2.0
// Routing to experts on the strict device: the choices are those of the CPU, with ties, drops and
// NaN, and so are sums and gradients.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/expert_rows_impl.h"
#include "dynmo/model/llama.h"
#include "dynmo/model/moe_router.h"
#include "tests/runtime/pipeline_fixture.h"
#include "tests/strict/like_cpu.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::model {
namespace {

using at::Tensor;

constexpr std::array kRouters = {MoeRouter::kTopK, MoeRouter::kBias, MoeRouter::kSinkhorn,
                                 MoeRouter::kBalanced, MoeRouter::kExpertChoice};

Tensor drawn(Rng& rng, at::IntArrayRef shape, at::ScalarType type) {
  Tensor values = at::empty(shape, at::kDouble);
  auto* to = values.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < values.numel(); ++i) to[i] = rng.normal();
  return values.to(type);
}

// Rows of each expert, as products give them.
std::vector<Tensor> rows_of(const Routing& routing, const Tensor& all_AD) {
  std::vector<Tensor> rows;
  for (std::size_t e = 0; e + 1 < routing.offsets.size(); ++e) {
    const std::int64_t count = routing.offsets[e + 1] - routing.offsets[e];
    rows.push_back(count == 0 ? Tensor() : all_AD.narrow(0, routing.offsets[e], count).clone());
  }
  return rows;
}

void expect_near(const Tensor& device, const Tensor& cpu, const char* what) {
  const Tensor there = device.to(at::kCPU).to(cpu.scalar_type());
  EXPECT_TRUE(at::allclose(there, cpu, 1e-5, 1e-6, /*equal_nan=*/true))
      << what << ": " << at::max(at::abs(there - cpu));
}
void expect_equal(const Tensor& device, const Tensor& cpu, const char* what) {
  EXPECT_TRUE(device.to(at::kCPU).to(cpu.scalar_type()).equal(cpu)) << what;
}

void expect_figures(const Routing& device, const Routing& cpu) {
  std::vector<double> figures = moe_figures_of(device);
  const Tensor later = device.later_figures.to(at::kCPU);
  const auto* own = later.const_data_ptr<double>();
  figures.insert(figures.end(), own, own + later.numel());
  const std::vector<double> expected = moe_figures_of(cpu);
  ASSERT_EQ(figures.size(), expected.size());
  for (std::size_t i = 0; i < figures.size(); ++i) {
    EXPECT_NEAR(figures[i], expected[i], 1e-9 * std::abs(expected[i]) + 1e-12) << "figure " << i;
  }
}

TEST(ExpertsOnStrictDevice, AreChosenAsOnTheCpu) {
  const at::Device device = strict::open(0);
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(mix_key({0x455850, seed}));
    RouterOptions options;
    options.router = kRouters[rng.below(kRouters.size())];
    options.experts = static_cast<std::int64_t>(1 + rng.below(7));
    options.top_k =
        static_cast<std::int64_t>(1 + rng.below(static_cast<std::uint64_t>(options.experts)));
    options.capacity_factor = rng.below(2) == 0 ? 0 : rng.uniform() * 2;
    options.drop = rng.below(2) == 0 ? MoeDrop::kPosition : MoeDrop::kProbability;
    options.aux_loss = rng.uniform();
    options.z_loss = rng.uniform();
    const auto tokens = static_cast<std::int64_t>(rng.below(40));
    const Pass pass = rng.below(5) == 0 ? Pass::kValidation : Pass::kTraining;
    Tensor scores_NE = drawn(rng, {tokens, options.experts}, at::kFloat);
    if (rng.below(2) == 0 && options.router != MoeRouter::kSinkhorn) scores_NE.round_();  // ties
    const Tensor bias_E = drawn(rng, {options.experts}, at::kFloat).mul_(0.1);

    const Routing cpu = route(options, scores_NE, bias_E, pass);
    const Routing there = route(options, scores_NE.to(device), bias_E.to(device), pass);
    const std::int64_t kept = cpu.offsets.back();
    const std::int64_t behind = there.tokens_A.size(0) - kept;  // those that were dropped
    ASSERT_GE(behind, 0);
    expect_equal(there.starts, at::tensor(cpu.offsets), "offsets");
    expect_equal(there.experts_NK, cpu.experts_NK, "experts");
    expect_equal(there.places_NK, cpu.places_NK, "places");
    expect_equal(there.tokens_A.narrow(0, 0, kept), cpu.tokens_A, "tokens");
    expect_near(there.gates_NK, cpu.gates_NK, "gates");
    expect_figures(there, cpu);

    const Tensor x_AD = drawn(rng, {kept, 5}, at::kFloat);
    // No sum depends on rows that were dropped.
    const Tensor all_AD = at::cat({x_AD, at::full({behind, 5}, NAN)}).to(device);
    const Tensor dy_ND = drawn(rng, {tokens, 5}, at::kFloat);
    for (const Gates gates : {Gates::kYes, Gates::kNo}) {
      expect_near(summed_by_token({all_AD}, there, dy_ND.to(device), gates),
                  summed_by_token(rows_of(cpu, x_AD), cpu, dy_ND, gates), "sums");
    }
    std::vector<Tensor> cpu_rows = rows_of(cpu, x_AD);
    std::vector<Tensor> rows = {all_AD};
    const Tensor cpu_slopes_NK = through_gates(cpu_rows, cpu, dy_ND);
    const Tensor slopes_NK = through_gates(rows, there, dy_ND.to(device));
    expect_near(slopes_NK, cpu_slopes_NK, "gradients of gates");
    std::erase_if(cpu_rows, [](const Tensor& rows_MD) { return !rows_MD.defined(); });
    if (kept > 0) {
      expect_near(rows.front().narrow(0, 0, kept), at::cat(cpu_rows), "gradients of rows");
    }
    expect_near(routing_gradient(options, there, slopes_NK, 0.5),
                routing_gradient(options, cpu, cpu_slopes_NK, 0.5), "gradients of scores");
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "seed " << seed;
      return;
    }
  }
}

}  // namespace
}  // namespace dynmo::model

namespace dynmo::runtime::testing {
namespace {

// Its losses on the strict device are like the CPU's, and two ranks have the same bits as one.
void expect_like_cpu_on_two_ranks(RunOptions run) {
  run.layers = shaped(model::make_llama(small_model()), run.make_sources);
  run.learning_rate = 3e-3;
  run.cut = {static_cast<int>(run.layers.size())};
  run.staging.device = at::kCPU;
  const RunResult expected = run_pipeline(run);
  ASSERT_TRUE(expected.status) << expected.status.error().message;
  run.staging.device = strict::open(0);
  const RunResult one = run_pipeline(run);
  ASSERT_TRUE(one.status) << one.status.error().message;
  dynmo::testing::expect_like_cpu(one.losses, expected.losses, cost::Precision::kFp32);
  run.cut = {3, run.cut[0] - 3};
  expect_same(one, run_pipeline(run), "two ranks");
}

// Trains with a router whose options are `options`, on the CPU, the device and two ranks of it.
void expect_like_cpu_with(const dynamism::MoeOptions& options, bool depths = false,
                          bool exits = false) {
  RunOptions run{.steps = 12};
  run.make_sources = [=](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_moe_source(options));
    if (depths) {
      sources.push_back(
          dynamism::make_mixture_of_depths_source({.capacity = 0.5, .every = 1, .first_block = 1}));
    }
    if (exits) {
      sources.push_back(dynamism::make_early_exit_source(
          {.survivors = 0.5, .exit_every = 1, .warm_up = 2, .ramp_steps = 3}));
    }
    return sources;
  };
  expect_like_cpu_on_two_ranks(std::move(run));
}

dynamism::MoeOptions four(dynamism::MoeRouter router) {
  return {.experts = 4, .expert_hidden = 16, .router = router, .expert_ranks = 1};
}

TEST(ExpertsOnStrictDevice, TrainLikeTheCpuWithEachRouter) {
  for (const auto router : {dynamism::MoeRouter::kBias, dynamism::MoeRouter::kSinkhorn,
                            dynamism::MoeRouter::kBalanced, dynamism::MoeRouter::kExpertChoice}) {
    SCOPED_TRACE(fmt::format("router {}", static_cast<int>(router)));
    expect_like_cpu_with(four(router));
  }
  dynamism::MoeOptions drops = four(dynamism::MoeRouter::kTopK);
  drops.capacity_factor = 0.9;
  drops.drop = dynamism::MoeDrop::kProbability;
  drops.z_loss = 0.01;
  expect_like_cpu_with(drops);
}

// Experts lose units of their own, so that their widths differ.
TEST(ExpertsOnStrictDevice, TrainLikeTheCpuWithUnitsRemoved) {
  RunOptions run{.steps = 12};
  run.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_moe_source(four(dynamism::MoeRouter::kTopK)));
    sources.push_back(dynamism::make_pruning_source({.start = 2,
                                                     .end = 6,
                                                     .every = 2,
                                                     .initial_sparsity = 0.2,
                                                     .final_sparsity = 0.5,
                                                     .form = dynamism::PruningForm::kUnits}));
    return sources;
  };
  expect_like_cpu_on_two_ranks(std::move(run));
}

TEST(ExpertsOnStrictDevice, TrainInRoutedBlocksAndBehindExits) {
  expect_like_cpu_with(four(dynamism::MoeRouter::kTopK), /*depths=*/true);
  expect_like_cpu_with(four(dynamism::MoeRouter::kTopK), /*depths=*/false, /*exits=*/true);
}

TEST(FiguresOnStrictDevice, OfExpertsAreThoseOfTheCpu) {
  RunOptions run{.steps = 4};
  run.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_moe_source(four(dynamism::MoeRouter::kTopK)));
    return sources;
  };
  run.layers = shaped(model::make_llama(small_model()), run.make_sources);
  run.cut = {static_cast<int>(run.layers.size())};
  const auto figures = [&run] {
    std::vector<Json> all;
    run.before_step = [&all](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      if (step > 0) all.push_back(pipeline.sources().front()->figures());
      return {};
    };
    const RunResult result = run_pipeline(run);
    EXPECT_TRUE(result.status) << result.status.error().message;
    return all;
  };
  run.staging.device = at::kCPU;
  const std::vector<Json> expected = figures();
  run.staging.device = strict::open(0);
  const std::vector<Json> actual = figures();
  ASSERT_EQ(expected.size(), 3U);
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t step = 0; step < actual.size(); ++step) {
    EXPECT_EQ(actual[step].at("counts"), expected[step].at("counts")) << "step " << step;
    for (std::size_t block = 0; block < expected[step].at("counts").size(); ++block) {
      for (const char* sum : {"entropy", "aux_loss", "z_loss"}) {
        const auto wanted = expected[step].at(sum).at(block).get<double>();
        EXPECT_NEAR(actual[step].at(sum).at(block).get<double>(), wanted, 1e-5 * std::abs(wanted))
            << sum << ", step " << step;
      }
    }
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
