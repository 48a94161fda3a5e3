// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/config.h"

#include <fmt/format.h>

#include "dynmo/core/digest.h"
#include "dynmo/core/files.h"
#include "dynmo/core/toml.h"
#include "dynmo/dynamism/freezing.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/learning_rate.h"
#include "dynmo/model/precision.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::train {
namespace {

// The one list of keys: reading, --set, saving and the nearest-key message all follow it.
std::vector<TomlKey> keys_of(Config& c) {
  return {
      {"model.family", &c.model.family},
      {"model.vocabulary", &c.model.vocabulary},
      {"model.hidden", &c.model.hidden},
      {"model.blocks", &c.model.blocks},
      {"model.heads", &c.model.heads},
      {"model.kv_heads", &c.model.kv_heads},
      {"model.intermediate", &c.model.intermediate},
      {"model.sequence", &c.model.sequence},
      {"model.dropout", &c.model.dropout},
      {"model.rope_theta", &c.model.rope_theta},
      {"model.precision", &c.model.precision},
      {"model.positions", &c.model.positions},
      {"model.norm_epsilon", &c.model.norm_epsilon},
      {"model.tied_embeddings", &c.model.tied_embeddings},
      {"data.path", &c.data.path},
      {"data.validation_path", &c.data.validation_path},
      {"data.vocabulary", &c.data.vocabulary},
      {"batch.micro_batches", &c.batch.micro_batches},
      {"batch.micro_batch_size", &c.batch.micro_batch_size},
      {"batch.accumulation", &c.batch.accumulation},
      {"optimizer.learning_rate", &c.optimizer.learning_rate},
      {"optimizer.minimum_learning_rate", &c.optimizer.minimum_learning_rate},
      {"optimizer.warmup_steps", &c.optimizer.warmup_steps},
      {"optimizer.decay", &c.optimizer.decay},
      {"optimizer.decay_share", &c.optimizer.decay_share},
      {"optimizer.beta1", &c.optimizer.beta1},
      {"optimizer.beta2", &c.optimizer.beta2},
      {"optimizer.epsilon", &c.optimizer.epsilon},
      {"optimizer.weight_decay", &c.optimizer.weight_decay},
      {"optimizer.clip_norm", &c.optimizer.clip_norm},
      {"train.steps", &c.train.steps},
      {"train.seed", &c.train.seed},
      {"train.init", &c.train.init},
      {"train.on_nan", &c.train.on_nan},
      {"train.validation_every", &c.train.validation_every},
      {"train.validation_steps", &c.train.validation_steps},
      {"pipeline.ranks", &c.pipeline.ranks},
      {"pipeline.replicas", &c.pipeline.replicas},
      {"pipeline.schedule", &c.pipeline.schedule},
      {"pipeline.stages_per_rank", &c.pipeline.stages_per_rank},
      {"pipeline.balancer", &c.pipeline.balancer},
      {"pipeline.cut", &c.pipeline.cut},
      {"pipeline.measure_steps", &c.pipeline.measure_steps},
      {"pipeline.pin", &c.pipeline.pin},
      {"pipeline.recompute", &c.pipeline.recompute},
      {"pipeline.memory", &c.pipeline.memory},
      {"pipeline.timeout_s", &c.pipeline.timeout_s},
      {"balance.enabled", &c.balance.enabled},
      {"balance.balancer", &c.balance.balancer},
      {"balance.minimum_gain", &c.balance.minimum_gain},
      {"balance.noise_factor", &c.balance.noise_factor},
      {"balance.window", &c.balance.window},
      {"freezing.enabled", &c.freezing.enabled},
      {"freezing.start", &c.freezing.start},
      {"freezing.end", &c.freezing.end},
      {"freezing.fraction", &c.freezing.fraction},
      {"freezing.every", &c.freezing.every},
      {"checkpoint.every", &c.checkpoint.every},
      {"checkpoint.keep", &c.checkpoint.keep},
      {"checkpoint.asynchronous", &c.checkpoint.asynchronous},
      {"checkpoint.memory", &c.checkpoint.memory},
      {"emulated.profile", &c.emulated.profile},
      {"emulated.trace", &c.emulated.trace},
      {"emulated.memory_scale", &c.emulated.memory_scale},
      {"run.directory", &c.run.directory},
      {"run.device", &c.run.device},
      {"run.trace_steps", &c.run.trace_steps},
      {"run.load_trace", &c.run.load_trace},
  };
}

// With what follows from other keys filled in, so that it means the same where defaults change.
Config resolved(Config config) {
  const auto family = model::parse_family(config.model.family);
  if (family && !config.model.tied_embeddings) {
    config.model.tied_embeddings = *family == model::Family::kGpt2;
  }
  return config;
}

template <typename T>
Expected<void> require(bool holds, const char* key, const T& value, const char* wanted) {
  if (holds) return {};
  return make_error(ErrorCode::kBadInput, "{} is {}, wanted {}", key, value, wanted);
}

}  // namespace

