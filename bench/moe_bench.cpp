// SPDX-License-Identifier: Apache-2.0
// CPU time of a layer of 8 experts, 2 a token, beside that of its matrix products alone, and what
// choosing, sorting and gathering take of it. One thread; tokens are made to choose the experts in
// turn, so that each has so many rows.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "dynmo/kernels/products.h"
#include "dynmo/model/expert_rows_impl.h"
#include "dynmo/model/llama.h"
#include "dynmo/model/moe.h"

namespace {

using namespace dynmo;         // NOLINT: a program
using namespace dynmo::model;  // NOLINT

constexpr std::int64_t kExperts = 8;
constexpr std::int64_t kTopK = 2;

LlamaConfig config_of(std::int64_t hidden) {
  LlamaConfig config;
  config.shape.hidden = hidden;
  config.shape.intermediate = hidden * 11 / 4;
  return config;
}

// Scores by which tokens go to the experts in turn.
at::Tensor even_scores(std::int64_t tokens) {
  at::Tensor scores = at::zeros({tokens, kExperts});
  for (std::int64_t n = 0; n < tokens; ++n) {
    scores[n][2 * n % kExperts] = 4;
    scores[n][(2 * n + 1) % kExperts] = 3;
  }
  return scores;
}

struct Setup {
  Setup(std::int64_t hidden, std::int64_t rows)
      : tokens(rows * kExperts / kTopK),
        layer(dynamic_cast<const TakesExperts&>(*make_llama(config_of(hidden))[2])
                  .with(MoeConfig{
                      .router = {.experts = kExperts, .top_k = kTopK, .aux_loss = 0.01}})),
        state(make_state(*layer, LayerId(2), 1)) {
    // The router reads its first inputs, which say where a token goes.
    at::Tensor router = at::zeros({kExperts, hidden});
    for (std::int64_t e = 0; e < kExperts; ++e) router[e][e] = 1;
    state.parameters[1].value.copy_(router);
    input = at::randn({tokens, hidden});
    input.narrow(1, 0, kExperts).copy_(even_scores(tokens));
    gradient = at::randn_like(input);
  }
  std::int64_t tokens;
  std::shared_ptr<const Layer> layer;
  LayerState state;
  at::Tensor input;
  at::Tensor gradient;
};

// Forward, input and weight gradient of one micro-batch.
void run_layer(benchmark::State& state, std::int64_t hidden, std::int64_t rows) {
  Setup setup(hidden, rows);
  const Output once = setup.layer->forward(setup.state, setup.input, {}, nullptr);
  for (std::int64_t e = 0; e < kExperts; ++e) {
    if (once.figures[static_cast<std::size_t>(kMoeCounts + e)] != static_cast<double>(rows)) {
      return state.SkipWithError("experts of uneven sizes");
    }
  }
  for (auto _ : state) {
    std::unique_ptr<Stash> stash;
    benchmark::DoNotOptimize(setup.layer->forward(setup.state, setup.input, {}, &stash));
    benchmark::DoNotOptimize(setup.layer->input_gradient(setup.state, *stash, setup.gradient,
                                                         Layer::InputGradient::kWanted));
    setup.layer->weight_gradient(setup.state, *stash);
  }
}

// The products of the experts and nothing else, into buffers that are there: by libtorch, and by
// our own kernels where layers have them from there.
void run_products(benchmark::State& state, std::int64_t hidden, std::int64_t rows,
                  bool by_own_kernels) {
  const at::NoGradGuard no_graph;
  Setup setup(hidden, rows);
  struct Product {
    at::Tensor x, w, y, x_gradient, w_gradient;
  };
  std::vector<Product> products;
  for (std::size_t i = 2; i < setup.state.parameters.size(); ++i) {
    const at::Tensor w = setup.state.parameters[i].value;
    products.push_back({.x = at::randn({rows, w.size(1)}),
                        .w = w,
                        .y = at::randn({rows, w.size(0)}),
                        .x_gradient = at::empty({rows, w.size(1)}),
                        .w_gradient = at::zeros_like(w)});
  }
  const bool own = by_own_kernels && kernels::has_own_product(setup.input, setup.input);
  if (by_own_kernels && !own) return state.SkipWithError("libtorch's kernels are wanted here");
  for (auto _ : state) {
    if (own) {
      for (Product& p : products)
        kernels::own_product(p.y, p.x, p.w.t(), kernels::gemm::Result::kSet);
      for (Product& p : products)
        kernels::own_product(p.x_gradient, p.y, p.w, kernels::gemm::Result::kSet);
      for (Product& p : products)
        kernels::own_product(p.w_gradient, p.y.t(), p.x, kernels::gemm::Result::kAddTo);
    } else {
      for (Product& p : products) at::mm_out(p.y, p.x, p.w.t());
      for (Product& p : products) at::mm_out(p.x_gradient, p.y, p.w);
      for (Product& p : products) p.w_gradient.addmm_(p.y.t(), p.x);
    }
  }
}

// A layer does this once a micro-batch between its scores and its products: it chooses, sorts,
// gathers twice (forward, and for the weights' gradients), adds up twice.
void run_sort_and_gather(benchmark::State& state, std::int64_t hidden, std::int64_t rows) {
  const at::NoGradGuard no_graph;
  Setup setup(hidden, rows);
  const RouterOptions options{.experts = kExperts, .top_k = kTopK, .aux_loss = 0.01};
  const at::Tensor scores = even_scores(setup.tokens);
  const std::vector<at::Tensor> made(kExperts, at::randn({rows, hidden}));
  for (auto _ : state) {
    const Routing routing = route(options, scores, {}, Pass::kTraining);
    for (int pass = 0; pass < 2; ++pass) {
      benchmark::DoNotOptimize(expert_rows(setup.input, routing));
      benchmark::DoNotOptimize(
          summed_by_token(made, routing, setup.input, pass == 0 ? Gates::kYes : Gates::kNo));
    }
    benchmark::DoNotOptimize(routing_gradient(options, routing, routing.gates_NK, 1));
  }
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  for (const std::int64_t hidden : {256, 512}) {
    for (const std::int64_t rows : {32, 128, 512}) {
      const auto add = [&](const char* what, auto run) {
        benchmark::RegisterBenchmark(
            fmt::format("{}/hidden:{}/rows:{}", what, hidden, rows).c_str(),
            [=](benchmark::State& state) { run(state, hidden, rows); })
            ->Unit(benchmark::kMillisecond);
      };
      add("layer", run_layer);
      add("products", [](benchmark::State& state, std::int64_t h, std::int64_t r) {
        run_products(state, h, r, false);
      });
      add("own_products", [](benchmark::State& state, std::int64_t h, std::int64_t r) {
        run_products(state, h, r, true);
      });
      add("sort_and_gather", run_sort_and_gather);
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
