// SPDX-License-Identifier: Apache-2.0
// A block that works on some tokens of a sequence against the whole block, its two halves, in the
// same rounds: medians of seconds, forward and forward + backward, in fp32, hidden 512. Router and
// predictor are a part of it. The answer is checked once: as many rows change as are routed.
//
//   depths_bench [TOKENS] [ROUNDS] [THREADS]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/mixture_of_depths/options.h"
#include "dynmo/dynamism/mixture_of_depths/training/routed_block.h"
#include "dynmo/model/llama.h"

namespace {

using namespace dynmo;  // NOLINT: a program

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + std::ssize(times) / 2, times.end());
  return times[times.size() / 2];
}

// Layers one behind the other.
struct Kind {
  std::string name;
  std::vector<std::shared_ptr<const model::Layer>> layers;
  std::vector<model::LayerState> states = {};
  std::vector<double> forward = {};
  std::vector<double> both = {};

  at::Tensor run(const at::Tensor& x, const at::Tensor& slope, bool measured) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    std::vector<std::unique_ptr<model::Stash>> stashes(layers.size());
    model::Hidden hidden = x;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      hidden = layers[i]->forward(states[i], hidden, {}, &stashes[i]).hidden;
    }
    const auto middle = Clock::now();
    at::Tensor gradient = slope;
    for (std::size_t i = layers.size(); i-- > 0;) {
      gradient = layers[i]->input_gradient(states[i], *stashes[i], gradient,
                                           model::Layer::InputGradient::kWanted);
      layers[i]->weight_gradient(states[i], *stashes[i]);
    }
    const auto end = Clock::now();
    if (measured) {
      forward.push_back(std::chrono::duration<double>(middle - start).count());
      both.push_back(std::chrono::duration<double>(end - start).count());
    }
    return hidden.x;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t tokens = argc > 1 ? std::atoi(argv[1]) : 1024;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  at::set_num_threads(argc > 3 ? std::atoi(argv[3]) : 1);
  model::LlamaConfig config;
  config.shape.hidden = 512;
  config.shape.heads = config.shape.kv_heads = 8;
  config.shape.intermediate = 1376;
  config.shape.blocks = 1;
  config.shape.sequence = tokens;
  const model::Model dense = model::make_llama(config);
  std::vector<Kind> kinds = {{"whole block", {dense[1], dense[2]}}};
  for (const double capacity : {0.125, 0.25, 0.5, 1.0}) {
    kinds.push_back(
        {fmt::format("capacity {}", capacity),
         {dynamism::routed_block("routed", dense[1], dense[2], config.shape.hidden, capacity)}});
  }
  for (Kind& kind : kinds) {
    for (std::size_t i = 0; i < kind.layers.size(); ++i) {
      kind.states.push_back(
          model::make_state(*kind.layers[i], LayerId(static_cast<int>(i) + 1), 1));
    }
  }
  const at::Tensor x = at::randn({1, tokens, config.shape.hidden});
  const at::Tensor slope = at::randn_like(x);
  for (int round = 0; round <= rounds; ++round) {
    for (Kind& kind : kinds) {
      const at::Tensor out = kind.run(x, slope, round > 0);
      if (round > 0 || kind.name != "capacity 0.125") continue;
      const auto changed = (out != x).any(-1).sum().item<std::int64_t>();
      DYNMO_CHECK(changed == dynamism::routed_tokens(0.125, tokens),
                  "an eighth of the rows, got {}", changed);
    }
  }
  fmt::print("hidden {}, {} tokens, {} rounds, {} threads\n", config.shape.hidden, tokens, rounds,
             at::get_num_threads());
  for (const Kind& kind : kinds) {
    fmt::print(
        "{:<15} forward {:8.4f} s   with backward {:8.4f} s   of the whole block {:5.3f} {:5.3f}\n",
        kind.name, median(kind.forward), median(kind.both),
        median(kind.forward) / median(kinds[0].forward), median(kind.both) / median(kinds[0].both));
  }
  return 0;
}