Expected<void> apply_file(Config& config, const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path));
  return apply_text(config, text, path.string());
}

Expected<void> apply_text(Config& config, std::string_view text, std::string_view origin) {
  return apply_toml(keys_of(config), text, origin);
}

Expected<void> apply_settings(Config& config, std::span<const std::string> settings) {
  return apply_toml_settings(keys_of(config), settings, "train.steps=100");
}

bool emulates(const Config& config) { return config.run.device == "emulated"; }
bool uses_cuda(const Config& config) { return config.run.device == "cuda"; }

Expected<void> validate(const Config& c) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 24;
  const auto in = [](std::int64_t value, std::int64_t low) {
    return value >= low && value <= kLarge;
  };
  const auto family = model::parse_family(c.model.family);
  if (!family) return make_error(ErrorCode::kBadInput, "model.family: {}", family.error().message);
  DYNMO_TRY(require(in(c.model.vocabulary, 0), "model.vocabulary", c.model.vocabulary,
                    "1 or more, or 0 for that of the data"));
  DYNMO_TRY(require(in(c.model.sequence, 1), "model.sequence", c.model.sequence, "1 to 16777216"));
  DYNMO_TRY(require(c.model.positions >= 0, "model.positions", c.model.positions,
                    "1 or more, or 0 for model.sequence"));
  DYNMO_TRY(require(c.train.init.empty() || !emulates(c), "train.init", c.train.init,
                    "nothing with run.device = emulated"));
  // As many as the planner takes: each is a few actions of the schedule.
  DYNMO_TRY(require(c.batch.micro_batches >= 1 && c.batch.micro_batches <= 65536,
                    "batch.micro_batches", c.batch.micro_batches,
                    "1 to 65536 (more of a step: batch.accumulation)"));
  DYNMO_TRY(require(in(c.batch.micro_batch_size, 1), "batch.micro_batch_size",
                    c.batch.micro_batch_size, "1 or more"));
  DYNMO_TRY(require(in(c.data.vocabulary, 0), "data.vocabulary", c.data.vocabulary,
                    "1 or more, or 0 for that of a prepared folder"));
  DYNMO_TRY(require(in(c.batch.accumulation, 1), "batch.accumulation", c.batch.accumulation,
                    "1 or more"));
  DYNMO_TRY(require(c.pipeline.replicas >= 1 && c.pipeline.replicas <= 4096, "pipeline.replicas",
                    c.pipeline.replicas, "1 to 4096"));
  // A micro-batch's tokens, so that those of a step can be counted.
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;
  const std::int64_t tokens = c.batch.micro_batch_size * c.model.sequence;
  DYNMO_TRY(require(tokens <= kMostTokens, "batch.micro_batch_size x model.sequence", tokens,
                    "at most 1073741824 tokens"));
  if (step_micro_batches(c) > kLarge) {
    return make_error(ErrorCode::kBadInput,
                      "pipeline.replicas x batch.accumulation x batch.micro_batches is {}, wanted "
                      "at most {}",
                      step_micro_batches(c), kLarge);
  }
  DYNMO_TRY(require(in(c.train.steps, 1), "train.steps", c.train.steps, "1 or more"));
  DYNMO_TRY(require(c.train.seed >= 0, "train.seed", c.train.seed, "0 or more"));
  DYNMO_TRY(require(in(c.train.validation_every, 0), "train.validation_every",
                    c.train.validation_every, "0 (never) or more"));
  DYNMO_TRY(require(in(c.train.validation_steps, 1), "train.validation_steps",
                    c.train.validation_steps, "1 or more"));
  DYNMO_TRY(require(c.optimizer.learning_rate > 0, "optimizer.learning_rate",
                    c.optimizer.learning_rate, "more than 0"));
  DYNMO_TRY(require(c.optimizer.minimum_learning_rate >= 0 &&
                        c.optimizer.minimum_learning_rate <= c.optimizer.learning_rate,
                    "optimizer.minimum_learning_rate", c.optimizer.minimum_learning_rate,
                    "0 to optimizer.learning_rate"));
  DYNMO_TRY(require(in(c.optimizer.warmup_steps, 0), "optimizer.warmup_steps",
                    c.optimizer.warmup_steps, "0 or more"));
  const auto precision = model::parse_precision(c.model.precision);
  if (!precision) {
    return make_error(ErrorCode::kBadInput, "model.precision: {}", precision.error().message);
  }
  DYNMO_TRY(require(!emulates(c) || *precision == model::Precision::kFp32, "model.precision",
                    c.model.precision,
                    "fp32 with run.device = emulated: its costs say how many bytes pass"));
  const auto decay = model::parse_decay(c.optimizer.decay);
  if (!decay) {
    return make_error(ErrorCode::kBadInput, "optimizer.decay: {}", decay.error().message);
  }
  DYNMO_TRY(require(c.optimizer.decay_share > 0 && c.optimizer.decay_share <= 1,
                    "optimizer.decay_share", c.optimizer.decay_share, "above 0 and at most 1"));
  DYNMO_TRY(require(c.train.on_nan == "stop" || c.train.on_nan == "skip", "train.on_nan",
                    c.train.on_nan, "stop or skip"));
  DYNMO_TRY(require(c.optimizer.beta1 >= 0 && c.optimizer.beta1 < 1, "optimizer.beta1",
                    c.optimizer.beta1, "0 to below 1"));
  DYNMO_TRY(require(c.optimizer.beta2 >= 0 && c.optimizer.beta2 < 1, "optimizer.beta2",
                    c.optimizer.beta2, "0 to below 1"));
  DYNMO_TRY(
      require(c.optimizer.epsilon > 0, "optimizer.epsilon", c.optimizer.epsilon, "more than 0"));
  DYNMO_TRY(require(c.optimizer.weight_decay >= 0, "optimizer.weight_decay",
                    c.optimizer.weight_decay, "0 or more"));
  DYNMO_TRY(require(c.optimizer.clip_norm >= 0, "optimizer.clip_norm", c.optimizer.clip_norm,
                    "0 (no clipping) or more"));
  DYNMO_TRY(require(c.pipeline.ranks >= 0 && c.pipeline.ranks <= 4096, "pipeline.ranks",
                    c.pipeline.ranks, "1 to 4096, or 0 for the usable cores"));
  DYNMO_TRY(require(in(c.pipeline.measure_steps, 2), "pipeline.measure_steps",
                    c.pipeline.measure_steps, "2 or more"));
  DYNMO_TRY(require(c.pipeline.timeout_s >= 0.1 && c.pipeline.timeout_s <= 1e6,
                    "pipeline.timeout_s", c.pipeline.timeout_s, "0.1 to 1e6 seconds"));
  if (c.pipeline.schedule != "auto") {
    const auto kind = schedule::parse_schedule_kind(c.pipeline.schedule);
    if (!kind) {
      return make_error(ErrorCode::kBadInput, "pipeline.schedule: {}; or auto",
                        kind.error().message);
    }
  }
  DYNMO_TRY(require(in(c.pipeline.stages_per_rank, 1), "pipeline.stages_per_rank",
                    c.pipeline.stages_per_rank, "1 or more"));
  const auto recompute = plan::parse_recompute(c.pipeline.recompute);
  if (!recompute) {
    return make_error(ErrorCode::kBadInput, "pipeline.recompute: {}", recompute.error().message);
  }
  DYNMO_TRY(require(!emulates(c) || *recompute == plan::Recompute::kNone, "pipeline.recompute",
                    c.pipeline.recompute,
                    "none with run.device = emulated: its layers keep no activations"));
  DYNMO_TRY(require(*recompute != plan::Recompute::kAuto || c.pipeline.memory > Bytes{0},
                    "pipeline.memory", c.pipeline.memory.value,
                    "the bytes of a rank, such as 2GiB, for pipeline.recompute = auto"));
  for (const auto& [key, name] : {std::pair{"pipeline.balancer", &c.pipeline.balancer},
                                  {"balance.balancer", &c.balance.balancer}}) {
    const auto balancer = plan::parse_balancer(*name);
    if (!balancer) return make_error(ErrorCode::kBadInput, "{}: {}", key, balancer.error().message);
  }
  DYNMO_TRY(require(c.balance.minimum_gain >= 0, "balance.minimum_gain", c.balance.minimum_gain,
                    "0 or more"));
  DYNMO_TRY(require(c.balance.noise_factor >= 0, "balance.noise_factor", c.balance.noise_factor,
                    "0 or more"));
  DYNMO_TRY(require(in(c.balance.window, 3), "balance.window", c.balance.window, "3 or more"));
  DYNMO_TRY(dynamism::validate({.start = c.freezing.start,
                                .end = c.freezing.end,
                                .fraction = c.freezing.fraction,
                                .every = c.freezing.every}));
  DYNMO_TRY(require(in(c.checkpoint.every, 0), "checkpoint.every", c.checkpoint.every,
                    "0 (none) or more"));
  DYNMO_TRY(require(in(c.checkpoint.keep, 1), "checkpoint.keep", c.checkpoint.keep, "1 or more"));
  DYNMO_TRY(require(c.checkpoint.memory >= Bytes{0}, "checkpoint.memory", c.checkpoint.memory.value,
                    "0 bytes or more"));
  DYNMO_TRY(require(in(c.run.load_trace, 0), "run.load_trace", c.run.load_trace, "0 or more"));
  DYNMO_TRY(require(in(c.run.trace_steps, 0), "run.trace_steps", c.run.trace_steps, "0 or more"));
  DYNMO_TRY(require(!c.run.directory.empty(), "run.directory", "''", "a folder"));
  DYNMO_TRY(require(c.run.device == "cpu" || uses_cuda(c) || emulates(c), "run.device",
                    c.run.device, "cpu, cuda or emulated"));
  DYNMO_TRY(require(!emulates(c) || c.emulated.profile.empty() != c.emulated.trace.empty(),
                    "run.device", c.run.device,
                    "one of emulated.profile and emulated.trace beside it"));
  DYNMO_TRY(require(c.emulated.memory_scale > 0 && c.emulated.memory_scale <= 1,
                    "emulated.memory_scale", c.emulated.memory_scale, "above 0 and at most 1"));
  DYNMO_TRY(require(!emulates(c) || c.train.validation_every == 0, "train.validation_every",
                    c.train.validation_every, "0 with run.device = emulated: it has no losses"));
  return {};
}

