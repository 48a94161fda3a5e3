// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/recompute.h"

#include <ATen/ATen.h>

#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::model {
namespace {

struct InputStash final : Stash {
  at::Tensor input;
  LayerContext context;
  std::unique_ptr<Stash> restored;  // from input_gradient on
};

class RecomputedLayer final : public Layer {
 public:
  explicit RecomputedLayer(std::shared_ptr<const Layer> inner) : inner_(std::move(inner)) {}

  std::string name() const override { return inner_->name(); }
  std::vector<ParameterSpec> parameters() const override { return inner_->parameters(); }
  at::ScalarType compute_type() const override { return inner_->compute_type(); }

  at::Tensor forward(const LayerState& state, const at::Tensor& input, const LayerContext& context,
                     std::unique_ptr<Stash>* stash) const override {
    if (stash != nullptr) {
      auto kept = std::make_unique<InputStash>();
      kept->input = input;
      kept->context = context;
      *stash = std::move(kept);
    }
    return inner_->forward(state, input, context, nullptr);
  }

  at::Tensor input_gradient(const LayerState& state, Stash& stash,
                            const at::Tensor& output_gradient,
                            InputGradient wanted) const override {
    auto& kept = dynamic_cast<InputStash&>(stash);
    DYNMO_CHECK(kept.restored == nullptr, "{}: input_gradient once per stash", name());
    (void)inner_->forward(state, kept.input, kept.context, &kept.restored);
    kept.input.reset();
    kept.context = {};
    return inner_->input_gradient(state, *kept.restored, output_gradient, wanted);
  }

  void weight_gradient(LayerState& state, Stash& stash) const override {
    auto& kept = dynamic_cast<InputStash&>(stash);
    DYNMO_CHECK(kept.restored != nullptr, "{}: input_gradient before weight_gradient", name());
    inner_->weight_gradient(state, *kept.restored);
  }

 private:
  std::shared_ptr<const Layer> inner_;
};

}  // namespace

std::shared_ptr<const Layer> recomputed(std::shared_ptr<const Layer> layer) {
  return std::make_shared<RecomputedLayer>(std::move(layer));
}

}  // namespace dynmo::model
