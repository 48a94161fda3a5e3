// SPDX-License-Identifier: Apache-2.0
#include "dynmo/config/config.h"

#include <fmt/format.h>

#include <algorithm>

#include "dynmo/config/config_impl.h"
#include "dynmo/config/learning_rate.h"
#include "dynmo/core/device_names.h"
#include "dynmo/core/effects.h"
#include "dynmo/core/files.h"
#include "dynmo/cost/family.h"
#include "dynmo/dynamism/moe/options.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::config {
namespace {

constexpr double kLarge = 1 << 24;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;  // of a micro-batch

Range steps_or_0(const char* meaning_of_0) {
  return between(0, kLarge, fmt::format("(0: {})", meaning_of_0));
}

// Returns the values of run.device with which layers compute instead of sleeping.
Names computing() {
  Names names = device_names();
  names.insert(names.begin(), "cpu");
  return names;
}
Names devices() {
  Names names = computing();
  names.emplace_back("emulated");
  return names;
}

// Returns the condition of the keys that emulated layers ignore.
ActsIf computes() { return when("run.device", computing()); }
const ActsIf& validates() {
  static const ActsIf kCondition =
      when("train.validation_every", at_least(1), "train.validation_every of 1 or more");
  return kCondition;
}
const ActsIf& is_elastic() {
  static const ActsIf kCondition = when("elastic.enabled", Names{"true"});
  return kCondition;
}
const ActsIf& balances() {
  static const ActsIf kCondition = when("balance.enabled", Names{"true"});
  return kCondition;
}

std::vector<TomlKey> model_keys(Config::Model& m) {
  const ActsIf llama = when("model.family", Names{"llama"});
  const ActsIf scaled = when("model.rope_scaling", Names{"linear", "llama3"});
  const ActsIf llama3 = when("model.rope_scaling", Names{"llama3"});
  return {
      {"model.family", &m.family, readable_by(cost::parse_family), {computes()}},
      {"model.vocabulary",
       &m.shape.vocabulary,
       between(0, kLarge, "(0: that of the data)"),
       {computes()}},
      {"model.hidden", &m.shape.hidden, {}, {computes()}},
      {"model.blocks", &m.shape.blocks, {}, {computes()}},
      {"model.heads", &m.shape.heads, {}, {computes()}},
      {"model.kv_heads", &m.shape.kv_heads, {}, {computes(), llama}},
      {"model.intermediate", &m.shape.intermediate, {}, {computes()}},
      {"model.sequence", &m.shape.sequence, between(1, kLarge)},
      {"model.dropout", &m.dropout, {}, {computes()}},
      {"model.rope_theta", &m.rope.theta, {}, {computes(), llama}},
      {"model.rope_scaling",
       toml_choice(&m.rope.scaling, cost::kRotaryScalingNames),
       {},
       {computes(), llama}},
      {"model.rope_factor", &m.rope.factor, {}, {computes(), llama, scaled}},
      {"model.rope_low_freq_factor", &m.rope.low_freq_factor, {}, {computes(), llama, llama3}},
      {"model.rope_high_freq_factor", &m.rope.high_freq_factor, {}, {computes(), llama, llama3}},
      {"model.rope_original_positions",
       &m.rope.original_positions,
       {},
       {computes(), llama, llama3}},
      {"model.qkv_bias", &m.qkv_bias, {}, {computes(), llama}},
      {"model.precision", &m.precision, readable_by(cost::parse_precision)},
      {"model.positions",
       &m.shape.positions,
       between(0, kLarge, "(0: model.sequence)"),
       {computes()}},
      {"model.norm_epsilon", &m.norm_epsilon, {}, {computes()}},
      {"model.tied_embeddings", &m.tied_embeddings, {}, {computes()}},
      {"model.head_slices", &m.shape.head_slices, between(1, kLarge), {computes()}},
  };
}

std::vector<TomlKey> data_keys(Config::Data& d, Config::Batch& b) {
  return {
      {"data.path", &d.path},
      {"data.blend", &d.blend},
      {"data.validation_path", &d.validation_path, {}, {validates()}},
      {"data.vocabulary", &d.vocabulary, between(0, kLarge, "(0: that of a prepared folder)")},
      // The planner's limit: each micro-batch is a few actions of the schedule.
      {"batch.micro_batches", &b.micro_batches,
       between(1, 65536, "(more of a step: batch.accumulation)")},
      {"batch.micro_batch_size", &b.micro_batch_size, between(1, kLarge)},
      {"batch.accumulation", &b.accumulation, between(1, kLarge)},
  };
}

std::vector<TomlKey> optimizer_keys(Config::Optimizer& o) {
  return {
      {"optimizer.learning_rate", &o.learning_rate, above(0)},
      {"optimizer.minimum_learning_rate", &o.minimum_learning_rate, at_least(0)},
      {"optimizer.warmup_steps", &o.warmup_steps, between(0, kLarge)},
      {"optimizer.decay", &o.decay, readable_by(parse_decay)},
      {"optimizer.decay_share",
       &o.decay_share,
       above_to(0, 1),
       {when("optimizer.decay", Names{"wsd"})}},
      {"optimizer.beta1", &o.beta1, from_below(0, 1)},
      {"optimizer.beta2", &o.beta2, from_below(0, 1)},
      {"optimizer.epsilon", &o.epsilon, above(0)},
      {"optimizer.weight_decay", &o.weight_decay, at_least(0)},
      {"optimizer.clip_norm", &o.clip_norm, at_least(0, "(0: no clipping)")},
  };
}

std::vector<TomlKey> train_keys(Config::Train& t) {
  // A validation always follows the last step.
  const ActsIf within = when_so(t.validation_every <= t.steps,
                                fmt::format("train.steps = {}", t.steps), "at most train.steps");
  return {
      {"train.steps", &t.steps, between(1, kLarge)},
      {"train.seed", &t.seed, at_least(0)},
      {"train.init", &t.init},
      {"train.on_nan", &t.on_nan, Names{"stop", "skip"}},
      {"train.validation_every", &t.validation_every, steps_or_0("never"), {within}},
      {"train.validation_steps", &t.validation_steps, between(1, kLarge), {validates()}},
  };
}

Expected<void> parse_schedule(std::string_view name) {
  if (name == "auto") return {};
  const auto kind = schedule::parse_schedule_kind(name);
  if (kind) return {};
  return make_error(ErrorCode::kBadInput, "{}; or auto", kind.error().message);
}

std::vector<TomlKey> pipeline_keys(Config::Pipeline& p) {
  const ActsIf chosen =
      when_so(p.schedule != "auto" || p.cut.empty(), "pipeline.cut = " + toml_value(&p.cut),
              "no pipeline.cut with auto");
  return {
      {"pipeline.ranks", &p.ranks, between(0, 4096, "(0: the usable cores)")},
      {"pipeline.replicas", &p.replicas, between(1, 4096)},
      {"pipeline.schedule", &p.schedule, readable_by(parse_schedule), {chosen}},
      {"pipeline.stages_per_rank",
       &p.stages_per_rank,
       between(1, kLarge),
       {when("pipeline.schedule", Names{"interleaved", "auto"})}},
      {"pipeline.balancer",
       &p.balancer,
       readable_by(plan::parse_balancer),
       {either(when_empty("pipeline.cut"), is_elastic())}},
      {"pipeline.cut", &p.cut},
      {"pipeline.place", &p.place, Names{"hosts", "given"}},
      {"pipeline.measure_steps", &p.measure_steps, between(2, kLarge)},
      {"pipeline.pin", &p.pin},
      {"pipeline.recompute", &p.recompute, readable_by(plan::parse_recompute)},
      {"pipeline.memory", &p.memory, at_least(0, "bytes")},
      {"pipeline.timeout_s", &p.timeout_s, between(0.1, 1e6, "seconds")},
  };
}

std::vector<TomlKey> balance_keys(Config::Balance& b) {
  return {
      {"balance.enabled", &b.enabled},
      {"balance.balancer",
       &b.balancer,
       readable_by(plan::parse_balancer),
       {either(balances(), is_elastic())}},
      {"balance.minimum_gain", &b.minimum_gain, at_least(0), {balances()}},
      {"balance.noise_factor", &b.noise_factor, at_least(0), {balances()}},
      {"balance.window", &b.window, between(3, kLarge)},  // also used by predicted times
  };
}

std::vector<TomlKey> elastic_keys(Config::Elastic& e) {
  const ActsIf packs = when("elastic.pack", Names{"auto"});
  const ActsIf copies = when("elastic.snapshots", Names{"auto"});
  const ActsIf tells = when_given("elastic.release_command", "an elastic.release_command");
  std::vector<TomlKey> keys = only_if(
      {is_elastic()},
      {
          {"elastic.pack", &e.pack, Names{"never", "auto"}, {balances()}},
          {"elastic.pack_slack", &e.pack_slack, between(0, 10), {packs}},
          {"elastic.pack_ranks", &e.pack_ranks, between(0, 4096, "(0: as elastic.pack says)")},
          {"elastic.release_after", &e.release_after, between(1, kLarge, "steps")},
          {"elastic.ranks_min", &e.ranks_min, between(1, 4096)},
          {"elastic.respawn", &e.respawn},
          {"elastic.snapshots", &e.snapshots, Names{"never", "auto"}},
          {"elastic.snapshot_cost", &e.snapshot_cost, between(0.0001, 1), {copies}},
          {"elastic.release_command", &e.release_command},
          {"elastic.release_timeout_s",
           &e.release_timeout_s,
           between(0.1, 1e6, "seconds"),
           {tells}},
          {"elastic.listen", &e.listen},
      });
  keys.insert(keys.begin(), {"elastic.enabled", &e.enabled});
  keys.insert(keys.end() - 5, {"elastic.silence_s", &e.silence_s, between(0.5, 1e6, "seconds")});
  return keys;
}

std::vector<TomlKey> run_keys(Config& c) {
  // An elastic run writes the checkpoints that `dynmo ctl` asks for, too.
  const ActsIf writes =
      either(when("checkpoint.every", at_least(1), "checkpoint.every of 1 or more"), is_elastic());
  const ActsIf sleeps = when("run.device", Names{"emulated"});
  const ActsIf on_devices = when("run.device", device_names());
  const ActsIf slow = when_given("emulated.slow_ranks", "emulated.slow_ranks");
  const ActsIf beside = when("checkpoint.asynchronous", Names{"true"});
  const ActsIf logs = when_given("run.log", "a run.log");
  return {
      {"checkpoint.every", &c.checkpoint.every, steps_or_0("none")},
      {"checkpoint.keep", &c.checkpoint.keep, between(1, kLarge), {writes}},
      {"checkpoint.asynchronous", &c.checkpoint.asynchronous, {}, {writes}},
      {"checkpoint.memory", &c.checkpoint.memory, at_least(0, "bytes"), {writes, beside}},
      {"emulated.profile", &c.emulated.profile, {}, {sleeps}},
      {"emulated.trace", &c.emulated.trace, {}, {sleeps}},
      {"emulated.memory_scale", &c.emulated.memory_scale, above_to(0, 1), {sleeps}},
      {"emulated.time_scale", &c.emulated.time_scale, between(0.01, 1000), {sleeps}},
      {"emulated.slow_ranks", &c.emulated.slow_ranks, {}, {sleeps}},
      {"emulated.slow_speed", &c.emulated.slow_speed, above_to(0, 1), {sleeps, slow}},
      {"emulated.slow_from", &c.emulated.slow_from, between(0, kLarge), {sleeps, slow}},
      {"emulated.slow_until", &c.emulated.slow_until, steps_or_0("none"), {sleeps, slow}},
      {"run.directory", &c.run.directory},
      {"run.device", &c.run.device, devices()},
      {"run.deterministic", &c.run.deterministic, {}, {on_devices}},
      {"run.fused_kernels", &c.run.fused_kernels, {}, {on_devices}},
      {"run.trace_steps", &c.run.trace_steps, between(0, kLarge)},
      {"run.load_trace", &c.run.load_trace, steps_or_0("none")},
      {"run.tensorboard", &c.run.tensorboard},
      {"run.prometheus", &c.run.prometheus},
      {"run.metrics_port", &c.run.metrics_port, between(0, 65535, "(0: none)")},
      {"run.peak_flops",
       &c.run.peak_flops,
       between(0, 1e18, "FLOP/s (0: not given)"),
       {computes()}},
      {"run.log", &c.run.log},
      {"run.log_level", toml_choice(&c.run.log_level, kLogLevelNames), {}, {logs}},
  };
}

// Returns the default config, with the defaults of the same sources.
Config defaults_of(const Config& config) {
  Config standard;
  standard.sources = config.sources.defaults();
  return standard;
}

template <typename T>
Expected<void> require(bool holds, std::string_view key, const T& value, std::string_view wanted) {
  if (holds) return {};
  return make_error(ErrorCode::kBadInput, "{} is {}, wanted {}", key, value, wanted);
}

// Checks products of sizes. Each size was checked before, so no product overflows.
Expected<void> check_step_size(const Config& c) {
  const std::int64_t tokens = c.batch.micro_batch_size * c.model.shape.sequence;
  DYNMO_TRY(require(tokens <= kMaxTokens, "batch.micro_batch_size x model.sequence", tokens,
                    fmt::format("at most {} tokens", kMaxTokens)));
  const std::int64_t micro_batches = step_micro_batches(c);
  return require(micro_batches <= static_cast<std::int64_t>(kLarge),
                 "pipeline.replicas x batch.accumulation x batch.micro_batches", micro_batches,
                 fmt::format("at most {}", static_cast<std::int64_t>(kLarge)));
}

// Refuses the settings that a run with emulated layers cannot have.
Expected<void> check_emulation(const Config& c) {
  if (!emulates(c)) return {};
  DYNMO_TRY(require(c.train.init.empty(), "train.init", c.train.init,
                    "nothing with run.device = emulated"));
  DYNMO_TRY(require(c.model.precision == "fp32", "model.precision", c.model.precision,
                    "fp32 with run.device = emulated: its costs say how many bytes pass"));
  DYNMO_TRY(require(c.pipeline.recompute == "none", "pipeline.recompute", c.pipeline.recompute,
                    "none with run.device = emulated: its layers keep no activations"));
  DYNMO_TRY(require(c.emulated.profile.empty() != c.emulated.trace.empty(), "run.device",
                    c.run.device, "one of emulated.profile and emulated.trace with it"));
  for (const std::int64_t rank : c.emulated.slow_ranks) {
    DYNMO_TRY(check_allowed("emulated.slow_ranks", rank, between(0, kLarge)));
  }
  DYNMO_TRY(require(c.emulated.slow_until == 0 || c.emulated.slow_until > c.emulated.slow_from,
                    "emulated.slow_until", c.emulated.slow_until,
                    "0, or more than emulated.slow_from"));
  return require(c.train.validation_every == 0, "train.validation_every", c.train.validation_every,
                 "0 with run.device = emulated: it has no losses");
}

Expected<void> check_elasticity(const Config& c) {
  const Config::Elastic& e = c.elastic;
  DYNMO_TRY(require(!e.listen.empty(), "elastic.listen", "''",
                    "auto, loopback or an address of this host"));
  return require(e.pack_ranks == 0 || e.pack_ranks >= e.ranks_min, "elastic.pack_ranks",
                 e.pack_ranks, fmt::format("elastic.ranks_min = {} or more", e.ranks_min));
}

}  // namespace

