// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/recompute.h"

#include <ATen/ATen.h>

#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/forwarding_layer.h"

namespace dynmo::model {
namespace {

struct InputStash final : Stash {
  Hidden input;
  LayerContext context;
  std::unique_ptr<Stash> restored;  // from input_gradient on

  std::optional<Bytes> bytes() const override {
    if (restored != nullptr) return restored->bytes();
    const auto size = [](const at::Tensor& tensor) {
      return Bytes{tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0};
    };
    return size(input.x) + size(input.rows);
  }
};

class RecomputedLayer final : public ForwardingLayer {
 public:
  using ForwardingLayer::ForwardingLayer;

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 std::unique_ptr<Stash>* stash) const override {
    if (stash != nullptr) {
      auto saved = std::make_unique<InputStash>();
      saved->input = input;
      saved->context = context;
      *stash = std::move(saved);
    }
    return inner().forward(state, input, context, nullptr);
  }

  at::Tensor input_gradient(const LayerState& state, Stash& stash,
                            const at::Tensor& output_gradient,
                            InputGradient wanted) const override {
    auto& saved = dynamic_cast<InputStash&>(stash);
    DYNMO_CHECK(saved.restored == nullptr, "{}: input_gradient once per stash", name());
    (void)inner().forward(state, saved.input, saved.context, &saved.restored);
    saved.input = {};
    saved.context = {};
    return inner().input_gradient(state, *saved.restored, output_gradient, wanted);
  }

  void weight_gradient(LayerState& state, Stash& stash) const override {
    auto& saved = dynamic_cast<InputStash&>(stash);
    DYNMO_CHECK(saved.restored != nullptr, "{}: input_gradient before weight_gradient", name());
    inner().weight_gradient(state, *saved.restored);
  }
};

}  // namespace

std::shared_ptr<const Layer> recomputed(std::shared_ptr<const Layer> layer) {
  return std::make_shared<RecomputedLayer>(std::move(layer));
}

}  // namespace dynmo::model
