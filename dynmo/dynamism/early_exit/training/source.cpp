// SPDX-License-Identifier: Apache-2.0
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/median.h"
#include "dynmo/dynamism/early_exit/training/exit_layer.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/head_slice.h"

namespace dynmo::dynamism {
namespace {

// The counts of the newest step's exits, all micro-batches and replicas together.
struct ExitSeen {
  double rows = 0;
  double left = 0;
  double loss = 0;
  double scored = 0;
  double right = 0;
};

class EarlyExitSource final : public Source {
 public:
  explicit EarlyExitSource(const EarlyExitOptions& options) : options_(options) {}

  std::string_view name() const override { return "early_exit"; }
  bool replaces_layers() const override { return true; }

  Expected<void> shape(model::Recipe& recipe) const override {
    std::int64_t blocks = 0;
    for (const model::Slot& slot : recipe.slots) blocks = std::max(blocks, slot.place.block + 1);
    DYNMO_ASSIGN(const ExitOptions exit, exit_options(recipe));
    bool any = false;
    std::vector<model::Slot> slots;
    for (auto& [place, layer] : recipe.slots) {
      if (place.part != model::Part::kMlp || !has_exit(options_, place.block, blocks)) {
        slots.push_back({place, std::move(layer)});
        continue;
      }
      model::Place own = place;
      for (auto& slice : exit_layers(std::move(layer), exit)) {
        slots.push_back({own, std::move(slice)});
        own.part = model::Part::kBlock;
      }
      any = true;
    }
    recipe.slots = std::move(slots);
    if (any) return {};
    return make_error(ErrorCode::kBadInput,
                      "early_exit.exit_every is {} and the model has {} blocks: no block has an "
                      "exit behind it, as the last one has the head; wanted at most {}",
                      options_.exit_every, blocks, std::max<std::int64_t>(1, blocks - 1));
  }

  Expected<Change> before_step(const Boundary& boundary) override {
    const std::vector<LayerId> exits = exits_of(boundary.model);
    if (options_.threshold > 0) {
      const bool leaves = boundary.step >= options_.warm_up && options_.threshold < 1;
      thresholds_.assign(exits.size(),
                         leaves ? static_cast<float>(options_.threshold) : kNeverLeaves);
    }
    if (thresholds_.empty()) thresholds_.assign(exits.size(), kNeverLeaves);
    DYNMO_TRY(set(boundary));
    // If thresholds follow the schedule, hardly a token leaves at first.
    return Change{.work = options_.threshold > 0 && boundary.step == options_.warm_up};
  }

  Expected<void> after_update(const Boundary& boundary, const Outcome& outcome) override {
    const std::vector<LayerId> exits = exits_of(boundary.model);
    seen_.clear();
    for (std::size_t e = 0; e < exits.size(); ++e) {
      const std::vector<double>& all = outcome.figures[exits[e].index()];
      const auto* own = all.data() + all.size() - kExitFigures;
      seen_.push_back({.rows = own[kExitRows],
                       .left = own[kExitLeft],
                       .loss = own[kExitLoss],
                       .scored = own[kExitScored],
                       .right = own[kExitRight]});
      if (options_.threshold == 0 && own[kExitRows] > 0) {
        thresholds_[e] = threshold_for({own + kExitCounts, own + kExitFigures},
                                       leaving(boundary.step + 1, exits.size()));
      }
    }
    return set(boundary);
  }

  // Returns each layer's number of rows, which is that of the next exit.
  std::vector<double> work(const Boundary& boundary, const Outcome& outcome) const override {
    const std::vector<LayerId> exits = exits_of(boundary.model);
    std::vector<double> rows(boundary.model.size(), 0.0);
    std::size_t next = 0;
    for (std::size_t i = 1; i < rows.size(); ++i) {  // the embedding sees all
      while (next < exits.size() && exits[next].index() < i) ++next;
      const std::size_t exit = std::min(next, exits.size() - 1);
      const std::vector<double>& all = outcome.figures[exits[exit].index()];
      const auto* own = all.data() + all.size() - kExitFigures;
      rows[i] = own[kExitRows] - (next == exits.size() ? own[kExitLeft] : 0);
    }
    return rows;
  }

  Json state() const override {
    return thresholds_.empty() ? Json() : Json{{"thresholds", thresholds_}};
  }
  Expected<void> restore(const Json& state) override {
    thresholds_.clear();
    const auto found = state.find("thresholds");
    if (found != state.end() && found->is_array()) {
      for (const Json& threshold : *found) {
        if (threshold.is_number()) thresholds_.push_back(threshold.get<float>());
      }
      if (thresholds_.size() == found->size()) return {};
    }
    return make_error(ErrorCode::kBadInput,
                      "the state of early_exit has no list of thresholds, wanted one number by "
                      "exit, as a checkpoint of this version has");
  }