Config resolved(Config config) {
  Config standard = defaults_of(config);
  reset_idle(keys_of(config), keys_of(standard));
  const auto family = cost::parse_family(config.model.family);
  if (family && !config.model.tied_embeddings) {
    config.model.tied_embeddings = *family == cost::Family::kGpt2;
  }
  return config;
}

std::vector<TomlKey> keys_of(Config& c) {
  std::vector<TomlKey> keys;
  for (const auto& table :
       {model_keys(c.model), data_keys(c.data, c.batch), optimizer_keys(c.optimizer),
        train_keys(c.train), pipeline_keys(c.pipeline), balance_keys(c.balance),
        c.sources.training_keys(), elastic_keys(c.elastic), run_keys(c)}) {
    keys.insert(keys.end(), table.begin(), table.end());
  }
  return keys;
}

Expected<void> apply_file(Config& config, const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path, kMaxTomlBytes));
  return apply_text(config, text, path.string());
}

Expected<void> apply_text(Config& config, std::string_view text, std::string_view origin) {
  return apply_toml(keys_of(config), text, origin);
}

Expected<void> apply_settings(Config& config, std::span<const std::string> settings) {
  Config standard = defaults_of(config);
  return apply_overrides([&] { return keys_of(config); }, keys_of(standard), settings,
                         "train.steps=100");
}

