// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/pruning/load.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/cost/product_fit.h"
#include "dynmo/dynamism/dense_impl.h"
#include "dynmo/dynamism/source_entry.h"

namespace dynmo::dynamism {
namespace {

constexpr std::uint64_t kMatrix = 0x5052554E;  // key of the stds of matrices

double kept(const WeightGroup& group, double threshold, double min) {
  return std::max(std::erfc(threshold / (group.std * std::numbers::sqrt2)), min);
}

double kept_units(const WeightGroup& group, double threshold, double spread, double min) {
  const double above = (threshold - group.std) / (spread * group.std * std::numbers::sqrt2);
  return std::max(std::erfc(above) / 2, min);
}

// Returns the densities at the threshold up to `high` that leaves 1 - `sparsity` of all.
// `share(group, threshold)` falls from 1 to the least density.
template <typename Share>
std::vector<double> densities_by(std::span<const WeightGroup> groups, double sparsity, double high,
                                 Share share) {
  double all = 0;
  for (const WeightGroup& group : groups) all += group.weights;
  double low = 0;
  for (int i = 0; i < 200 && low < high; ++i) {
    const double middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) break;
    double left = 0;
    for (const WeightGroup& group : groups) left += group.weights * share(group, middle);
    (left > (1 - sparsity) * all ? low : high) = middle;
  }
  std::vector<double> densities;
  for (const WeightGroup& group : groups) {
    densities.push_back(sparsity > 0 ? share(group, high) : 1);
  }
  return densities;
}

// The matrices of a sublayer that are pruned. Some read the residual stream (QKV; up and gate). One
// writes to it (attention's output; down).
struct Matrices {
  int layer = 0;
  std::array<WeightGroup, 2> groups;  // input, output
  [[nodiscard]] double weights() const { return groups[0].weights + groups[1].weights; }
};

class Pruning final : public LoadModel {
 public:
  Pruning(const PruningOptions& options, DenseModel dense, std::uint64_t seed)
      : options_(options), dense_(std::move(dense)) {
    for (int layer = 0; layer < dense_.size(); ++layer) {
      if (dense_.block[static_cast<std::size_t>(layer)] != kNoBlock) add_matrices(layer, seed);
    }
  }

  cost::ModelCost at(std::int64_t step) const override {
    const double sparsity = sparsity_at(options_, step);
    if (cached_.layers.empty() || sparsity != cached_sparsity_) {
      cached_ = pruned(sparsity);
      cached_sparsity_ = sparsity;
    }
    return cached_;
  }

  cost::Announced announced_at(std::int64_t step) const override {
    const bool pruned = step > 0 && sparsity_at(options_, step) != sparsity_at(options_, step - 1);
    return pruned ? cost::Announced::kPredicted : cost::Announced::kNothing;
  }

 private:
  void add_matrices(int layer, std::uint64_t seed) {
    const auto& shape = dense_.shape;
    const auto h = static_cast<double>(shape.hidden);
    Matrices matrices = {.layer = layer, .groups = {}};
    auto& [input, output] = matrices.groups;
    if (dense_.kind(layer) == cost::LayerKind::kAttention) {
      const auto query = static_cast<double>(shape.heads * shape.head_size);
      input.weights = h * (query + 2 * static_cast<double>(shape.kv_heads * shape.head_size));
      output.weights = h * query;
    } else {
      const double each =
          h * static_cast<double>(shape.intermediate * std::max<std::int64_t>(shape.experts, 1));
      input.weights = each * (shape.gated_mlp ? 2 : 1);
      output.weights = each;
    }
    const int block = dense_.block[static_cast<std::size_t>(layer)];
    const double depth = shape.blocks > 1 ? static_cast<double>(block) / (shape.blocks - 1) : 0;
    Rng rng(mix_key({kMatrix, seed, static_cast<std::uint64_t>(layer)}));
    for (WeightGroup& group : matrices.groups) {
      group.std =
          std::pow(options_.depth_ratio, depth) * std::exp(options_.matrix_spread * rng.normal());
    }
    output.std *= options_.output_scale;
    matrices_.push_back(matrices);
  }

  // Returns the costs without the removed units. Hidden units and groups of heads are two pools.
  cost::ModelCost without_units(double sparsity) const {
    const cost::TransformerShape& shape = dense_.shape;
    cost::ModelCost model = dense_.costs;
    for (const bool heads : {true, false}) {
      const std::int64_t count =
          std::max<std::int64_t>(heads ? shape.kv_heads : shape.intermediate, 1);
      std::vector<WeightGroup> groups;
      std::vector<std::size_t> layers;
      for (const Matrices& m : matrices_) {
        if ((dense_.kind(m.layer) == cost::LayerKind::kAttention) != heads) continue;
        groups.push_back({.weights = static_cast<double>(count), .std = m.groups[0].std});
        layers.push_back(static_cast<std::size_t>(m.layer));
      }
      const double least = std::max(1 - options_.max_sparsity, 1 / static_cast<double>(count));
      const std::vector<double> densities =
          unit_densities(groups, sparsity, least, options_.unit_spread);
      for (std::size_t i = 0; i < layers.size(); ++i) {
        std::int64_t units =
            std::max<std::int64_t>(1, std::llround(densities[i] * static_cast<double>(count)));
        const std::int64_t multiple = heads ? 1 : options_.unit_multiple;
        units = std::min(count, (units + multiple - 1) / multiple * multiple);
        model.layers[layers[i]] = cost_with(
            layers[i], units, static_cast<double>(units) / static_cast<double>(count), heads);
      }
    }
    return model;
  }