std::string to_toml(const Config& config) {
  Config copy = resolved(config);
  return dynmo::to_toml(keys_of(copy));
}

std::int64_t step_micro_batches(const Config& config) {
  return config.pipeline.replicas * config.batch.accumulation * config.batch.micro_batches;
}

Expected<int> pipeline_ranks(const Config& config, int world) {
  if (world % config.pipeline.replicas == 0) {
    return static_cast<int>(world / config.pipeline.replicas);
  }
  return make_error(ErrorCode::kBadInput,
                    "{} {} started for pipeline.replicas = {}: wanted a multiple of it; "
                    "start more or fewer, or set pipeline.replicas to a divisor of {}",
                    world, world == 1 ? "rank was" : "ranks were", config.pipeline.replicas, world);
}

std::string identity(const Config& config) {
  Config copy = resolved(config);
  copy.batch.micro_batches = step_micro_batches(config);
  copy.batch.accumulation = 1;
  if (uses_cuda(copy)) copy.run.device = "cpu";
  std::string text;
  for (const TomlKey& key : keys_of(copy)) {
    const std::string table = key.name.substr(0, key.name.find('.'));
    const bool decides = table == "model" || table == "batch" || table == "optimizer" ||
                         table == "freezing" || table == "emulated" || key.name == "run.device" ||
                         key.name == "train.steps" || key.name == "train.seed";
    if (decides) text += fmt::format("{}={}\n", key.name, toml_value(key.field));
  }
  return digest_of(text).hex();
}

}  // namespace dynmo::train
