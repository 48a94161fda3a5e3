// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/registry.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>

#include "dynmo/core/nearest.h"
#include "dynmo/dynamism/dense_impl.h"
#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/freezing/options.h"

namespace dynmo::dynamism {

#define DYNMO_SOURCE(name) SourceEntry name##_source();
#include "dynmo/dynamism/sources.def"
#undef DYNMO_SOURCE

namespace {

class Static final : public LoadModel {
 public:
  explicit Static(cost::ModelCost model) : model_(std::move(model)) {}
  cost::ModelCost at(std::int64_t /*step*/) const override { return model_; }
  cost::Announced announced_at(std::int64_t /*step*/) const override {
    return cost::Announced::kNothing;
  }

 private:
  cost::ModelCost model_;
};

class WithoutEnds final : public LoadModel {
 public:
  explicit WithoutEnds(std::unique_ptr<LoadModel> whole) : whole_(std::move(whole)) {}
  cost::ModelCost at(std::int64_t step) const override {
    cost::ModelCost model = whole_->at(step);
    model.layers.pop_back();
    model.layers.erase(model.layers.begin());
    return model;
  }
  cost::Announced announced_at(std::int64_t step) const override {
    return whole_->announced_at(step);
  }

 private:
  std::unique_ptr<LoadModel> whole_;
};

}  // namespace

Expected<std::unique_ptr<LoadModel>> make_static_load(cost::ModelCost model) {
  DYNMO_TRY(cost::validate(model));
  return std::unique_ptr<LoadModel>(std::make_unique<Static>(std::move(model)));
}

std::vector<SourceEntry> built_in_sources() {
  std::vector<SourceEntry> sources;
#define DYNMO_SOURCE(name)            \
  sources.push_back(name##_source()); \
  sources.back().trains = true;
#include "dynmo/dynamism/sources.def"
#undef DYNMO_SOURCE
  return sources;
}

std::vector<std::string> load_names(const SourceOptions& sources) {
  std::vector<std::string> names = {"none"};
  for (const std::string_view table : sources.tables()) {
    std::replace_copy(table.begin(), table.end(), std::back_inserter(names.emplace_back()), '_',
                      '-');
  }
  return names;
}

Expected<std::unique_ptr<LoadModel>> make_load_model(std::string_view source,
                                                     const LoadOptions& options) {
  if (source == "none") {
    DYNMO_ASSIGN(DenseModel dense, make_dense(source, options.inputs));
    return make_static_load(std::move(dense.costs));
  }
  const std::vector<std::string> names = load_names(options.sources);
  const auto found = std::find(names.begin(), names.end(), source);
  if (found == names.end()) {
    return make_error(ErrorCode::kBadInput, "unknown load model '{}'{}", source,
                      suggestion(source, names));
  }
  const auto index = static_cast<std::size_t>(found - names.begin()) - 1;
  return options.sources.make_load(options.sources.tables()[index], options.inputs);
}

cost::TransformerShape default_shape(std::string_view source) {
  cost::TransformerShape shape = cost::transformer_shape(
      {.hidden = 1024, .blocks = 32, .sequence = 2048}, cost::Architecture::kGpt);
  if (source == "moe") {
    shape.experts = 8;
    shape.experts_per_token = 2;
  }
  return shape;
}

Expected<std::vector<NamedLoad>> default_loads(const cost::Device& device, std::uint64_t seed,
                                               Ends ends) {
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