std::string own_meeting_address(const Config& config) {
  const std::string& listen = config.elastic.listen;
  return listen == "auto" || listen == "loopback" ? "" : listen;
}

bool emulates(const Config& config) { return config.run.device == "emulated"; }
bool on_device(const Config& config) { return is_device_name(config.run.device); }

Expected<void> validate(const Config& config) {
  Config given = config;
  Config standard = defaults_of(config);
  DYNMO_TRY(check_values(keys_of(given)));
  DYNMO_TRY(check_effects(keys_of(given), keys_of(standard)));
  const Config c = resolved(config);
  DYNMO_TRY(check_step_size(c));
  DYNMO_TRY(require(c.optimizer.minimum_learning_rate <= c.optimizer.learning_rate,
                    "optimizer.minimum_learning_rate", c.optimizer.minimum_learning_rate,
                    "0 to optimizer.learning_rate"));
  DYNMO_TRY(require(c.pipeline.recompute != "auto" || c.pipeline.memory > Bytes{0} || on_device(c),
                    "pipeline.memory", c.pipeline.memory.value,
                    "the bytes of a rank, such as 2GiB, for pipeline.recompute = auto on CPUs"));
  DYNMO_TRY(require(!c.run.directory.empty(), "run.directory", "''", "a folder"));
  DYNMO_TRY(check_emulation(c));
  DYNMO_TRY(check_elasticity(c));
  return c.sources.check_training({.tied_embeddings = !emulates(c) && *c.model.tied_embeddings,
                                   .steps = c.train.steps,
                                   .device = c.run.device,
                                   .family = c.model.family,
                                   .head_slices = emulates(c) ? 1 : c.model.shape.head_slices,
                                   .blocks = emulates(c) ? 0 : c.model.shape.blocks});
}

