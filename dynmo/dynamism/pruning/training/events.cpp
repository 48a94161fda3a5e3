// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/pruning/load.h"
#include "dynmo/dynamism/pruning/training/events_impl.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/model/pruned.h"

namespace dynmo::dynamism {
namespace {

// Returns the std of the distribution from which a matrix is drawn.
float nominal_std(const model::ParameterSpec& spec) {
  return spec.init_std > 0 ? static_cast<float>(spec.init_std) : 1.0F;
}

// Returns the root mean square of a matrix's weights, or nominal_std() if all are 0. It is summed
// in the order of the weights, so that it has the same bits everywhere.
float measured_std(const OwnMatrix& matrix) {
  const at::Tensor kept = weights_on_host(matrix).contiguous();
  const std::span weights(kernels::host_data<const float>(kept),
                          static_cast<std::size_t>(kept.numel()));
  double squares = 0;
  for (const float w : weights) squares += static_cast<double>(w) * static_cast<double>(w);
  const auto std = static_cast<float>(std::sqrt(squares / static_cast<double>(matrix.weights())));
  return std > 0 && std::isfinite(std) ? std : nominal_std(matrix.spec);
}

}  // namespace

std::vector<OwnMatrix> own_matrices(const Boundary& boundary, OwnLayers layers) {
  std::vector<OwnMatrix> own;
  std::size_t number = 0;
  for (std::size_t l = 0; l < boundary.model.size(); ++l) {
    const auto found = boundary.states.find(LayerId(static_cast<std::int32_t>(l)));
    const std::vector<model::ParameterSpec> specs = boundary.model[l]->parameters();
    for (std::size_t p = 0; p < specs.size(); ++p) {
      if (!specs[p].prunable) continue;
      ++number;
      if (found == boundary.states.end()) continue;
      if (layers == OwnLayers::kTrained && found->second.frozen) continue;
      own.push_back(
          {.number = number - 1, .layer = &found->second, .parameter = p, .spec = specs[p]});
    }
  }
  return own;
}

at::Tensor weights_on_host(const OwnMatrix& matrix) {
  return model::kept_values(matrix.layer->parameters[matrix.parameter]).to(at::kCPU, at::kFloat);
}

// All ranks get the same stds, although each has only some of the matrices.
Expected<void> InitialStd::measure_if_imported(const Boundary& boundary) {
  if (boundary.step != 0 || !boundary.imported || magnitude_ != Magnitude::kScaled) return {};
  std::vector<std::int64_t> bits;
  for (const auto& layer : boundary.model) {
    for (const model::ParameterSpec& spec : layer->parameters()) {
      if (spec.prunable) bits.push_back(0);
    }
  }
  for (const OwnMatrix& matrix : own_matrices(boundary, OwnLayers::kAll)) {
    bits[matrix.number] = std::bit_cast<std::int32_t>(measured_std(matrix));
  }
  DYNMO_ASSIGN(bits, boundary.sum(std::move(bits)));
  measured_.clear();
  for (const std::int64_t all : bits) {
    measured_.push_back(std::bit_cast<float>(static_cast<std::int32_t>(all)));
  }
  return {};
}

Expected<float> InitialStd::of(std::size_t number, const model::ParameterSpec& spec) const {
  if (magnitude_ != Magnitude::kScaled) return 1.0F;
  if (measured_.empty()) return nominal_std(spec);
  if (number < measured_.size()) return measured_[number];
  return make_error(ErrorCode::kBadInput,
                    "the state of source 'pruning' has the std of {} matrices, but the model has "
                    "more; wanted the checkpoint of this model",
                    measured_.size());
}

Json InitialStd::state() const {
  if (measured_.empty()) return nullptr;
  return {{"initial_std", measured_}};
}

Expected<void> InitialStd::restore(const Json& state) {
  const auto found = state.find("initial_std");
  const auto is_std = [](const Json& x) { return x.is_number() && x.get<float>() > 0; };
  if (found == state.end() || !found->is_array() || !std::ranges::all_of(*found, is_std)) {
    return make_error(ErrorCode::kBadInput,
                      "the checkpoint holds a state of source 'pruning' without initial_std, "
                      "wanted an array of numbers above 0");
  }
  measured_ = found->get<std::vector<float>>();
  return {};
}

PruningEvents::PruningEvents(const PruningOptions& options)
    : options_(options), initial_std_(options.magnitude) {
  const auto valid = dynamism::check(options);
  DYNMO_CHECK(valid.has_value(), "valid options: {}", valid.error().message);
}

Expected<Change> PruningEvents::before_step(const Boundary& boundary) {
  const std::int64_t step = step_ = boundary.step;
  masks_.clear();
  DYNMO_TRY(initial_std_.measure_if_imported(boundary));
  const bool event = step >= options_.start && step <= options_.end &&
                     (step - options_.start) % options_.every == 0 &&
                     sparsity_at(options_, step) > 0;
  if (!event) return Change{};
  DYNMO_ASSIGN(const Masks masks, prune(boundary));
  if (!masks) return Change{};
  DYNMO_ASSIGN(const Digest digest, digest_of_masks(*masks, boundary.sum));
  masks_ = digest.hex();
  return Change{.sizes = true};
}

Json PruningEvents::figures() const {
  Json figures = {{"sparsity", sparsity_at(options_, step_)}};
  if (!left_.is_null()) figures.update(left_);
  if (!masks_.empty()) figures["masks"] = masks_;
  return figures;
}

std::string PruningEvents::progress() const {
  return fmt::format("pruned {:.1f} %", 100 * sparsity_at(options_, step_));
}

}  // namespace dynmo::dynamism
