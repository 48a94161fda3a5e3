// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/sparse_attention/training/pattern.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/attention_pattern.h"

namespace dynmo::dynamism {
namespace {

// The source makes no decisions between steps and has no state. The choice of a pattern is a
// function of the layer's key, the step, the micro-batch and the layer's input.
class SparseAttentionSource final : public Source {
 public:
  explicit SparseAttentionSource(const SparseAttentionOptions& options)
      : pattern_(make_pattern(options)) {}

  std::string_view name() const override { return "sparse_attention"; }
  bool replaces_layers() const override { return true; }

  Expected<void> shape(model::Recipe& recipe) const override {
    bool any = false;
    for (auto& [place, layer] : recipe.slots) {
      if (place.part != model::Part::kAttention) continue;
      const auto* takes = dynamic_cast<const model::TakesPattern*>(layer.get());
      if (takes == nullptr) {
        return make_error(ErrorCode::kBadInput,
                          "sparse_attention.enabled is true, but layer '{}' is none that takes a "
                          "pattern; wanted attention of a decoder of model.family",
                          layer->name());
      }
      layer = takes->with(pattern_);
      any = true;
    }
    if (any) return {};
    return make_error(ErrorCode::kBadInput,
                      "sparse_attention.enabled is true, but the model has no layer of attention; "
                      "wanted a decoder of model.family");
  }

  Expected<void> after_update(const Boundary& boundary, const Outcome& outcome) override {
    pairs_.clear();
    causal_ = 0;
    for (std::size_t i = 0; i < boundary.model.size(); ++i) {
      if (boundary.model[i]->figures() != model::pattern_figures()) continue;
      pairs_.push_back(outcome.figures[i][model::kPairs]);
      causal_ = outcome.figures[i][model::kCausalPairs];
    }
    return {};
  }

  // Returns the pairs by block, over all heads, micro-batches and replicas of the step.
  Json figures() const override {
    if (pairs_.empty()) return nullptr;
    return {{"pairs", pairs_}, {"share", share(sum() / static_cast<double>(pairs_.size()))}};
  }

  std::string progress() const override {
    if (pairs_.empty()) return {};
    const auto [least, most] = std::minmax_element(pairs_.begin(), pairs_.end());
    return fmt::format("pairs {:.1f} % ({:.1f} to {:.1f})",
                       100 * share(sum() / static_cast<double>(pairs_.size())), 100 * share(*least),
                       100 * share(*most));
  }

 private:
  [[nodiscard]] double sum() const { return std::accumulate(pairs_.begin(), pairs_.end(), 0.0); }
  [[nodiscard]] double share(double pairs) const { return causal_ > 0 ? pairs / causal_ : 0; }

  std::shared_ptr<const model::AttentionPattern> pattern_;
  std::vector<double> pairs_;  // of the newest step
  double causal_ = 0;          // of one layer
};

}  // namespace

std::unique_ptr<Source> sparse_attention_in_training(const SourceOptions& options, std::int64_t) {
  return make_sparse_attention_source(options.get<SparseAttentionOptions>());
}

std::unique_ptr<Source> make_sparse_attention_source(const SparseAttentionOptions& options) {
  return std::make_unique<SparseAttentionSource>(options);
}

}  // namespace dynmo::dynamism