std::vector<std::string> key_names() {
  Config config;
  std::vector<std::string> names;
  for (const TomlKey& key : keys_of(config)) {
    if (key.refused.empty()) names.push_back(key.name);
  }
  return names;
}

std::string to_toml(const Config& config) {
  Config copy = resolved(config);
  return dynmo::to_toml(keys_of(copy));
}

cost::TransformerShape transformer_shape(const Config& config, std::int64_t vocabulary) {
  const Config::Model& m = config.model;
  const bool gpt2 = cost::parse_family(m.family).value() == cost::Family::kGpt2;
  cost::DecoderShape sizes = m.shape;
  if (sizes.vocabulary == 0) sizes.vocabulary = vocabulary;
  if (gpt2) sizes.kv_heads = 0;
  if (gpt2 && sizes.positions == 0) sizes.positions = sizes.sequence;
  cost::TransformerShape shape =
      cost::transformer_shape(sizes, gpt2 ? cost::Architecture::kGpt : cost::Architecture::kLlama);
  shape.tied_embedding = m.tied_embeddings.value_or(gpt2);
  if (config.sources.enabled<dynamism::MoeOptions>()) {
    const auto& moe = config.sources.get<dynamism::MoeOptions>();
    shape.experts = moe.experts;
    shape.experts_per_token = moe.top_k;
    if (moe.expert_hidden > 0) shape.intermediate = moe.expert_hidden;
  }
  shape.micro_batch_size = config.batch.micro_batch_size;
  shape.dropout = m.dropout > 0;
  return shape;
}

double step_flops(const Config& config, std::int64_t vocabulary) {
  if (emulates(config)) return 0;
  double sum = 0;
  for (const cost::LayerWork& work :
       cost::transformer_work(transformer_shape(config, vocabulary))) {
    sum += 3 * (work.matrix_flops + work.core_flops);
  }
  return static_cast<double>(step_micro_batches(config)) * sum;
}

std::vector<std::string_view> sparse_sources(const Config& config) {
  std::vector<std::string_view> tables = config.sources.enabled_tables();
  std::erase(tables, "moe");  // counted by the experts that a token visits
  return tables;
}

std::int64_t step_micro_batches(const Config& config) {
  return config.pipeline.replicas * config.batch.accumulation * config.batch.micro_batches;
}

Expected<void> check_ranks(const Config& config, int ranks) {
  const auto fits = [&](std::string_view key, std::int64_t value) {
    return require(value <= ranks, key, value,
                   fmt::format("at most the {} {} that the run begins with", ranks,
                               ranks == 1 ? "rank" : "ranks"));
  };
  DYNMO_TRY(fits("elastic.ranks_min", config.elastic.ranks_min));
  return fits("elastic.pack_ranks", config.elastic.pack_ranks);
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

}  // namespace dynmo::config
