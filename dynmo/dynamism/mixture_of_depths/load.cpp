// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/mixture_of_depths/load.h"

#include <cstddef>
#include <utility>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/dense_impl.h"
#include "dynmo/dynamism/drift_impl.h"
#include "dynmo/dynamism/source_entry.h"

namespace dynmo::dynamism {
namespace {

constexpr std::uint64_t kNoise = 0x4D4F44;  // key of this model

class MixtureOfDepths final : public LoadModel {
 public:
  MixtureOfDepths(const MixtureOfDepthsOptions& options, DenseModel dense, std::uint64_t seed)
      : noise_(options.noise), seed_(seed), mean_(dense.costs) {
    for (int layer = 0; layer < dense.size(); ++layer) {
      const int block = dense.block[static_cast<std::size_t>(layer)];
      if (block == kNoBlock || !is_routed(options, block)) continue;
      mean_.layers[static_cast<std::size_t>(layer)] = routed(dense, layer, options.capacity);
    }
  }

  cost::ModelCost at(std::int64_t step) const override {
    cost::ModelCost model = mean_;
    if (noise_ == 0) return model;
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
      const double factor =
          1 + noise_ * step_noise(mix_key({kNoise, seed_, i, static_cast<std::uint64_t>(step)}));
      cost::LayerCost& layer = model.layers[i];
      layer.forward_s *= factor;
      layer.backward_input_s *= factor;
      layer.backward_weight_s *= factor;
    }
    return model;
  }

  bool counts_work() const override { return true; }

 private:
  static cost::LayerCost routed(const DenseModel& dense, int layer, double capacity) {
    const auto& shape = dense.shape;
    const double element = dense.device.bytes_per_element;
    const double chosen = static_cast<double>(routed_tokens(capacity, shape.sequence));
    const double share = chosen / static_cast<double>(shape.sequence);
    const auto tokens = static_cast<double>(shape.tokens());
    const auto hidden = static_cast<double>(shape.hidden);
    cost::LayerWork work = dense.work[static_cast<std::size_t>(layer)];
    work.matrix_flops *= share;
    work.core_flops *= share * share;
    // The chosen rows are gathered before attention and scattered behind the MLP: read and written.
    work.moved_bytes = work.moved_bytes * share + 2 * share * tokens * hidden * element;
    work.activation_bytes *= share;
    if (dense.kind(layer) == cost::LayerKind::kAttention) {
      // Router and predictor run once a block, on all tokens.
      const auto inner = static_cast<double>(predictor_size(shape.hidden));
      work.matrix_flops += 2 * tokens * (hidden + hidden * inner + inner);
      work.activation_bytes += tokens * (hidden + inner) * element;
      work.parameters += hidden + hidden * inner + 2 * inner + 1;
    }
    return dense.cost_of(work);
  }

  double noise_;
  std::uint64_t seed_;
  cost::ModelCost mean_;
};

}  // namespace

Expected<std::unique_ptr<LoadModel>> make_mixture_of_depths(const MixtureOfDepthsOptions& options,
                                                            const LoadInputs& inputs) {
  DYNMO_TRY(check(options));
  DYNMO_ASSIGN(DenseModel dense, make_dense("mixture_of_depths", inputs));
  return std::unique_ptr<LoadModel>(
      std::make_unique<MixtureOfDepths>(options, std::move(dense), inputs.seed));
}

SourceEntry mixture_of_depths_source() {
  return source_entry<MixtureOfDepthsOptions, make_mixture_of_depths>("mixture_of_depths");
}

}  // namespace dynmo::dynamism
