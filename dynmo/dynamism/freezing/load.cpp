// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/load.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/dynamism/dense_impl.h"
#include "dynmo/dynamism/drift_impl.h"
#include "dynmo/dynamism/freezing/schedule.h"
#include "dynmo/dynamism/source_entry.h"

namespace dynmo::dynamism {
namespace {

constexpr std::int64_t kMaxChecks = 10'000'000;  // of all blocks
enum FreezingDraw : std::uint64_t {
  kFreezingRate = 0x465245455A,
  kFreezingSlope,
  kFreezingOrder
};  // keys of this model

// Returns the maximum number of frozen blocks, rounded down with the tolerance of frozen_layers().
int max_blocks(const FreezingOptions& p, int blocks) {
  return static_cast<int>(std::floor(p.max_fraction * blocks + 1e-9));
}

double rate_of(const FreezingOptions& p, int block, int blocks, std::uint64_t seed) {
  const double depth = blocks > 1 ? static_cast<double>(block) / (blocks - 1) : 0;
  const double mean = p.front_rate * std::pow(p.back_rate / p.front_rate, depth);
  const auto key = mix_key({kFreezingRate, seed, static_cast<std::uint64_t>(block)});
  return mean * std::exp(p.rate_spread * Rng(key).normal());
}

// Returns the step of the check at which the block's slope has been below the tolerance `patience`
// times in a row, or `steps` if there is none.
std::int64_t converged_step(const FreezingOptions& p, int block, int blocks, std::int64_t steps,
                            std::uint64_t seed) {
  const double rate = rate_of(p, block, blocks, seed);
  const auto first = static_cast<std::int64_t>(p.bootstrap * static_cast<double>(steps));
  int below = 0;
  for (std::int64_t step = first; step < steps; step += p.check_every) {
    const double share = static_cast<double>(step) / static_cast<double>(steps);
    const auto key = mix_key({kFreezingSlope, seed, static_cast<std::uint64_t>(block),
                              static_cast<std::uint64_t>(step)});
    const double slope = std::exp(-rate * share) + p.slope_noise * step_noise(key);
    below = slope < p.tolerance ? below + 1 : 0;
    if (below == p.patience) return step;
  }
  return steps;
}

class Freezing final : public LoadModel {
 public:
  Freezing(FreezingOptions options, DenseModel dense, const LoadInputs& inputs)
      : options_(options), dense_(std::move(dense)), steps_(inputs.steps) {
    const int blocks = inputs.shape.blocks;
    if (options_.rule == FreezingRule::kPlasticity || options_.rule == FreezingRule::kNorm) {
      freezes_ = freezing_steps(options_, blocks, steps_, inputs.seed);
    } else if (options_.rule == FreezingRule::kRandom) {
      freezes_ = random_steps(blocks, inputs.seed);
    }
  }

  cost::ModelCost at(std::int64_t step) const override {
    if (options_.rule == FreezingRule::kRandom) return freeze_blocks(step);
    return freeze_prefix(dense_.costs, prefix(step));
  }

  cost::Announced announced_at(std::int64_t step) const override {
    if (step == 0) return cost::Announced::kNothing;
    // Layers that freeze in the middle still stash, and pass gradients on.
    if (options_.rule == FreezingRule::kRandom) {
      return frozen(step) != frozen(step - 1) ? cost::Announced::kWork : cost::Announced::kNothing;
    }
    return prefix(step) != prefix(step - 1) ? cost::Announced::kKnown : cost::Announced::kNothing;
  }

 private:
  // Returns the steps at which blocks freeze in a drawn order, at even distances up to the end of
  // the run.
  std::vector<std::int64_t> random_steps(int blocks, std::uint64_t seed) const {
    std::vector<int> order(static_cast<std::size_t>(blocks));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    Rng rng(mix_key({kFreezingOrder, seed}));
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
    std::vector<std::int64_t> at(order.size(), steps_);
    const int max = max_blocks(options_, blocks);
    for (int i = 0; i < max; ++i) {
      const double share = static_cast<double>(i + 1) / (max + 1);
      const auto step = static_cast<std::int64_t>(share * static_cast<double>(steps_));
      at[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] =
          step - step % options_.check_every;
    }
    return at;
  }

  int frozen(std::int64_t step) const {
    const auto now = std::min(step, steps_ - 1);
    return static_cast<int>(std::count_if(freezes_.begin(), freezes_.end(),
                                          [&](std::int64_t at) { return at <= now; }));
  }

  int prefix(std::int64_t step) const {
    if (options_.rule == FreezingRule::kSchedule) {
      // The share refers to the layers of the model with a whole head.
      const int slices = static_cast<int>(dense_.shape.head_slices);
      return frozen_layers(options_.schedule, step, steps_, dense_.size() - slices + 1);
    }
    const int blocks = frozen(step);
    return blocks == 0 ? 0 : 1 + 2 * blocks;  // with the embedding
  }

  cost::ModelCost freeze_blocks(std::int64_t step) const {
    const auto now = std::min(step, steps_ - 1);
    cost::ModelCost model = dense_.costs;
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
      if (dense_.block[i] == kNoBlock) continue;
      if (freezes_[static_cast<std::size_t>(dense_.block[i])] > now) continue;
      cost::LayerCost& layer = model.layers[i];
      layer.frozen = true;
      layer.backward_weight_s = layer.update_s = 0;
      layer.gradient_bytes = layer.optimizer_bytes = Bytes{0};
    }
    return model;
  }

  FreezingOptions options_;
  DenseModel dense_;
  std::int64_t steps_;
  std::vector<std::int64_t> freezes_;  // by block; of the rules that freeze blocks
};

}  // namespace

std::vector<std::int64_t> freezing_steps(const FreezingOptions& options, int blocks,
                                         std::int64_t steps, std::uint64_t seed) {
  DYNMO_CHECK(check(options).has_value(), "valid freezing options");
  DYNMO_CHECK(blocks >= 1 && steps >= 1, "blocks and steps, got {}, {}", blocks, steps);
  const FreezingOptions& p = options;
  std::vector<std::int64_t> at(static_cast<std::size_t>(blocks), steps);
  std::int64_t before = 0;  // a block never freezes before its predecessor
  for (int block = 0; block < max_blocks(p, blocks); ++block) {
    before = std::max(before, converged_step(p, block, blocks, steps, seed));
    at[static_cast<std::size_t>(block)] = before;
  }
  return at;
}

Expected<std::unique_ptr<LoadModel>> make_freezing(const FreezingOptions& options,
                                                   const LoadInputs& inputs) {
  DYNMO_TRY(check(options));
  DYNMO_ASSIGN(DenseModel dense, make_dense("freezing", inputs));
  const std::int64_t most = std::max<std::int64_t>(kMaxChecks / inputs.shape.blocks, 1);
  if (inputs.steps / options.check_every > most) {
    return make_error(ErrorCode::kBadInput,
                      "freezing.check_every is {}, wanted at least {} in a run of {} steps",
                      options.check_every, inputs.steps / most + 1, inputs.steps);
  }
  return std::unique_ptr<LoadModel>(std::make_unique<Freezing>(options, std::move(dense), inputs));
}

SourceEntry freezing_source() { return source_entry<FreezingOptions, make_freezing>("freezing"); }

}  // namespace dynmo::dynamism
