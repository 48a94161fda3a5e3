// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "dynmo/cost/files.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/dynamism/registry.h"
#include "dynmo/model/emulated/layer.h"
#include "dynmo/train/setup/run_model.h"

namespace dynmo::train {
namespace {

// A load model with a lock, because ranks may be threads. Layers take `time_scale` times as long.
class SharedLoad {
 public:
  SharedLoad(std::unique_ptr<dynamism::LoadModel> load, double time_scale)
      : load_(std::move(load)), time_scale_(time_scale) {}
  cost::ModelCost at(std::int64_t step) const {
    cost::ModelCost costs = recorded_at(step);
    for (cost::LayerCost& layer : costs.layers) {
      layer.forward_s *= time_scale_;
      layer.backward_input_s *= time_scale_;
      layer.backward_weight_s *= time_scale_;
    }
    return costs;
  }
  bool changes_at(std::int64_t step) const {
    const std::lock_guard lock(mutex_);
    return load_->announced_at(step) != cost::Announced::kNothing;
  }

 private:
  cost::ModelCost recorded_at(std::int64_t step) const {
    const std::lock_guard lock(mutex_);
    return load_->at(step);
  }

  std::unique_ptr<dynamism::LoadModel> load_;
  double time_scale_;
  mutable std::mutex mutex_;
};

// Announces the changes of a trace. Sleeping layers are never frozen: their new times have to be
// measured.
class TraceSource final : public dynamism::Source {
 public:
  explicit TraceSource(std::shared_ptr<const SharedLoad> load) : load_(std::move(load)) {}
  std::string_view name() const override { return "emulated"; }
  Expected<dynamism::Change> before_step(const dynamism::Boundary& boundary) override {
    return dynamism::Change{.work = load_->changes_at(boundary.step)};
  }
  // Returns the seconds that each layer sleeps, which are its work.
  std::vector<double> work(const dynamism::Boundary& boundary,
                           const dynamism::Outcome& /*outcome*/) const override {
    std::vector<double> seconds;
    for (const cost::LayerCost& layer : load_->at(boundary.step).layers) {
      seconds.push_back(layer.forward_s + layer.backward_input_s + layer.backward_weight_s);
    }
    return seconds;
  }

 private:
  std::shared_ptr<const SharedLoad> load_;
};

cost::ModelCost as_slept(cost::ModelCost model) {
  for (cost::LayerCost& layer : model.layers) {
    layer.update_s = 0;
    layer.frozen = false;
  }
  return model;
}

}  // namespace

Expected<RunModel> emulated_model(const config::Config& config, bool dense) {
  const config::Config::Emulated& given = config.emulated;
  std::unique_ptr<dynamism::LoadModel> recorded;
  if (given.profile.empty()) {
    DYNMO_ASSIGN(recorded, dynamism::read_trace(given.trace));
  } else {
    DYNMO_ASSIGN(cost::ModelCost model, cost::read_profile(given.profile));
    DYNMO_ASSIGN(recorded, dynamism::make_static_load(std::move(model)));
  }
  if (dense) {
    DYNMO_ASSIGN(recorded, dynamism::make_static_load(recorded->at(0)));
  }
  const auto load = std::make_shared<const SharedLoad>(std::move(recorded), given.time_scale);
  RunModel emulated;
  emulated.first_costs = load->at(0);
  emulated.boundary_shape = model::emulated_boundary(emulated.first_costs);
  DYNMO_ASSIGN(emulated.layers,
               model::make_emulated({.memory_scale = given.memory_scale,
                                     .costs = [load](std::int64_t s) { return load->at(s); }}));
  emulated.given_costs = [load](std::int64_t step) { return as_slept(load->at(step)); };
  // One source, which announces the changes of a trace.
  emulated.make_sources = [load](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(std::make_unique<TraceSource>(load));
    return sources;
  };
  return emulated;
}

}  // namespace dynmo::train
