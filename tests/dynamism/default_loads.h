// SPDX-License-Identifier: Apache-2.0
#pragma once

// The six load models at their defaults on one model, for tests and benchmarks that compare loads.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/device.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/freezing/options.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/registry.h"

namespace dynmo::dynamism {

// GPT of 32 blocks, hidden 1024, sequence 2048, a vocabulary of 50304; with `source` "moe" 8
// experts, 2 a token.
inline cost::TransformerShape default_shape(std::string_view source) {
  cost::TransformerShape shape = cost::transformer_shape(
      {.hidden = 1024, .blocks = 32, .sequence = 2048}, cost::Architecture::kGpt);
  if (source == "moe") {
    shape.experts = 8;
    shape.experts_per_token = 2;
  }
  return shape;
}

// A load model without its first and last layer.
class WithoutEnds final : public LoadModel {
 public:
  explicit WithoutEnds(std::unique_ptr<LoadModel> whole) : whole_(std::move(whole)) {}
  cost::ModelCost at(std::int64_t step) const override {
    cost::ModelCost model = whole_->at(step);
    model.layers.pop_back();
    model.layers.erase(model.layers.begin());
    return model;
  }
  bool counts_work() const override { return whole_->counts_work(); }
  cost::Announced announced_at(std::int64_t step) const override {
    return whole_->announced_at(step);
  }

 private:
  std::unique_ptr<LoadModel> whole_;
};

// Whether embedding and head, and the heads of early exits, are part of a model. A head of 50304
// words is worth 3.5 dense blocks of hidden size 1024 and is one layer here, so where the blocks
// get cheap it alone bounds the step: over 8 ranks at 1.3 to 1.5 x work / ranks for pruning,
// freezing and mixture of depths.
enum class Ends { kKept, kLeftOut };

struct NamedLoad {
  std::string name;
  std::unique_ptr<LoadModel> load;
};

// The six sources at their defaults on default_shape and `device`; but freezing by plasticity,
// whose steps differ between seeds, and exits by similarity and without a loss of the tokens that
// stay, so that their heads do one head's work together. At step 6000 of 10000 every one of them is
// in force, and all differ between seeds. kBadInput for a device that makes no sense.
inline Expected<std::vector<NamedLoad>> default_loads(const cost::Device& device,
                                                      std::uint64_t seed, Ends ends = Ends::kKept) {
  std::vector<NamedLoad> loads;
  for (const std::string& source : load_names()) {
    if (source == "none") continue;
    LoadOptions options;
    options.sources.get<FreezingOptions>().rule = FreezingRule::kPlasticity;
    auto& exits = options.sources.get<EarlyExitOptions>();
    exits.confidence = ExitConfidence::kSimilarity;
    exits.exit_loss = 0;
    options.inputs = {.shape = default_shape(source), .device = device, .seed = seed};
    if (ends == Ends::kLeftOut) options.inputs.shape.vocabulary = 1;
    DYNMO_ASSIGN(auto load, make_load_model(source, options));
    if (ends == Ends::kLeftOut) load = std::make_unique<WithoutEnds>(std::move(load));
    loads.push_back({.name = source, .load = std::move(load)});
  }
  return loads;
}

}  // namespace dynmo::dynamism
