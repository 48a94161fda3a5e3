// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/emulation.h"

#include <memory>
#include <mutex>
#include <utility>

#include "dynmo/cost/files.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/model/emulated.h"

namespace dynmo::train {
namespace {

using Costs = std::function<cost::ModelCost(std::int64_t)>;

Expected<Costs> costs_of(const Config::Emulated& emulated) {
  if (!emulated.profile.empty()) {
    DYNMO_ASSIGN(cost::ModelCost model, cost::read_profile(emulated.profile));
    return Costs([model = std::move(model)](std::int64_t) { return model; });
  }
  DYNMO_ASSIGN(auto trace, dynamism::read_trace(emulated.trace));
  // A load model is for one thread at a time; ranks may be threads.
  struct Shared {
    std::unique_ptr<dynamism::LoadModel> load;
    std::mutex mutex;
  };
  const auto shared = std::make_shared<Shared>();
  shared->load = std::move(trace);
  return Costs([shared](std::int64_t step) {
    const std::lock_guard lock(shared->mutex);
    return shared->load->at(step);
  });
}

}  // namespace

Expected<EmulatedModel> emulated_model(const Config& config) {
  DYNMO_ASSIGN(const Costs costs, costs_of(config.emulated));
  EmulatedModel emulated;
  emulated.boundary_shape = model::emulated_boundary(costs(0));
  DYNMO_ASSIGN(emulated.layers, model::make_emulated({.memory_scale = config.emulated.memory_scale,
                                                      .costs = costs}));
  return emulated;
}

Expected<cost::ModelCost> emulated_costs(const Config& config) {
  DYNMO_ASSIGN(const Costs costs, costs_of(config.emulated));
  return costs(0);
}

}  // namespace dynmo::train
