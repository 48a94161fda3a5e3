// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/moe/load.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/model/moe.h"

namespace dynmo::dynamism {
namespace {

model::MoeConfig config_of(const MoeOptions& o) {
  return {.router = {.router = o.router,
                     .experts = o.experts,
                     .top_k = o.top_k,
                     .capacity_factor = o.capacity_factor,
                     .drop = o.drop,
                     .aux_loss = o.aux_loss,
                     .z_loss = o.z_loss},
          .intermediate = o.expert_hidden};
}

// The counts of one layer in a step, over all micro-batches and replicas.
struct LayerCounts {
  std::vector<double> experts;  // assignments of each, before drops
  double tokens = 0;
  double dropped = 0;
  double entropy = 0;   // of a token, in nats
  double aux_loss = 0;  // of a micro-batch
  double z_loss = 0;

  [[nodiscard]] double assigned() const {
    return std::accumulate(experts.begin(), experts.end(), 0.0);
  }
  // Returns MaxVio, the fullest expert / the mean - 1 (Wang et al., 2024).
  [[nodiscard]] double violation() const {
    if (assigned() <= 0) return 0;
    return *std::ranges::max_element(experts) / assigned() * static_cast<double>(experts.size()) -
           1;
  }
};

LayerCounts counts_of(const std::vector<double>& figures) {
  LayerCounts counts{.experts = {figures.begin() + model::kMoeCounts, figures.end()}};
  const auto mean = [&](model::MoeFigure sum, model::MoeFigure of) {
    return figures[of] > 0 ? figures[sum] / figures[of] : 0;
  };
  counts.tokens = figures[model::kMoeTokens];
  counts.dropped = figures[model::kMoeDropped];
  counts.entropy = mean(model::kMoeEntropy, model::kMoeTokens);
  counts.aux_loss = mean(model::kMoeAuxLoss, model::kMoeMicroBatches);
  counts.z_loss = mean(model::kMoeZLoss, model::kMoeMicroBatches);
  return counts;
}

class MoeSource final : public Source {
 public:
  explicit MoeSource(const MoeOptions& options)
      : options_(options), figures_(model::moe_figures(options.experts)) {}

  std::string_view name() const override { return "moe"; }
  bool replaces_layers() const override { return true; }

  Expected<void> shape(model::Recipe& recipe) const override {
    bool any = false;
    for (auto& [place, layer] : recipe.slots) {
      if (place.part != model::Part::kMlp) continue;
      const auto* takes = dynamic_cast<const model::TakesExperts*>(layer.get());
      if (takes == nullptr)
        return refusal(fmt::format("layer '{}' takes no experts", layer->name()));
      layer = takes->with(config_of(options_));
      any = true;
    }
    if (any) return {};
    return refusal("the model has no MLP");
  }

  Expected<void> after_update(const Boundary& now, const Outcome& outcome) override {
    counts_.clear();
    for (std::size_t i = 0; i < now.model.size(); ++i) {
      // An exit behind a layer adds its figures behind these.
      const std::vector<std::string> names = now.model[i]->figures();
      if (names.size() < figures_.size() ||
          !std::equal(figures_.begin(), figures_.end(), names.begin())) {
        continue;
      }
      const std::vector<double>& all = outcome.figures[i];
      counts_.push_back(counts_of({all.begin(), all.begin() + std::ssize(figures_)}));
      const auto own = now.states.find(LayerId(static_cast<int>(i)));
      if (own != now.states.end()) even_out(own->second, counts_.back());
    }
    return {};
  }

  // Returns lists with a value for each block.
  Json figures() const override {
    if (counts_.empty()) return nullptr;
    Json all = {{"counts", Json::array()},   {"max_violation", Json::array()},
                {"dropped", Json::array()},  {"entropy", Json::array()},
                {"aux_loss", Json::array()}, {"z_loss", Json::array()}};
    for (const LayerCounts& layer : counts_) {
      all["counts"].push_back(layer.experts);
      all["max_violation"].push_back(layer.violation());
      all["dropped"].push_back(layer.dropped);
      all["entropy"].push_back(layer.entropy);
      all["aux_loss"].push_back(layer.aux_loss);
      all["z_loss"].push_back(layer.z_loss);
    }
    all["straggler_factor"] = stragglers();
    return all;
  }

  std::string progress() const override {
    if (counts_.empty()) return {};
    const auto fuller = [](const LayerCounts& a, const LayerCounts& b) {
      return a.violation() < b.violation();
    };
    const auto [least, most] = std::ranges::minmax_element(counts_, fuller);
    double assigned = 0;
    double dropped = 0;
    for (const LayerCounts& layer : counts_) {
      assigned += layer.assigned();
      dropped += layer.dropped;
    }
    std::string text = fmt::format("fullest expert +{:.0f} to +{:.0f} %", 100 * least->violation(),
                                   100 * most->violation());
    if (dropped > 0) text += fmt::format(", dropped {:.1f} %", 100 * dropped / assigned);
    return text;
  }

 private:
  static Error refusal(std::string_view why) {
    return Error{ErrorCode::kBadInput,
                 fmt::format("moe.enabled is true, but {}; wanted model.family = \"llama\"", why)};
  }

  // Raises the bias of experts with too few tokens, and lowers that of experts with too many, from
  // the next step on (Wang et al., "Auxiliary-loss-free load balancing strategy for
  // mixture-of-experts", 2024).
  void even_out(model::LayerState& state, const LayerCounts& counts) const {
    if (options_.router != MoeRouter::kBias || state.frozen) return;
    const double mean = counts.assigned() / static_cast<double>(counts.experts.size());
    for (model::Buffer& buffer : state.buffers) {
      if (buffer.name != model::kMoeBias) continue;
      const bool on_device = !buffer.value.is_cpu();
      const at::Tensor change_E =
          at::zeros(buffer.value.sizes(), at::dtype(at::kFloat).pinned_memory(on_device));
      auto* change = kernels::host_data<float>(change_E);
      const auto rate = static_cast<float>(options_.bias_rate);
      for (std::size_t e = 0; e < counts.experts.size(); ++e) {
        if (counts.experts[e] < mean) change[e] = rate;
        if (counts.experts[e] > mean) change[e] = -rate;
      }
      buffer.value.add_(change_E.to(buffer.value.device(), /*non_blocking=*/true));
    }
  }

  // Returns the straggler factors (load.h) of each block for every number of devices that divides
  // the experts. A factor is the work of the fullest device over the mean, by the counts of the
  // whole step.
  [[nodiscard]] Json stragglers() const {
    Json all = Json::object();
    for (int ranks = 2; ranks <= options_.experts; ++ranks) {
      if (options_.experts % ranks != 0) continue;
      Json blocks = Json::array();
      for (const LayerCounts& layer : counts_) {
        blocks.push_back(
            straggler_factor(layer.experts, ranks, std::numeric_limits<double>::infinity()));
      }
      all[std::to_string(ranks)] = std::move(blocks);
    }
    return all;
  }

  MoeOptions options_;
  std::vector<std::string> figures_;
  std::vector<LayerCounts> counts_;  // of the newest step, by block
};

}  // namespace

std::unique_ptr<Source> moe_in_training(const SourceOptions& options, std::int64_t) {
  return make_moe_source(options.get<MoeOptions>());
}

std::unique_ptr<Source> make_moe_source(const MoeOptions& options) {
  return std::make_unique<MoeSource>(options);
}

}  // namespace dynmo::dynamism
