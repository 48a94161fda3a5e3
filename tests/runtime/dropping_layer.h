// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer after which rows are gone by a fixed pattern: which ones is a function of the layer, the
// step and the micro-batch, between none and all of them.

#include <ATen/ATen.h>

#include <memory>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/model/forwarding_layer.h"

namespace dynmo::runtime::testing {

class DroppingLayer final : public model::ForwardingLayer {
 public:
  explicit DroppingLayer(std::shared_ptr<const model::Layer> layer, std::uint64_t seed = 1)
      : ForwardingLayer(std::move(layer)), seed_(seed) {}

  model::Needs needs() const override {
    model::Needs needs = inner().needs();
    needs.drops_rows = true;
    return needs;
  }

  model::Output forward(const model::LayerState& state, const model::Hidden& input,
                        const model::LayerContext& context,
                        std::unique_ptr<model::Stash>* stash) const override {
    auto saved = std::make_unique<Saved>();
    model::Output output =
        inner().forward(state, input, context, stash == nullptr ? nullptr : &saved->inner);
    const at::Tensor x_ND = output.hidden.x.reshape({-1, output.hidden.x.size(-1)});
    at::Tensor rows = output.hidden.rows;
    if (!rows.defined()) rows = at::arange(x_ND.size(0), at::kInt);
    saved->shape = output.hidden.x.sizes().vec();
    saved->stay = at::tensor(staying(state.id, rows, context), at::kLong);
    if (saved->stay.numel() < rows.numel()) {
      output.hidden = {x_ND.index_select(0, saved->stay), rows.index_select(0, saved->stay)};
    }
    if (stash != nullptr) *stash = std::move(saved);
    return output;
  }
  at::Tensor input_gradient(const model::LayerState& state, model::Stash& stash,
                            const at::Tensor& output_gradient,
                            InputGradient wanted) const override {
    auto& saved = dynamic_cast<Saved&>(stash);
    at::Tensor all = at::zeros(saved.shape, output_gradient.options());
    const std::int64_t width = saved.shape.back();
    all.view({all.numel() / width, width})
        .index_copy_(0, saved.stay, output_gradient.reshape({saved.stay.numel(), width}));
    return inner().input_gradient(state, *saved.inner, all, wanted);
  }
  void weight_gradient(model::LayerState& state, model::Stash& stash) const override {
    inner().weight_gradient(state, *dynamic_cast<Saved&>(stash).inner);
  }

 private:
  struct Saved : model::Stash {
    std::unique_ptr<model::Stash> inner;
    std::vector<std::int64_t> shape;
    at::Tensor stay;
    std::optional<Bytes> bytes() const override { return inner->bytes(); }
  };

  [[nodiscard]] std::vector<std::int64_t> staying(LayerId layer, const at::Tensor& rows,
                                                  const model::LayerContext& context) const {
    const auto draw = [&](std::uint64_t salt) {
      return Rng(mix_key({seed_, static_cast<std::uint64_t>(layer.value),
                          static_cast<std::uint64_t>(context.step),
                          static_cast<std::uint64_t>(context.micro_batch.value), salt}))
          .uniform();
    };
    // Every seventh micro-batch or so keeps all rows, and every seventh none.
    const double share = std::clamp(1.4 * draw(0) - 0.2, 0.0, 1.0);
    std::vector<std::int64_t> stay;
    for (std::int64_t n = 0; n < rows.numel(); ++n) {
      const auto row = static_cast<std::uint64_t>(rows.const_data_ptr<std::int32_t>()[n]);
      if (draw(1 + row) < share) stay.push_back(n);
    }
    return stay;
  }

  std::uint64_t seed_;
};

// With the given layers dropping rows.
inline model::Model dropping(model::Model layers, const std::vector<std::size_t>& which) {
  for (const std::size_t i : which) layers[i] = std::make_shared<DroppingLayer>(layers[i]);
  return layers;
}

}  // namespace dynmo::runtime::testing
