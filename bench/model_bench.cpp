// SPDX-License-Identifier: Apache-2.0
// CPU time of the layers' three calls beside that of their matrix products alone: what is left over
// is what element-wise work, attention and memory cost. One thread; the shapes of the small and the
// medium model of docs/performance.md. `rate` is the floating-point operations of the products a
// second.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "dynmo/model/adamw.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/llama.h"

namespace {

using namespace dynmo;         // NOLINT: a program
using namespace dynmo::model;  // NOLINT

struct Shape {
  const char* name;
  std::int64_t sequences;
  LlamaConfig config;
};

std::vector<Shape> shapes() {
  Shape small{.name = "small", .sequences = 4, .config = {}};
  small.config.shape.heads = small.config.shape.kv_heads = 4;
  Shape medium{.name = "medium", .sequences = 2, .config = {}};
  medium.config.shape.vocabulary = 8192;
  medium.config.shape.hidden = 512;
  medium.config.shape.blocks = 12;
  medium.config.shape.heads = medium.config.shape.kv_heads = 8;
  medium.config.shape.intermediate = 1376;
  medium.config.shape.sequence = 256;
  return {small, medium};
}

// Sizes {outputs, inputs} of a layer's matrices.
std::vector<std::vector<std::int64_t>> matrices(const Layer& layer) {
  std::vector<std::vector<std::int64_t>> sizes;
  for (const ParameterSpec& spec : layer.parameters()) {
    if (spec.shape.size() == 2) sizes.push_back(spec.shape);
  }
  return sizes;
}

void count_products(benchmark::State& state, const Layer& layer, std::int64_t tokens,
                    int products) {
  double operations = 0;
  for (const auto& size : matrices(layer)) {
    operations += 2.0 * static_cast<double>(tokens * size[0] * size[1] * products);
  }
  state.counters["rate"] = benchmark::Counter(operations * static_cast<double>(state.iterations()),
                                              benchmark::Counter::kIsRate);
}

struct Setup {
  Setup(const Shape& shape, int index)
      : layer(make_llama(shape.config)[static_cast<std::size_t>(index)]),
        state(make_state(*layer, LayerId{index}, 1)),
        tokens(shape.sequences * shape.config.shape.sequence) {
    const auto sequence = shape.config.shape.sequence;
    context.targets_BT =
        at::randint(shape.config.shape.vocabulary, {shape.sequences, sequence}, at::kLong);
    input = at::randn({shape.sequences, sequence, shape.config.shape.hidden});
    context.loss_weight = 1.0 / 8;
    if (!layer->needs().loss) gradient = at::randn_like(input);
  }
  std::shared_ptr<const Layer> layer;
  LayerState state;
  std::int64_t tokens;
  LayerContext context;
  at::Tensor input;
  at::Tensor gradient;
};

// Forward, input and weight gradient of one micro-batch.
void run_layer(benchmark::State& state, const Shape& shape, int index) {
  Setup setup(shape, index);
  for (auto _ : state) {
    std::unique_ptr<Stash> stash;
    benchmark::DoNotOptimize(setup.layer->forward(setup.state, setup.input, setup.context, &stash));
    benchmark::DoNotOptimize(setup.layer->input_gradient(setup.state, *stash, setup.gradient,
                                                         Layer::InputGradient::kWanted));
    setup.layer->weight_gradient(setup.state, *stash);
  }
  count_products(state, *setup.layer, setup.tokens, 3);
}

// The same products and nothing else, into buffers that are there.
void run_products(benchmark::State& state, const Shape& shape, int index) {
  const at::NoGradGuard no_graph;
  Setup setup(shape, index);
  struct Product {
    at::Tensor x, w, y, x_gradient, w_gradient;
  };
  std::vector<Product> products;
  for (const auto& size : matrices(*setup.layer)) {
    const at::Tensor w = at::randn(size);
    products.push_back({.x = at::randn({setup.tokens, size[1]}),
                        .w = w,
                        .y = at::randn({setup.tokens, size[0]}),
                        .x_gradient = at::empty({setup.tokens, size[1]}),
                        .w_gradient = at::zeros_like(w)});
  }
  for (auto _ : state) {
    for (Product& p : products) at::mm_out(p.y, p.x, p.w.t());
    for (Product& p : products) at::mm_out(p.x_gradient, p.y, p.w);
    for (Product& p : products) p.w_gradient.addmm_(p.y.t(), p.x);
  }
  count_products(state, *setup.layer, setup.tokens, 3);
}

// Clipping, AdamW and zeroing; beside it libtorch's, one after the other.
enum class By { kOnePass, kLibtorch };

void update_by_libtorch(LayerState& state, const AdamWOptions& options, double scale) {
  const at::NoGradGuard no_graph;
  for (Parameter& p : state.parameters) {
    p.gradient.mul_(scale);
    at::_fused_adamw_({p.value}, {p.gradient}, {p.first_moment}, {p.second_moment}, {},
                      {at::scalar_tensor(1, at::kFloat)}, options.learning_rate, options.beta1,
                      options.beta2, p.weight_decay ? options.weight_decay : 0, options.epsilon,
                      /*amsgrad=*/false, /*maximize=*/false);
    p.gradient.zero_();
  }
}

void run_update(benchmark::State& state, const Shape& shape, int index, By by) {
  Setup setup(shape, index);
  std::int64_t updates = 0;
  for (auto _ : state) {
    if (updates++ % 64 == 0) {  // without gradients moments would fall until they are denormal
      state.PauseTiming();
      for (Parameter& p : setup.state.parameters) {
        p.first_moment.fill_(1e-3);
        p.second_moment.fill_(1e-3);
      }
      state.ResumeTiming();
    }
    if (by == By::kOnePass) {
      update(setup.state, {}, 0.5);
    } else {
      update_by_libtorch(setup.state, {}, 0.5);
    }
  }
  double elements = 0;
  for (const Parameter& p : setup.state.parameters)
    elements += static_cast<double>(p.value.numel());
  state.counters["parameters"] = benchmark::Counter(
      elements * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  for (const Shape& shape : shapes()) {
    const int head = static_cast<int>(2 * shape.config.shape.blocks + 1);
    for (const auto& [kind, index] :
         {std::pair{"attention", 1}, std::pair{"mlp", 2}, std::pair{"head", head}}) {
      const auto add = [&, index = index](const char* what, auto function) {
        benchmark::RegisterBenchmark(fmt::format("{}/{}/{}", shape.name, kind, what).c_str(),
                                     function, shape, index)
            ->Unit(benchmark::kMicrosecond);
      };
      add("layer", run_layer);
      add("products", run_products);
      add("update",
          [](auto& state, const Shape& s, int i) { run_update(state, s, i, By::kOnePass); });
      add("libtorch's update",
          [](auto& state, const Shape& s, int i) { run_update(state, s, i, By::kLibtorch); });
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
