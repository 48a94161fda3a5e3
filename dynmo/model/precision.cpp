// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/precision.h"

#include <ATen/ATen.h>

#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/forwarding_layer.h"

namespace dynmo::model {
namespace {

class Bf16Layer final : public ForwardingLayer {
 public:
  using ForwardingLayer::ForwardingLayer;

  at::ScalarType compute_type() const override { return at::kBFloat16; }

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 std::unique_ptr<Stash>* stash) const override {
    // The code that fills a state rounds it. Without copies the layer would compute in fp32.
    for (const Parameter& parameter : state.parameters) {
      DYNMO_CHECK(parameter.compute_copy.defined(), "derive() before layer {} ('{}') runs",
                  state.id, name());
    }
    return inner().forward(state, input, context, stash);
  }
};

}  // namespace

at::ScalarType scalar_type(cost::Precision precision) {
  return precision == cost::Precision::kBf16 ? at::kBFloat16 : at::kFloat;
}

Model in_precision(Model model, cost::Precision precision) {
  if (precision == cost::Precision::kFp32) return model;
  for (auto& layer : model) layer = std::make_shared<Bf16Layer>(std::move(layer));
  return model;
}

}  // namespace dynmo::model
