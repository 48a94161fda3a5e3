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
    shares_.clear();
    for (std::size_t i = 0; i < boundary.model.size(); ++i) {
      if (boundary.model[i]->figures() != model::pattern_figures()) continue;
      pairs_.push_back(outcome.figures[i][model::kPairs]);
      const double causal = outcome.figures[i][model::kCausalPairs];
      shares_.push_back(causal > 0 ? pairs_.back() / causal : 0);
    }
    return {};
  }

  // Returns the pairs by block, over all heads, micro-batches and replicas of the step.
  Json figures() const override {
    if (pairs_.empty()) return nullptr;
    return {{"pairs", pairs_}, {"share", mean_share()}};
  }

  std::string progress() const override {
    if (pairs_.empty()) return {};
    const auto [least, most] = std::minmax_element(shares_.begin(), shares_.end());
    return fmt::format("pairs {:.1f} % ({:.1f} to {:.1f})", 100 * mean_share(), 100 * *least,
                       100 * *most);
  }

 private:
  [[nodiscard]] double mean_share() const {
    return std::accumulate(shares_.begin(), shares_.end(), 0.0) /
           static_cast<double>(shares_.size());
  }

  std::shared_ptr<const model::AttentionPattern> pattern_;
  std::vector<double> pairs_;   // of the newest step, by block
  std::vector<double> shares_;  // of its causal pairs
};

}  // namespace

std::unique_ptr<Source> sparse_attention_in_training(const SourceOptions& options, std::int64_t) {
  return make_sparse_attention_source(options.get<SparseAttentionOptions>());
}

std::unique_ptr<Source> make_sparse_attention_source(const SparseAttentionOptions& options) {
  return std::make_unique<SparseAttentionSource>(options);
}

}  // namespace dynmo::dynamism
