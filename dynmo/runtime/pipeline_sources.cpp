// SPDX-License-Identifier: Apache-2.0
// A pipeline's calls of its sources of dynamism, and the handling of their answers.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/kernels/sparse_break_even.h"
#include "dynmo/model/pruned.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/known_costs.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/transport/gather.h"

namespace dynmo::runtime {
namespace {

// Measures the times of compressed products. All ranks measure at once, so that the machine is as
// busy as in training. All ranks return the result of rank 0.
Expected<cost::ProductFit> measured_fit(transport::Transport& group, transport::Tag tag,
                                        const model::Model& model, std::int64_t tokens) {
  const cost::ProductFit own =
      kernels::product_fit(kernels::measure_products(model::compressible_matrices(model), tokens));
  DYNMO_ASSIGN(const auto all, transport::gather_numbers(
                                   group, tag, std::array{own.fixed, own.weights, own.segments}));
  const std::vector<double>& first = all.front();
  return cost::ProductFit{.fixed = first[0], .weights = first[1], .segments = first[2]};
}

}  // namespace

dynamism::Boundary Pipeline::boundary() {
  return {.step = state_.step,
          .model = model_,
          .states = state_.layers,
          .learning_rate = config::learning_rate(options_.learning_rate, state_.step),
          .imported = options_.imported,
          .sum = [this](std::vector<std::int64_t> own) { return sum_over_ranks(std::move(own)); },
          .probe = [this](const model::Model& layers, int times) { return probe(layers, times); }};
}

// Uses the program of the previous step. The plan has not changed since, and a forward pass does
// not depend on the frozen prefix.
Expected<void> Pipeline::probe(const model::Model& layers, int times) {
  DYNMO_CHECK(options_.probed, "a micro-batch for sources that probe");
  DYNMO_TRY(device_messages_.open(grid_, program_, options_.lane));
  const schedule::Schedule lowered = forward_only(state_.plan, times);
  std::optional<MicroBatch> read;
  const Batches batches = [&](std::int64_t, MicroBatchId) {
    if (!read) read = options_.probed();
    return *read;
  };
  StepInput input = round_input(lowered, batches, 0);
  input.frozen_layers = static_cast<int>(model_.size());
  input.pass = model::Pass::kValidation;
  input.first_micro_batch = 0;
  input.step_micro_batches = times;
  DYNMO_TRY(run_schedule(grid_.pipeline(), options_.lane, layers, input, state_.layers));
  return {};
}

Expected<std::vector<std::int64_t>> Pipeline::sum_over_ranks(std::vector<std::int64_t> own) {
  DYNMO_ASSIGN(const auto all,
               transport::all_gather(grid_.pipeline(), control(transport::Control::kSources),
                                     std::as_bytes(std::span(own))));
  std::ranges::fill(own, 0);
  for (const std::vector<std::byte>& given : all) {
    for (std::size_t i = 0; i < own.size(); ++i) {
      std::int64_t value = 0;
      std::memcpy(&value, given.data() + i * sizeof value, sizeof value);
      own[i] += value;
    }
  }
  return own;
}

// Shares the sizes of pruned layers, so that every rank knows the sizes of all and expects the same
// times of their products.
Expected<void> Pipeline::share_sizes() {
  std::string mine;
  for (const auto& [id, layer] : state_.layers) {
    const model::StateShape shape = model::shape_of(layer);
    if (!shape.pruned.empty()) mine += fmt::format("{} {} ", id, model::to_text(shape));
  }
  DYNMO_ASSIGN(
      const auto texts,
      transport::gather_texts(grid_.pipeline(), control(transport::Control::kSources), mine));
  state_.pruned.clear();
  for (const std::string& text : texts) {
    std::istringstream stream(text);
    int id = 0;
    std::string shape;
    while (stream >> id >> shape) {
      DYNMO_ASSIGN(state_.pruned[LayerId(id)], model::parse_shape(shape));
    }
  }
  const bool compressed = std::ranges::any_of(state_.pruned, [](const auto& layer) {
    return std::ranges::any_of(layer.second.pruned,
                               [](const auto& matrix) { return matrix.second.compressed; });
  });
  if (compressed && !state_.product_fit) {
    const std::vector<std::int64_t>& shape = options_.boundary_shape;  // B T D
    DYNMO_ASSIGN(state_.product_fit,
                 measured_fit(grid_.world(), control(transport::Control::kSources), model_,
                              shape[0] * shape[1]));
  }
  decisions_.know(known_costs(model_, options_, state_.pruned,
                              state_.product_fit.value_or(cost::ProductFit())));
  return {};
}

// Sets the layers' work in the last step, as the sources count it, equal on all ranks.
void Pipeline::count_work(const dynamism::Outcome& outcome,
                          std::vector<cost::LayerSample>& layers) {
  const std::vector<double> work = dynamism::work(state_.sources, boundary(), outcome);
  for (std::size_t i = 0; i < work.size(); ++i) layers[i].work = work[i];
}

// Asks the sources, once before each step.
Expected<void> Pipeline::ask_sources() {
  if (asked_.step == state_.step) return {};
  state_.asked = true;
  if (!state_.sources.empty()) order_changes();
  DYNMO_ASSIGN(const dynamism::Change change, dynamism::before_step(state_.sources, boundary()));
  const int frozen = change.frozen_layers.value_or(state_.frozen_layers);
  // The first plan of a run already knows the changes before it.
  const bool news = asked_.goes_on || asked_.once();
  auto announced = cost::Announced::kNothing;
  if (news && frozen != state_.frozen_layers) announced = cost::Announced::kKnown;
  if (news && change.sizes) announced = cost::Announced::kPredicted;
  if (news && change.work) announced = cost::Announced::kWork;
  if (change.sizes || (!asked_.once() && !state_.sources.empty())) DYNMO_TRY(share_sizes());
  decisions_.announce(announced, state_.step);
  asked_.step = state_.step;
  state_.frozen_layers = frozen;
  for (const auto& [id, layer] : state_.layers) {
    if (layer.frozen) times_.update_s[id] = 0;
  }
  return {};
}

// Asks the sources, for calls before the first step.
Expected<void> Pipeline::ask_sources_first() {
  if (asked_.once()) return {};
  const int frozen = state_.frozen_layers;
  DYNMO_TRY(ask_sources());
  return frozen == state_.frozen_layers ? Expected<void>() : rebuild();
}

// Remakes the program with the layers that are recomputed now. If the cut cannot hold layers that
// train again, the next decision finds another one.
Expected<void> Pipeline::rebuild() {
  auto layers = decisions_.recomputed_under(state_.plan, state_.frozen_layers);
  if (!layers && options_.balancing == Balancing::kAutomatic && costs()) {
    DYNMO_ASSIGN(plan::Judged judged, plan::judge(options_.recompute, state_.plan,
                                                  {*costs(), cluster(), options_.micro_batches}));
    layers = std::move(judged.recomputed);
  }
  if (!layers) return layers.error();
  remake_program(*std::move(layers));
  return {};
}

}  // namespace dynmo::runtime
