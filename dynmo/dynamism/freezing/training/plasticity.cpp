// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/training/plasticity.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/early_exit/training/exit_layer.h"
#include "dynmo/dynamism/freezing/training/reference.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/model/forwarding_layer.h"

namespace dynmo::dynamism {
namespace {

// The results for the layers of this rank.
struct Found {
  std::map<LayerId, at::Tensor> current = {};  // similarities
  std::map<LayerId, double> plasticity = {};
};

// Runs the current model in micro-batch 0, and the reference in micro-batch 1. In both, all tokens
// pass all layers, so that the outputs have the same rows.
class ProbedLayer final : public model::ForwardingLayer {
 public:
  ProbedLayer(std::shared_ptr<const model::Layer> layer, Found& found)
      : ForwardingLayer(std::move(layer)), found_(found) {}

  model::Output forward(const model::LayerState& state, const model::Hidden& input,
                        const model::LayerContext& context,
                        std::unique_ptr<model::Stash>* stash) const override {
    const bool current = context.micro_batch.value == 0;
    model::Output output = inner().forward(
        without_leaving(current ? state : reference_of(inner(), state)), input, context, stash);
    const at::Tensor rows = similarities(output.hidden.x);
    if (current) {
      found_.current[state.id] = rows;
    } else {
      found_.plasticity[state.id] = similarity_loss(found_.current.at(state.id), rows);
    }
    return output;
  }

 private:
  Found& found_;
};

// A layer behind the probed ones, whose output is not used.
class PassedLayer final : public model::ForwardingLayer {
 public:
  using ForwardingLayer::ForwardingLayer;
  model::Output forward(const model::LayerState&, const model::Hidden& input,
                        const model::LayerContext&, std::unique_ptr<model::Stash>*) const override {
    return {.hidden = input};
  }
};

}  // namespace

at::Tensor similarities(const at::Tensor& hidden) {
  const at::NoGradGuard no_graph;
  const at::Tensor rows_ND = hidden.reshape({-1, hidden.size(-1)});
  const std::int64_t rows = rows_ND.size(0);
  const std::int64_t compared = std::min(rows, kComparedRows);
  at::Tensor places = at::empty({compared}, at::kLong);
  for (std::int64_t i = 0; i < compared; ++i) {
    kernels::host_data<std::int64_t>(places)[i] = i * rows / compared;
  }
  const at::Tensor a_nD =
      rows_ND.index_select(0, places.to(rows_ND.device())).to(at::kCPU, at::kFloat);
  const at::Tensor q_nn = at::mm(a_nD, a_nD.t());
  const at::Tensor norms = q_nn.square().sum(/*dim=*/1, /*keepdim=*/true).sqrt();
  return q_nn / at::where(norms > 0, norms, at::ones_like(norms));
}

double similarity_loss(const at::Tensor& g, const at::Tensor& h) {
  DYNMO_CHECK(g.sizes() == h.sizes() && g.is_contiguous() && h.is_contiguous(),
              "similarities of equally many rows");
  double sum = 0;
  for (std::int64_t i = 0; i < g.numel(); ++i) {
    const double difference = double{kernels::host_data<const float>(g)[i]} -
                              double{kernels::host_data<const float>(h)[i]};
    sum += difference * difference;
  }
  return g.numel() > 0 ? sum / static_cast<double>(g.numel()) : 0;
}

Expected<std::vector<double>> plasticity(const Boundary& boundary, const ProbedLayers& probed) {
  Found found;
  model::Model layers = boundary.model;
  for (int i = 0; i < static_cast<int>(layers.size()); ++i) {
    auto& layer = layers[static_cast<std::size_t>(i)];
    if (i >= probed.end) {
      layer = std::make_shared<PassedLayer>(layer);
    } else if (i >= probed.first) {
      layer = std::make_shared<ProbedLayer>(layer, found);
    }
  }
  DYNMO_CHECK(boundary.probe != nullptr, "a pipeline that can be probed");
  DYNMO_TRY(boundary.probe(layers, /*times=*/2));
  // Only one rank has a layer, so the sum of the bits is its number.
  std::vector<std::int64_t> bits(layers.size(), 0);
  for (const auto& [id, value] : found.plasticity) {
    bits[id.index()] = std::bit_cast<std::int64_t>(value);
  }
  DYNMO_ASSIGN(bits, boundary.sum(std::move(bits)));
  std::vector<double> numbers;
  for (const std::int64_t bit : bits) numbers.push_back(std::bit_cast<double>(bit));
  return numbers;
}

}  // namespace dynmo::dynamism
