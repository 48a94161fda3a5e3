// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/job.h"

#include <algorithm>

#include "dynmo/cost/files.h"
#include "dynmo/cost/hugging_face.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/dynamism/registry.h"

namespace dynmo::scenario {
namespace {

std::int64_t given_or(std::int64_t value, std::int64_t fallback) {
  return value > 0 ? value : fallback;
}

std::int64_t sequence_of(const Scenario::Model& model) {
  return given_or(model.shape.sequence, 2048);
}

cost::Architecture architecture_of(const Scenario::Model& model) {
  if (model.family == "gpt") return cost::Architecture::kGpt;
  return model.family == "mixtral" ? cost::Architecture::kMixtral : cost::Architecture::kLlama;
}

cost::TransformerShape family_shape(const Scenario::Model& model) {
  cost::DecoderShape sizes = model.shape;
  sizes.sequence = sequence_of(model);
  cost::TransformerShape shape = cost::transformer_shape(sizes, architecture_of(model));
  shape.micro_batch_size = model.micro_batch_size;
  shape.experts = given_or(model.experts, shape.experts);
  if (shape.experts > 0) shape.experts_per_token = given_or(model.experts_per_token, 2);
  return shape;
}

Expected<cost::TransformerShape> shape_of(const Scenario::Model& model) {
  cost::TransformerShape shape = family_shape(model);
  if (!model.config.empty()) {
    DYNMO_ASSIGN(shape,
                 cost::read_config(model.config, sequence_of(model), model.micro_batch_size));
  }
  shape.head_slices = model.shape.head_slices;
  shape.fused_attention = model.fused_attention;
  DYNMO_TRY(cost::validate(shape));
  return shape;
}

dynamism::LoadOptions load_options(const Scenario& scenario, const cost::TransformerShape& shape,
                                   const cost::Device& device) {
  return {.inputs = {.shape = shape,
                     .device = device,
                     .seed = static_cast<std::uint64_t>(scenario.training.seed),
                     .steps = scenario.training.steps,
                     .micro_batches = scenario.training.micro_batches},
          .sources = scenario.sources};
}

}  // namespace

Expected<Job> make_job(const Scenario& scenario) {
  DYNMO_TRY(validate(scenario));
  Job job;
  job.scenario = scenario;
  DYNMO_ASSIGN(job.device, cost::find_device(scenario.device));
  if (!scenario.model.profile.empty()) {
    DYNMO_ASSIGN(cost::ModelCost model, cost::read_profile(scenario.model.profile));
    DYNMO_ASSIGN(job.load, dynamism::make_static_load(model));
    DYNMO_ASSIGN(job.dense, dynamism::make_static_load(std::move(model)));
  } else {
    DYNMO_ASSIGN(const cost::TransformerShape shape, shape_of(scenario.model));
    if (!shape.halves.empty() && scenario.dynamism.source != "none") {
      return make_error(
          ErrorCode::kBadInput,
          "{}: dynamism.source is '{}', wanted none: load models know equal blocks of "
          "attention and MLP or experts, as in llama, mixtral and gpt2",
          scenario.model.config, scenario.dynamism.source);
    }
    const dynamism::LoadOptions options = load_options(scenario, shape, job.device);
    DYNMO_ASSIGN(job.load, dynamism::make_load_model(scenario.dynamism.source, options));
    DYNMO_ASSIGN(job.dense, dynamism::make_load_model("none", options));
    job.tokens_per_micro_batch = shape.tokens();
  }
  if (!scenario.model.profile.empty() || !scenario.dynamism.trace.empty()) {
    // Costs alone do not say how many tokens they are of.
    job.tokens_per_micro_batch = scenario.model.shape.sequence * scenario.model.micro_batch_size;
  }
  if (!scenario.dynamism.trace.empty()) {
    DYNMO_ASSIGN(job.load, dynamism::read_trace(scenario.dynamism.trace));
    DYNMO_ASSIGN(job.dense, dynamism::make_static_load(job.load->at(0)));
  }
  return job;
}

}  // namespace dynmo::scenario
