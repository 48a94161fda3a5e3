// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/resolved_run.h"

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
    // Each run has a folder with its name.
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

Expected<ValidOptions> validated(TrainOptions options) {
  DYNMO_TRY(validate(options.config));
  return ValidOptions(std::move(options));
}

Expected<ResolvedRun> resolve(const ValidOptions& options) {
  DYNMO_ASSIGN(TokenBatches batches, TokenBatches::open(options.config()));
  DYNMO_ASSIGN(RunModel model, make_model(options.options(), batches.vocabulary()));
  return ResolvedRun(options, std::move(batches), std::move(model));
}

Expected<void> ResolvedRun::set(std::span<const std::string> settings) {
  TrainOptions next = options();
  DYNMO_TRY(apply_settings(next.config, settings));
  DYNMO_ASSIGN(const ValidOptions valid, validated(std::move(next)));
  options_ = valid.options();
  return {};
}

Expected<ResolvedRun> ResolvedRun::dense() const {
  TrainOptions dense = options();
  dense.dense = true;
  dense.config.sources = dynamism::SourceOptions();
  dense.make_sources = nullptr;
  DYNMO_ASSIGN(RunModel model, make_model(dense, batches_.vocabulary()));
  return ResolvedRun(ValidOptions(std::move(dense)), batches_, std::move(model));
}

Expected<ResolvedRun> resolve_for(const ValidOptions& valid, int ranks) {
  const TrainOptions& options = valid.options();
  const config::Config& config = valid.config();
  DYNMO_TRY(check_compared(options));
  // A resumed run may have fewer ranks than at its start.
  if (!options.resume) DYNMO_TRY(check_ranks(config, ranks));
  auto run = resolve(valid);
  if (!run && options.resume) {
    return make_error(run.error().code,
                      "{}; {} goes on with the data of the run, whose settings are in '{}'",
                      run.error().message, options.names.resume,
                      observe::RunFolder(config.run.directory).config().string());
  }
  if (!run) return run.error();
  if (run->model().weights) {
    const auto finite = check_finite(*run->model().weights);
    if (!finite) return make_error(finite.error().code, "train.init: {}", finite.error().message);
  }
  DYNMO_TRY(check_cut(config.pipeline.cut, ranks, static_cast<int>(run->model().layers.size())));
  if (options.resume) {
    DYNMO_ASSIGN(const std::vector<std::string> measured, measured_before(config));
    DYNMO_TRY(run->set(measured));
    DYNMO_TRY(restore(run->config()));
  }
  const std::string& hook = config.elastic.release_command;
  if (!hook.empty()) {
    const auto found = process::check_program(hook);
    if (!found) {
      return make_error(ErrorCode::kBadInput, "elastic.release_command: {}", found.error().message);
    }
  }
  return run;
}

Expected<void> check_host_memory(const ResolvedRun& run) {
  Bytes states;
  for (const auto& layer : run.model().layers) {
    // Values, gradients, two moments, copies where it computes in bf16, and buffers.
    states += model::parameter_bytes(*layer) * 4 + model::copy_bytes(*layer) +
              model::buffer_bytes(*layer);
  }
  const std::int64_t replicas = run.config().pipeline.replicas;
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
