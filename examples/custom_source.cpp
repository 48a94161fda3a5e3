// SPDX-License-Identifier: Apache-2.0
// A source of dynamism of your own: docs/own-source.md walks through it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "dynmo/core/rng.h"
#include "dynmo/model/forwarding_layer.h"
#include "dynmo/train/run.h"
#include "dynmo/transport/in_process.h"

using namespace dynmo;
// LayerDrop (Fan et al., 2020): x + f(x) at times without f. Buffers: the share with f, a count.
class DropLayer final : public model::ForwardingLayer {
 public:
  struct LeftOut final : model::Stash {};  // nothing was computed, nothing is saved
  using ForwardingLayer::ForwardingLayer;
  std::vector<model::BufferSpec> buffers() const override {
    return {{.name = "share", .shape = {}, .type = at::kDouble, .initial = 1},
            {.name = "runs", .shape = {}, .type = at::kLong}};
  }
  std::vector<std::string> figures() const override { return {"runs"}; }
  model::Output forward(const model::LayerState& state, const model::Hidden& x,
                        const model::LayerContext& now,
                        std::unique_ptr<model::Stash>* stash) const override {
    if (now.pass != model::Pass::kTraining) return inner().forward(state, x, now, stash);
    Rng draw(mix_key({state.random_key, static_cast<std::uint64_t>(now.step),
                      static_cast<std::uint64_t>(now.micro_batch.value)}));
    const bool runs = draw.uniform() < state.buffers[0].value.item<double>();
    model::Output output{.hidden = x};
    if (runs) output = inner().forward(state, x, now, stash);
    if (!runs && stash != nullptr) *stash = std::make_unique<LeftOut>();
    output.figures = {runs ? 1.0 : 0.0};
    return output;
  }
  at::Tensor input_gradient(const model::LayerState& state, model::Stash& stash,
                            const at::Tensor& gradient, InputGradient wanted) const override {
    if (dynamic_cast<LeftOut*>(&stash) != nullptr) return gradient;
    return inner().input_gradient(state, stash, gradient, wanted);
  }
  void weight_gradient(model::LayerState& state, model::Stash& stash) const override {
    if (dynamic_cast<LeftOut*>(&stash) == nullptr) inner().weight_gradient(state, stash);
  }
};

// Every 5 of 40 steps the blocks run f less often, the last ones least: down to a quarter.
class LayerDrop final : public dynamism::Source {
 public:
  std::string_view name() const override { return "layer_drop"; }
  Expected<void> shape(model::Recipe& recipe) const override {
    for (auto& [place, layer] : recipe.slots) {
      if (place.block >= 0) layer = std::make_shared<DropLayer>(layer);
    }
    return {};
  }
  Expected<dynamism::Change> before_step(const dynamism::Boundary& now) override {
    const double done = std::min<double>(static_cast<double>(now.step / 5 * 5) / 40, 1);
    for (auto& [id, state] : now.states) {
      const double depth = id.value / static_cast<double>(now.model.size());
      if (!state.buffers.empty()) state.buffers[0].value.fill_(1 - 0.75 * done * depth);
    }
    return dynamism::Change{.work = now.step % 5 == 0};
  }
  Expected<void> after_update(const dynamism::Boundary& now,
                              const dynamism::Outcome& done) override {
    for (auto& [id, state] : now.states) {
      if (state.buffers.empty()) continue;
      state.buffers[1].value.add_(static_cast<std::int64_t>(done.figures[id.index()][0]));
    }
    return {};
  }
};

dynamism::Sources layer_drop(std::int64_t /*steps*/) {
  dynamism::Sources sources;
  sources.push_back(std::make_unique<LayerDrop>());
  return sources;
}

// Usage: custom_source RANKS KEY=VALUE... The ranks are threads of this process.
int main(int argc, char** argv) {
  train::TrainOptions options;
  options.make_sources = layer_drop;
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 0;
  const std::vector<std::string> settings(argv + std::min(argc, 2), argv + argc);
  auto done = config::apply_settings(options.config, settings);
  if (ranks < 1) done = make_error(ErrorCode::kBadInput, "wanted RANKS KEY=VALUE...");
  if (done) {
    options.resume = std::filesystem::exists(options.config.run.directory + "/checkpoints");
    done = transport::run_ranks(ranks, [&](transport::Transport& transport) {
      at::set_num_threads(1);
      return train::train(transport, options);
    });
  }
  if (!done) std::fprintf(stderr, "custom_source: error: %s\n", done.error().message.c_str());
  return done ? 0 : exit_code(done.error().code);
}