  // Returns the cost of a layer with fewer units.
  cost::LayerCost cost_with(std::size_t layer, std::int64_t units, double share, bool heads) const {
    const cost::TransformerShape& shape = dense_.shape;
    const cost::LayerWork& whole = dense_.work[layer];
    cost::LayerWork work = whole;
    if (shape.halves.empty()) {
      cost::TransformerShape smaller = shape;
      if (heads) {
        smaller.heads = shape.heads / shape.kv_heads * units;
        smaller.kv_heads = units;
      } else {
        smaller.intermediate = units;
      }
      work = cost::transformer_work(smaller, dense_.device.bytes_per_element)[layer];
    } else {  // blocks of several kinds: scales only the products
      work.matrix_flops *= share;
      work.core_flops *= share;
      work.parameters -= (1 - share) * whole.product_parameters;
      work.product_parameters *= share;
    }
    cost::LayerCost cost = dense_.cost_of(work);
    cost.product_time = share;
    return cost;
  }

  cost::ModelCost pruned(double sparsity) const {
    if (options_.form == PruningForm::kUnits) return without_units(sparsity);
    std::vector<WeightGroup> groups;
    for (const Matrices& m : matrices_)
      groups.insert(groups.end(), m.groups.begin(), m.groups.end());
    const std::vector<double> densities =
        global_densities(groups, sparsity, 1 - options_.max_sparsity);
    cost::ModelCost model = dense_.costs;
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      const auto layer = static_cast<std::size_t>(matrices_[i].layer);
      model.layers[layer] = cost_of(matrices_[i], {densities[2 * i], densities[2 * i + 1]});
    }
    return model;
  }

  cost::LayerCost cost_of(const Matrices& matrices, const std::array<double, 2>& density) const {
    cost::LayerWork work = dense_.work[static_cast<std::size_t>(matrices.layer)];
    double time = 0;     // of the products, relative to dense
    double weights = 0;  // held
    double indices = 0;
    for (std::size_t g = 0; g < 2; ++g) {
      const double all = matrices.groups[g].weights;
      // One matrix [weights / hidden, hidden], in which experts and projections are stacked.
      const std::int64_t columns = dense_.shape.hidden;
      const double products = options_.product_fit.time(cost::even_occupancy(
          density[g], std::llround(all / static_cast<double>(columns)), columns));
      const bool sparse = products < 1;
      time += all / matrices.weights() * (sparse ? products : 1);
      weights += all * (sparse ? density[g] : 1);
      indices += sparse ? all * density[g] : 0;
    }
    work.matrix_flops *= time;
    work.parameters -= matrices.weights() - weights;
    work.product_parameters -= matrices.weights() - weights;
    cost::LayerCost cost = dense_.cost_of(work);
    cost.product_time = time;
    cost.parameter_bytes += Bytes{std::llround(indices * options_.index_bytes)};
    return cost;
  }

  PruningOptions options_;
  DenseModel dense_;
  std::vector<Matrices> matrices_;
  mutable double cached_sparsity_ = 0;
  mutable cost::ModelCost cached_;
};

}  // namespace

double sparsity_at(const PruningOptions& p, std::int64_t step) {
  DYNMO_CHECK(p.every >= 1, "valid pruning options, got every = {}", p.every);
  DYNMO_CHECK(step >= 0, "a step of 0 or more, got {}", step);
  if (step < p.start) return 0;
  const std::int64_t reached = std::min(step - (step - p.start) % p.every, p.end);
  if (reached >= p.end) return p.final_sparsity;
  const double left =
      1 - static_cast<double>(reached - p.start) / static_cast<double>(p.end - p.start);
  return p.final_sparsity + (p.initial_sparsity - p.final_sparsity) * left * left * left;
}

std::vector<double> global_densities(std::span<const WeightGroup> groups, double sparsity,
                                     double min_density) {
  DYNMO_CHECK(1 - sparsity >= min_density - 1e-12, "sparsity {} to leave densities of {}", sparsity,
              min_density);
  double widest = 0;
  for (const WeightGroup& group : groups) {
    DYNMO_CHECK(group.std > 0, "a std above 0, got {}", group.std);
    widest = std::max(widest, group.std);
  }
  // erfc(40 / sqrt 2) is 0 in double.
  return densities_by(groups, sparsity, 40 * widest,
                      [=](const WeightGroup& group, double threshold) {
                        return kept(group, threshold, min_density);
                      });
}

std::vector<double> unit_densities(std::span<const WeightGroup> groups, double sparsity,
                                   double min_density, double spread) {
  DYNMO_CHECK(min_density > 0 && min_density <= 1 && spread > 0,
              "a density of (0, 1] and a spread above 0, got {} and {}", min_density, spread);
  double widest = 0;
  for (const WeightGroup& group : groups) widest = std::max(widest, group.std);
  return densities_by(groups, std::min(sparsity, 1 - min_density), widest * (1 + 40 * spread),
                      [=](const WeightGroup& group, double threshold) {
                        return kept_units(group, threshold, spread, min_density);
                      });
}

Expected<std::unique_ptr<LoadModel>> make_pruning(const PruningOptions& options,
                                                  const LoadInputs& inputs) {
  DYNMO_TRY(check(options));
  DYNMO_ASSIGN(DenseModel dense, make_dense("pruning", inputs));
  return std::unique_ptr<LoadModel>(
      std::make_unique<Pruning>(options, std::move(dense), inputs.seed));
}

SourceEntry pruning_source() { return source_entry<PruningOptions, make_pruning>("pruning"); }

}  // namespace dynmo::dynamism
