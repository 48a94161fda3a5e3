// SPDX-License-Identifier: Apache-2.0
// A trace of loads that is taken replays to valid costs, and records back to a trace that replays
// the same.
#include "dynmo/dynamism/load_log.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

class Rising : public dynamism::LoadModel {
 public:
  [[nodiscard]] cost::ModelCost at(std::int64_t step) const override {
    cost::LayerCost layer;
    layer.name = "block";
    layer.forward_s = 1e-3 * static_cast<double>(step + 1);
    layer.backward_input_s = layer.backward_weight_s = 1e-3;
    layer.parameter_bytes = Bytes{4096};
    layer.frozen = step >= 2;
    return {.layers = {layer, layer}};
  }
  [[nodiscard]] cost::Announced announced_at(std::int64_t step) const override {
    return step == 2 ? cost::Announced::kWork : cost::Announced::kNothing;
  }
};

}  // namespace

Outcome run_target(std::string_view text) {
  const auto load = dynamism::parse_trace(text, "loads.jsonl");
  if (!load) return refused(load.error());
  constexpr std::int64_t kSteps = 6;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto valid = cost::validate((*load)->at(step));
    DYNMO_CHECK(valid.has_value(), "valid costs, got {}", valid.error().message);
  }
  const auto again = dynamism::trace_text(**load, kSteps, 1);
  DYNMO_CHECK(again.has_value(), "a trace that records again, got {}", again.error().message);
  const auto replayed = dynamism::parse_trace(*again, "again");
  DYNMO_CHECK(replayed.has_value(), "a trace that reads back, got {}", replayed.error().message);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    DYNMO_CHECK((*load)->at(step) == (*replayed)->at(step), "the same costs at step {}", step);
  }
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {*dynamism::trace_text(Rising(), 4, 1), *dynamism::trace_text(Rising(), 4, 3)};
}

}  // namespace dynmo::fuzz
