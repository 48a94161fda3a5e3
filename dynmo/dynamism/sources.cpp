// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/sources.h"

#include <string>
#include <utility>

#include "dynmo/core/nearest.h"
#include "dynmo/dynamism/dense_impl.h"

namespace dynmo::dynamism {
namespace {

class Static final : public LoadModel {
 public:
  explicit Static(cost::ModelCost model) : model_(std::move(model)) {}
  cost::ModelCost at(std::int64_t /*step*/) const override { return model_; }
  bool changes_at(std::int64_t /*step*/) const override { return false; }

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
  bool changes_at(std::int64_t step) const override { return whole_->changes_at(step); }

 private:
  std::unique_ptr<LoadModel> whole_;
};

}  // namespace

Expected<std::unique_ptr<LoadModel>> make_static_load(cost::ModelCost model) {
  DYNMO_TRY(cost::validate(model));
  return std::unique_ptr<LoadModel>(std::make_unique<Static>(std::move(model)));
}

Expected<std::unique_ptr<LoadModel>> make_load_model(std::string_view source,
                                                     const LoadOptions& options) {
  const LoadInputs& inputs = options.inputs;
  if (source == "none") {
    DYNMO_ASSIGN(DenseModel dense, make_dense(source, inputs));
    return make_static_load(std::move(dense.costs));
  }
  if (source == "moe") return make_moe(options.moe, inputs);
  if (source == "pruning") return make_pruning(options.pruning, inputs);
  if (source == "freezing") return make_freezing(options.freezing, inputs);
  if (source == "sparse-attention") {
    return make_sparse_attention(options.sparse_attention, inputs);
  }
  if (source == "early-exit") return make_early_exit(options.early_exit, inputs);
  if (source == "mixture-of-depths") {
    return make_mixture_of_depths(options.mixture_of_depths, inputs);
  }
  const std::vector<std::string> known(kLoadSources.begin(), kLoadSources.end());
  return make_error(ErrorCode::kBadInput, "unknown load model '{}'{}", source,
                    suggestion(source, known));
}

cost::TransformerShape default_shape(std::string_view source) {
  cost::TransformerShape shape;
  shape.blocks = 32;
  shape.hidden = 1024;
  shape.heads = shape.kv_heads = 16;
  shape.head_size = 64;
  shape.intermediate = 4096;
  shape.vocabulary = 50304;
  shape.learned_positions = shape.norm_biases = true;
  shape.qkv_biases = shape.projection_biases = true;
  shape.positions = shape.sequence = 2048;
  if (source == "moe") {
    shape.experts = 8;
    shape.experts_per_token = 2;
  }
  return shape;
}

Expected<std::vector<NamedLoad>> default_loads(const cost::Device& device, std::uint64_t seed,
                                               Ends ends) {
  std::vector<NamedLoad> loads;
  for (const std::string_view source : kLoadSources) {
    if (source == "none") continue;
    LoadOptions options;
    options.inputs = {.shape = default_shape(source), .device = device, .seed = seed};
    if (ends == Ends::kLeftOut) options.inputs.shape.vocabulary = 1;
    DYNMO_ASSIGN(auto load, make_load_model(source, options));
    if (ends == Ends::kLeftOut) load = std::make_unique<WithoutEnds>(std::move(load));
    loads.push_back({.name = source, .load = std::move(load)});
  }
  return loads;
}

}  // namespace dynmo::dynamism
