// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/inputs.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/nearest.h"
#include "dynmo/model/memory.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/process/hook.h"
#include "dynmo/process/host_memory.h"
#include "dynmo/train/setup/first_plan.h"
#include "dynmo/train/setup/measured_keys.h"

namespace dynmo::train {
namespace {

const std::vector<std::string> kComparable = {"dense", "static", "balanced"};

Expected<void> check_compared(const TrainOptions& options) {
  const std::vector<std::string>& names = options.compare;
  for (auto name = names.begin(); name != names.end(); ++name) {
    if (std::find(kComparable.begin(), kComparable.end(), *name) == kComparable.end()) {
      return make_error(ErrorCode::kBadInput, "{} '{}' is not a known run{}", options.names.compare,
                        *name, suggestion(*name, kComparable));
    }
    // Each has a folder of its name.
    if (std::find(names.begin(), name, *name) == name) continue;
    return make_error(ErrorCode::kBadInput, "{} names '{}' twice: wanted each run once",
                      options.names.compare, *name);
  }
  if (std::count(names.begin(), names.end(), "dense") > 0 && names.front() != "dense") {
    return make_error(ErrorCode::kBadInput, "{} names dense behind {}: wanted it first",
                      options.names.compare, names.front());
  }
  if (!names.empty() && options.config.elastic.enabled) {
    return make_error(ErrorCode::kBadInput,
                      "elastic.enabled is true with {}: wanted one of them; runs that are compared "
                      "keep their ranks",
                      options.names.compare);
  }
  if (!names.empty() && !options.config.balance.enabled) {
    return make_error(ErrorCode::kBadInput,
                      "balance.enabled is false with {}, where a run balances or not by its name: "
                      "wanted balanced left out, and no balance.enabled",
                      options.names.compare);
  }
  if (!options.resume || names.empty()) return {};
  return make_error(ErrorCode::kBadInput,
                    "{} with {}: wanted one of them; a comparison starts at step 0",
                    options.names.resume, options.names.compare);
}

}  // namespace

TrainOptions dense_of(const TrainOptions& options) {
  TrainOptions dense = options;
  dense.dense = true;
  dense.config.sources = dynamism::SourceOptions();
  dense.make_sources = nullptr;
  return dense;
}

Expected<Inputs> open_inputs(const TrainOptions& options) {
  DYNMO_ASSIGN(TokenBatches batches, TokenBatches::open(options.config));
  DYNMO_ASSIGN(RunModel model, make_model(options, batches.vocabulary()));
  TensorName name = tensor_names(model);
  return Inputs{std::move(batches), std::move(model), std::move(name)};
}

Expected<Inputs> check_inputs(const TrainOptions& options, int ranks) {
  DYNMO_TRY(validate(options.config));
  DYNMO_TRY(check_compared(options));
  // A run that goes on may have fewer ranks than it began with.
  if (!options.resume) DYNMO_TRY(check_ranks(options.config, ranks));
  auto inputs = open_inputs(options);
  if (!inputs && options.resume) {
    return make_error(inputs.error().code,
                      "{}; {} goes on with the data of the run, whose settings are in '{}'",
                      inputs.error().message, options.names.resume,
                      observe::RunFolder(options.config.run.directory).config().string());
  }
  if (!inputs) return inputs.error();
  if (inputs->model.weights) {
    const auto finite = check_finite(*inputs->model.weights);
    if (!finite) return make_error(finite.error().code, "train.init: {}", finite.error().message);
  }
  const int layers = static_cast<int>(inputs->model.layers.size());
  DYNMO_TRY(check_cut(options.config, ranks, layers));
  if (options.resume) {
    DYNMO_ASSIGN(const config::Config config, resumed_config(options.config));
    DYNMO_TRY(restore(config));
  }
  const std::string& hook = options.config.elastic.release_command;
  if (!hook.empty()) {
    const auto found = process::check_program(hook);
    if (!found) {
      return make_error(ErrorCode::kBadInput, "elastic.release_command: {}", found.error().message);
    }
  }
  return inputs;
}

Expected<void> check_host_memory(const Inputs& inputs, const config::Config& config) {
  Bytes states;
  for (const auto& layer : inputs.model.layers) {
    // Values, gradients, two moments, copies where it computes in bf16, and buffers.
    states += model::parameter_bytes(*layer) * 4 + model::copy_bytes(*layer) +
              model::buffer_bytes(*layer);
  }
  const std::int64_t replicas = config.pipeline.replicas;
  const Bytes host = process::host_memory();
  if (host == Bytes{0} || states <= Bytes{host.value / replicas}) return {};
  return make_error(ErrorCode::kBadInput,
                    "the model's parameters with gradients and moments take {}{}, this host has "
                    "{}: wanted a smaller model (model.hidden, model.blocks), or ranks on more "
                    "hosts (docs/clusters.md)",
                    format_bytes(states),
                    replicas > 1 ? fmt::format(" in each of {} replicas", replicas) : "",
                    format_bytes(host));
}

}  // namespace dynmo::train
