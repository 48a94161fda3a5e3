// SPDX-License-Identifier: Apache-2.0
#pragma once

// A source of dynamism whose layers keep numbers in buffers: layers are off in some micro-batches,
// and which ones follows from how often they have been on. So a buffer that stays behind when its
// layer moves, or is left out of a checkpoint, shows in the losses.

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/forwarding_layer.h"

namespace dynmo::runtime::testing {

class BlinkingLayer final : public model::ForwardingLayer {
 public:
  using ForwardingLayer::ForwardingLayer;

  std::vector<model::BufferSpec> buffers() const override {
    return {{.name = "on", .shape = {4}, .type = at::kBool, .initial = 1},
            {.name = "seen", .shape = {1}, .type = at::kLong}};
  }
  std::vector<std::string> figures() const override { return {"on"}; }

  model::Output forward(const model::LayerState& state, const model::Hidden& input,
                        const model::LayerContext& context,
                        std::unique_ptr<model::Stash>* stash) const override {
    const bool on = state.buffers[0].value[context.micro_batch.value % 4].item<bool>();
    model::Output output{.hidden = input};
    if (on) output = inner().forward(state, input, context, stash);
    if (!on && stash != nullptr) *stash = std::make_unique<Off>();
    output.figures = {on ? 1.0 : 0.0};
    return output;
  }
  at::Tensor input_gradient(const model::LayerState& state, model::Stash& stash,
                            const at::Tensor& gradient, InputGradient wanted) const override {
    if (dynamic_cast<Off*>(&stash) != nullptr) return gradient;
    return inner().input_gradient(state, stash, gradient, wanted);
  }
  void weight_gradient(model::LayerState& state, model::Stash& stash) const override {
    if (dynamic_cast<Off*>(&stash) == nullptr) inner().weight_gradient(state, stash);
  }

 private:
  struct Off final : model::Stash {
    std::optional<Bytes> bytes() const override { return Bytes{0}; }
  };
};

class BlinkingSource final : public dynamism::Source {
 public:
  std::string_view name() const override { return "blinking"; }
  Expected<void> shape(model::Recipe& recipe) const override {
    for (model::Slot& slot : recipe.slots) {
      if (slot.place.block >= 0) slot.layer = std::make_shared<BlinkingLayer>(slot.layer);
    }
    return {};
  }
  Expected<void> after_update(const dynamism::Boundary& now,
                              const dynamism::Outcome& outcome) override {
    for (auto& [id, state] : now.states) {
      if (state.buffers.empty()) continue;
      at::Tensor& seen = state.buffers[1].value;
      seen.add_(static_cast<std::int64_t>(outcome.figures[id.index()].at(0)));
      at::Tensor on = state.buffers[0].value[seen.item<std::int64_t>() % 4];
      on.logical_not_();
    }
    ++updates_;
    return {};
  }
  Json state() const override { return updates_; }
  Expected<void> restore(const Json& state) override {
    updates_ = state.get<std::int64_t>();
    return {};
  }

 private:
  std::int64_t updates_ = 0;
};

inline dynamism::Sources blinking_sources(std::int64_t) {
  dynamism::Sources sources;
  sources.push_back(std::make_unique<BlinkingSource>());
  return sources;
}

// `layers` of a decoder as the sources have them.
inline model::Model shaped(model::Model layers, const dynamism::MakeSources& make_sources) {
  model::Recipe recipe = model::decoder_recipe(std::move(layers));
  const auto done = dynamism::shape(make_sources(1), recipe);
  DYNMO_CHECK(done.has_value(), "sources that fit: {}", done.error().message);
  return model::layers_of(std::move(recipe));
}

}  // namespace dynmo::runtime::testing
