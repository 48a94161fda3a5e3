// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/dynamism/mixture_of_depths/training/routed_block.h"
#include "dynmo/dynamism/training/sources.h"

namespace dynmo::dynamism {
namespace {

// Decides and stores nothing between steps, because router and predictor are parameters of their
// layer.
class MixtureOfDepthsSource final : public Source {
 public:
  explicit MixtureOfDepthsSource(const MixtureOfDepthsOptions& options) : options_(options) {}

  std::string_view name() const override { return "mixture_of_depths"; }
  bool replaces_layers() const override { return true; }
  bool generates_otherwise() const override { return true; }

  Expected<void> shape(model::Recipe& recipe) const override {
    std::vector<model::Slot> slots;
    std::int64_t blocks = 0;
    bool any = false;
    for (std::size_t i = 0; i < recipe.slots.size(); ++i) {
      const model::Slot& slot = recipe.slots[i];
      blocks = std::max(blocks, slot.place.block + 1);
      if (slot.place.block < 0 || !is_routed(options_, slot.place.block)) {
        slots.push_back(slot);
        continue;
      }
      if (!halves_at(recipe, i)) {
        return make_error(ErrorCode::kBadInput,
                          "mixture_of_depths.enabled is true, but layer '{}' is no attention with "
                          "an MLP behind it; wanted a decoder of model.family",
                          slot.layer->name());
      }
      const auto& mlp = recipe.slots[i + 1].layer;
      slots.push_back(
          {{.part = model::Part::kBlock, .block = slot.place.block},
           routed_block(fmt::format("blocks.{}", slot.place.block), slot.layer, mlp,
                        slot.layer->parameters().front().shape.front(), options_.capacity)});
      any = true;
      ++i;
    }
    if (!any) {
      return make_error(ErrorCode::kBadInput,
                        "mixture_of_depths.every is {} and mixture_of_depths.first_block {}, but "
                        "of the model's {} blocks none is routed then; wanted less of either",
                        options_.every, options_.first_block, blocks);
    }
    recipe.slots = std::move(slots);
    return {};
  }

  Expected<void> after_update(const Boundary& boundary, const Outcome& outcome) override {
    blocks_.clear();
    for (std::size_t i = 0; i < boundary.model.size(); ++i) {
      // Figures of experts in the block come first.
      const std::vector<std::string> names = boundary.model[i]->figures();
      const std::vector<std::string> own = depths_figures();
      if (names.size() < own.size() || !std::equal(own.rbegin(), own.rend(), names.rbegin())) {
        continue;
      }
      const std::vector<double>& all = outcome.figures[i];
      blocks_.emplace_back(all.end() - kDepthsFigures, all.end());
    }
    return {};
  }

  // Returns lists with a value for each routed block, over all micro-batches and replicas of the
  // step.
  Json figures() const override {
    if (blocks_.empty()) return nullptr;
    return {{"rows", of_blocks(kChosenRows, 1)},
            {"share", sum(kChosenRows) / sum(kRows)},
            {"predicted", of_blocks(kPredictedRows, 1)},
            {"accuracy", by_row(kRightRows)},
            {"predictor_loss", by_row(kPredictorLoss)}};
  }

  std::string progress() const override {
    if (blocks_.empty()) return {};
    return fmt::format("routed {:.1f} %, predicted {:.1f} % right",
                       100 * sum(kChosenRows) / sum(kRows), 100 * sum(kRightRows) / sum(kRows));
  }

 private:
  // Returns whether slots `i` and `i` + 1 are attention and MLP of one block, each with the norm
  // first.
  static bool halves_at(const model::Recipe& recipe, std::size_t i) {
    using model::Part;
    const model::Slot& slot = recipe.slots[i];
    if (slot.place.part != Part::kAttention || i + 1 == recipe.slots.size()) return false;
    return recipe.slots[i + 1].place == model::Place{Part::kMlp, slot.place.block} &&
           !slot.layer->parameters().empty();
  }

  [[nodiscard]] double sum(DepthsFigure figure) const {
    double all = 0;
    for (const auto& block : blocks_) all += block[figure];
    return all;
  }
  [[nodiscard]] std::vector<double> of_blocks(DepthsFigure figure, double divisor) const {
    std::vector<double> all;
    for (const auto& block : blocks_) all.push_back(block[figure] / divisor);
    return all;
  }
  [[nodiscard]] std::vector<double> by_row(DepthsFigure figure) const {
    return of_blocks(figure, blocks_.front()[kRows]);
  }

  MixtureOfDepthsOptions options_;
  std::vector<std::vector<double>> blocks_;  // of the newest step
};

}  // namespace

std::unique_ptr<Source> mixture_of_depths_in_training(const SourceOptions& options, std::int64_t) {
  return make_mixture_of_depths_source(options.get<MixtureOfDepthsOptions>());
}

std::unique_ptr<Source> make_mixture_of_depths_source(const MixtureOfDepthsOptions& options) {
  return std::make_unique<MixtureOfDepthsSource>(options);
}

}  // namespace dynmo::dynamism
