// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/recompute.h"

#include <algorithm>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/plan/recompute_memory_impl.h"

namespace dynmo::plan {
namespace {

using internal::Item;
using internal::RankMemory;

// Returns the least set of each rank, or all its layers if even these exceed the rank's memory.
LayerSet least_sets(const std::vector<RankMemory>& ranks, const cost::Cluster& cluster) {
  LayerSet layers;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const RankMemory& rank = ranks[r];
    const std::int64_t has = cluster.ranks[r].memory.value;
    std::vector<bool> chosen = rank.all();
    if (rank.peak(chosen) <= has) chosen = internal::least_time_set(rank, has);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      if (chosen[i]) layers.push_back(rank.items[i].layer);
    }
  }
  std::sort(layers.begin(), layers.end());
  return layers;
}

}  // namespace

LayerSet all_layers(const cost::ModelCost& model) {
  LayerSet layers;
  for (std::int32_t i = std::max(1, model.frozen_layers()); i < model.size(); ++i) {
    layers.emplace_back(i);
  }
  return layers;
}

Expected<Recompute> parse_recompute(std::string_view name) {
  if (name == "none") return Recompute::kNone;
  if (name == "whole") return Recompute::kWhole;
  if (name == "auto") return Recompute::kAuto;
  return make_error(ErrorCode::kBadInput, "'{}' is no choice, wanted none, whole or auto", name);
}

cost::ModelCost recomputed(cost::ModelCost model, const LayerSet& layers) {
  const int prefix = model.frozen_layers();
  for (const LayerId id : layers) {
    DYNMO_CHECK(id.value >= 0 && id.value < model.size(), "a layer below {}, got {}", model.size(),
                id);
    if (id.value < prefix) continue;
    cost::LayerCost& layer = model.layers[id.index()];
    layer.backward_input_s += layer.forward_s;
    layer.activation_bytes = internal::input_bytes(model, id.index());
  }
  return model;
}

Expected<std::vector<Bytes>> peak_memory(const Plan& plan, const cost::ModelCost& model,
                                         int micro_batches, const LayerSet& layers) {
  DYNMO_ASSIGN(const auto ranks, internal::memory_of(plan, model, micro_batches));
  std::vector<Bytes> peaks;
  for (const RankMemory& rank : ranks) {
    std::vector<bool> chosen;
    for (const Item& item : rank.items) {
      chosen.push_back(std::binary_search(layers.begin(), layers.end(), item.layer));
    }
    peaks.emplace_back(rank.peak(chosen));
  }
  return peaks;
}

Expected<Evaluation> evaluate_recomputed(const Plan& plan, const Costs& costs,
                                         const LayerSet& layers, sim::SimOptions options) {
  const auto& [model, cluster, micro_batches] = costs;
  DYNMO_ASSIGN(Evaluation evaluation,
               evaluate(plan, {recomputed(model, layers), cluster, micro_batches}, options));
  if (layers.empty()) return evaluation;
  DYNMO_ASSIGN(const std::vector<Bytes> peaks, peak_memory(plan, model, micro_batches, layers));
  for (std::size_t r = 0; r < peaks.size(); ++r) {
    sim::RankUsage& rank = evaluation.result.ranks[r];
    rank.peak_activation += peaks[r] - rank.peak_memory;
    rank.peak_memory = peaks[r];
  }
  return evaluation;
}

Expected<LayerSet> recomputed_layers(Recompute choice, const Plan& plan, const Costs& costs) {
  const auto& [model, cluster, micro_batches] = costs;
  if (choice == Recompute::kNone) return LayerSet();
  if (choice == Recompute::kWhole) return all_layers(model);
  DYNMO_ASSIGN(const auto ranks, internal::memory_of(plan, model, micro_batches));
  if (plan.ranks != cluster.size()) {
    return make_error(ErrorCode::kBadInput,
                      "the plan is for {} ranks, the cluster has {}: make a plan for this cluster",
                      plan.ranks, cluster.size());
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const Bytes has = cluster.ranks[r].memory;
    const Bytes minimum{ranks[r].peak(ranks[r].all())};
    if (minimum <= has) continue;
    return make_error(ErrorCode::kInfeasible,
                      "plan {} takes {} bytes ({}) on rank {} with every layer recomputed, which "
                      "has {} bytes ({}): give it that much, or use more ranks or smaller "
                      "micro-batches",
                      to_string(plan), minimum.value, format_bytes(minimum), r, has.value,
                      format_bytes(has));
  }
  return least_sets(ranks, cluster);
}

Expected<Judged> judge(Recompute choice, const Plan& plan, const Costs& costs) {
  Judged judged;
  if (choice != Recompute::kWhole) {
    DYNMO_ASSIGN(judged.evaluation, evaluate(plan, costs));
    if (choice == Recompute::kNone || fits_memory(judged.evaluation.result, costs.cluster)) {
      return judged;
    }
    DYNMO_ASSIGN(const auto ranks, internal::memory_of(plan, costs.model, costs.micro_batches));
    judged.recomputed = least_sets(ranks, costs.cluster);
  } else {
    judged.recomputed = all_layers(costs.model);
  }
  DYNMO_ASSIGN(judged.evaluation, evaluate_recomputed(plan, costs, judged.recomputed));
  return judged;
}

}  // namespace dynmo::plan