  Json figures() const override {
    if (seen_.empty()) return nullptr;
    Json left = Json::array();
    Json losses = Json::array();
    Json right = Json::array();
    Json scored = Json::array();
    for (const ExitSeen& exit : seen_) {
      left.push_back(exit.left);
      losses.push_back(share(exit.loss, exit.scored));
      right.push_back(share(exit.right, exit.scored));
      scored.push_back(exit.scored);
    }
    left.push_back(seen_.back().rows - seen_.back().left);  // at the model's own head
    return {{"left", left},
            {"tokens", seen_.front().rows},
            {"survivors", survivors()},
            {"thresholds", thresholds_},
            {"scored", scored},
            {"loss", losses},
            {"right", right}};
  }

  std::string progress() const override {
    if (seen_.empty()) return {};
    std::vector<std::string> shares;
    for (const ExitSeen& exit : seen_) {
      shares.push_back(fmt::format("{:.1f}", 100 * share(exit.left, seen_.front().rows)));
    }
    return fmt::format("left {} % (stay {:.1f} %)", fmt::join(shares, " "), 100 * survivors());
  }

 private:
  [[nodiscard]] double survivors() const {
    return share(seen_.back().rows - seen_.back().left, seen_.front().rows);
  }

  static std::vector<LayerId> exits_of(const model::Model& model) {
    std::vector<LayerId> exits;
    for (std::size_t i = 0; i < model.size(); ++i) {
      if (has_exit(*model[i])) exits.emplace_back(static_cast<int>(i));
    }
    return exits;
  }

  // Returns the share of an exit's rows that leaves there in a step. It is the same at all exits.
  [[nodiscard]] double leaving(std::int64_t step, std::size_t exits) const {
    return 1 - scheduled_survivors(options_, step, 1, static_cast<int>(exits));
  }

  // Sets the thresholds in the states of this rank.
  [[nodiscard]] Expected<void> set(const Boundary& boundary) const {
    const std::size_t exits = exits_of(boundary.model).size();
    if (exits != thresholds_.size()) {
      return make_error(ErrorCode::kBadInput,
                        "thresholds of {} exits, wanted those of the model's {}: a checkpoint of "
                        "the same early_exit.exit_every",
                        thresholds_.size(), exits);
    }
    std::size_t next = 0;
    for (std::size_t i = 0; i < boundary.model.size(); ++i) {
      const model::Layer& layer = *boundary.model[i];
      if (!has_threshold(layer)) continue;
      const auto found = boundary.states.find(LayerId(static_cast<int>(i)));
      if (found != boundary.states.end()) set_threshold(found->second, thresholds_[next]);
      if (has_exit(layer)) ++next;
    }
    return {};
  }

  // Returns options with the shape of the model's head, and the same number of slices.
  [[nodiscard]] Expected<ExitOptions> exit_options(const model::Recipe& recipe) const {
    const model::Layer* head = nullptr;
    std::int64_t slices = 0;
    for (const model::Slot& slot : recipe.slots) {
      if (slot.place.part != model::Part::kHead) continue;
      head = slot.layer.get();
      ++slices;
    }
    const auto specs = head == nullptr ? std::vector<model::ParameterSpec>() : head->parameters();
    const auto matrix = std::ranges::find_if(
        specs, [](const model::ParameterSpec& spec) { return spec.shape.size() == 2; });
    if (matrix == specs.end()) {
      return make_error(ErrorCode::kBadInput,
                        "early_exit.enabled is true, but the model has no head with a matrix; "
                        "wanted a decoder of model.family");
    }
    const std::int64_t words = model::head_words(*head);
    return ExitOptions{.hidden = matrix->shape[1],
                       .vocabulary = words > 0 ? words : matrix->shape[0],
                       .head_init_std = matrix->init_std,
                       .confidence = options_.confidence,
                       .loss = options_.exit_loss,
                       .counts = options_.threshold == 0,
                       .slices = slices};
  }

  EarlyExitOptions options_;
  std::vector<float> thresholds_;  // by exit
  std::vector<ExitSeen> seen_;     // of the newest step
};

}  // namespace

std::unique_ptr<Source> early_exit_in_training(const SourceOptions& options, std::int64_t) {
  return make_early_exit_source(options.get<EarlyExitOptions>());
}

std::unique_ptr<Source> make_early_exit_source(const EarlyExitOptions& options) {
  return std::make_unique<EarlyExitSource>(options);
}

}  // namespace dynmo::dynamism
