// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/scenario.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/core/nearest.h"
#include "dynmo/core/toml.h"
#include "dynmo/scenario/policy_name.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::scenario {
namespace {

std::vector<TomlKey> keys_of(Event& event) {
  return {{"event.step", &event.step},
          {"event.leave", &event.leave},
          {"event.join", &event.join},
          {"event.replicas", &event.replicas},
          {"event.failure", &event.failure}};
}

TomlTables tables_of(std::vector<Event>& events) {
  return {.clear = [&events] { events.clear(); },
          .add = [&events] { return keys_of(events.emplace_back()); },
          .all =
              [&events] {
                std::vector<std::vector<TomlKey>> all;
                for (Event& event : events) all.push_back(keys_of(event));
                return all;
              }};
}

void add_load_keys(Scenario& s, std::vector<TomlKey>& keys) {
  const std::vector<TomlKey> loads = {
      {"moe.expert_ranks", &s.moe.expert_ranks},
      {"moe.least_skew", &s.moe.least_skew},
      {"moe.most_skew", &s.moe.most_skew},
      {"moe.early_skew", &s.moe.early_skew},
      {"moe.settle_steps", &s.moe.settle_steps},
      {"moe.drift", &s.moe.drift},
      {"moe.drift_steps", &s.moe.drift_steps},
      {"moe.capacity_factor", &s.moe.capacity_factor},
      {"moe.sampled_micro_batches", &s.moe.sampled_micro_batches},
      {"pruning.start", &s.pruning.start},
      {"pruning.end", &s.pruning.end},
      {"pruning.every", &s.pruning.every},
      {"pruning.initial_sparsity", &s.pruning.initial_sparsity},
      {"pruning.final_sparsity", &s.pruning.final_sparsity},
      {"pruning.sparse_rate", &s.pruning.sparse_rate},
      {"pruning.depth_ratio", &s.pruning.depth_ratio},
      {"pruning.matrix_spread", &s.pruning.matrix_spread},
      {"pruning.output_scale", &s.pruning.output_scale},
      {"pruning.most_sparsity", &s.pruning.most_sparsity},
      {"pruning.index_bytes", &s.pruning.index_bytes},
      {"freezing.rule", &s.freezing_rule},
      {"freezing.check_every", &s.freezing.check_every},
      {"freezing.bootstrap", &s.freezing.bootstrap},
      {"freezing.tolerance", &s.freezing.tolerance},
      {"freezing.patience", &s.freezing.patience},
      {"freezing.front_rate", &s.freezing.front_rate},
      {"freezing.back_rate", &s.freezing.back_rate},
      {"freezing.rate_spread", &s.freezing.rate_spread},
      {"freezing.slope_noise", &s.freezing.slope_noise},
      {"freezing.most", &s.freezing.most},
      {"freezing.start", &s.freezing.schedule.start},
      {"freezing.end", &s.freezing.schedule.end},
      {"freezing.fraction", &s.freezing.schedule.fraction},
      {"freezing.every", &s.freezing.schedule.every},
      {"sparse_attention.buckets", &s.sparse_attention.buckets},
      {"sparse_attention.least_skew", &s.sparse_attention.least_skew},
      {"sparse_attention.most_skew", &s.sparse_attention.most_skew},
      {"sparse_attention.drift", &s.sparse_attention.drift},
      {"sparse_attention.drift_steps", &s.sparse_attention.drift_steps},
      {"sparse_attention.micro_batch_noise", &s.sparse_attention.micro_batch_noise},
      {"sparse_attention.sampled_micro_batches", &s.sparse_attention.sampled_micro_batches},
      {"sparse_attention.block", &s.sparse_attention.block},
      {"early_exit.survivors", &s.early_exit.survivors},
      {"early_exit.exit_every", &s.early_exit.exit_every},
      {"early_exit.exited", &s.early_exit_exited},
      {"early_exit.warm_up", &s.early_exit.warm_up},
      {"early_exit.ramp_steps", &s.early_exit.ramp_steps},
      {"early_exit.exit_spread", &s.early_exit.exit_spread},
      {"early_exit.drift", &s.early_exit.drift},
      {"early_exit.drift_steps", &s.early_exit.drift_steps},
      {"mixture_of_depths.capacity", &s.mixture_of_depths.capacity},
      {"mixture_of_depths.every", &s.mixture_of_depths.every},
      {"mixture_of_depths.first_block", &s.mixture_of_depths.first_block},
      {"mixture_of_depths.noise", &s.mixture_of_depths.noise},
  };
  keys.insert(keys.end(), loads.begin(), loads.end());
}

// The one list of keys.
std::vector<TomlKey> keys_of(Scenario& s) {
  std::vector<TomlKey> keys = {
      {"model.family", &s.model.family},
      {"model.config", &s.model.config},
      {"model.profile", &s.model.profile},
      {"model.blocks", &s.model.blocks},
      {"model.hidden", &s.model.hidden},
      {"model.heads", &s.model.heads},
      {"model.kv_heads", &s.model.kv_heads},
      {"model.intermediate", &s.model.intermediate},
      {"model.vocabulary", &s.model.vocabulary},
      {"model.experts", &s.model.experts},
      {"model.experts_per_token", &s.model.experts_per_token},
      {"model.sequence", &s.model.sequence},
      {"model.micro_batch_size", &s.model.micro_batch_size},
      {"device.name", &s.device},
      {"cluster.pipeline_ranks", &s.cluster.pipeline_ranks},
      {"cluster.data_parallel", &s.cluster.data_parallel},
      {"cluster.ranks_per_node", &s.cluster.ranks_per_node},
      {"cluster.order", &s.cluster.order},
      {"cluster.memory", &s.cluster.memory},
      {"cluster.inside_latency", TomlSeconds{&s.cluster.inside_latency_s}},
      {"cluster.inside_bandwidth", TomlBandwidth{&s.cluster.inside_bandwidth}},
      {"cluster.between_latency", TomlSeconds{&s.cluster.between_latency_s}},
      {"cluster.between_bandwidth", TomlBandwidth{&s.cluster.between_bandwidth}},
      {"cluster.nic_bandwidth", TomlBandwidth{&s.cluster.nic_bandwidth}},
      {"cluster.slow_ranks", &s.cluster.slow_ranks},
      {"cluster.slow_speed", &s.cluster.slow_speed},
      {"dynamism.source", &s.dynamism.source},
      {"dynamism.trace", &s.dynamism.trace},
  };
  add_load_keys(s, keys);
  const std::vector<TomlKey> rest = {
      {"training.steps", &s.training.steps},
      {"training.micro_batches", &s.training.micro_batches},
      {"training.schedule", &s.training.schedule},
      {"training.seed", &s.training.seed},
      {"training.sample_every", &s.training.sample_every},
      {"training.checkpoint_every", &s.training.checkpoint_every},
      {"training.restart", TomlSeconds{&s.training.restart_s}},
      {"policy.compare", &s.policy.compare},
      {"policy.noise", &s.policy.noise},
      {"policy.window", &s.policy.window},
      {"policy.profile_share", &s.policy.profile_share},
      {"policy.plan", TomlSeconds{&s.policy.plan_s}},
      {"policy.move_bandwidth", TomlBandwidth{&s.policy.move_bandwidth}},
      {"policy.move_fixed", TomlSeconds{&s.policy.move_fixed_s}},
      {"policy.minimum_gain", &s.policy.minimum_gain},
      {"policy.noise_factor", &s.policy.noise_factor},
      {"policy.horizon_steps", &s.policy.horizon_steps},
      {"policy.pack_slack", &s.policy.pack_slack},
      {"policy.evaluations", &s.policy.evaluations},
      {"event", tables_of(s.events)},
  };
  keys.insert(keys.end(), rest.begin(), rest.end());
  return keys;
}

template <typename T>
Expected<void> require(bool holds, std::string_view key, const T& value, std::string_view wanted) {
  if (holds) return {};
  return make_error(ErrorCode::kBadInput, "{} is {}, wanted {}", key, value, wanted);
}

Expected<void> require_one_of(std::string_view key, const std::string& value,
                              std::initializer_list<std::string> names) {
  const std::vector<std::string> known(names);
  if (std::find(known.begin(), known.end(), value) != known.end()) return {};
  return make_error(ErrorCode::kBadInput, "{}: '{}' is not known{}", key, value,
                    suggestion(value, known));
}

template <typename T>
Expected<void> require_range(std::string_view key, T value, T least, T most) {
  return require(value >= least && value <= most, key, value, fmt::format("{} to {}", least, most));
}

Expected<void> validate_model(const Scenario::Model& model) {
  DYNMO_TRY(require_one_of("model.family", model.family, {"gpt", "llama", "mixtral"}));
  DYNMO_TRY(require(model.config.empty() || model.profile.empty(), "model.profile", model.profile,
                    "either model.config or model.profile"));
  DYNMO_TRY(require_range("model.blocks", model.blocks, 1, 4096));
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  const std::array<std::pair<std::string_view, std::int64_t>, 6> sizes = {
      {{"model.heads", model.heads},
       {"model.kv_heads", model.kv_heads},
       {"model.intermediate", model.intermediate},
       {"model.vocabulary", model.vocabulary},
       {"model.experts", model.experts},
       {"model.experts_per_token", model.experts_per_token}}};
  for (const auto& [key, value] : sizes) {
    DYNMO_TRY(require_range(key, value, std::int64_t{0}, kMost));
  }
  DYNMO_TRY(require_range("model.hidden", model.hidden, std::int64_t{1}, kMost));
  DYNMO_TRY(require_range("model.sequence", model.sequence, std::int64_t{0}, kMost));
  return require_range("model.micro_batch_size", model.micro_batch_size, std::int64_t{1},
                       std::int64_t{65536});
}

Expected<void> validate_cluster(const Scenario::Cluster& cluster) {
  DYNMO_TRY(require_range("cluster.pipeline_ranks", std::int64_t{cluster.pipeline_ranks},
                          std::int64_t{1}, kMostPipelineRanks));
  DYNMO_TRY(require_range("cluster.data_parallel", std::int64_t{cluster.data_parallel},
                          std::int64_t{1}, kMostRanks));
  const std::int64_t ranks = std::int64_t{cluster.pipeline_ranks} * cluster.data_parallel;
  DYNMO_TRY(require(ranks <= kMostRanks, "cluster.data_parallel", cluster.data_parallel,
                    fmt::format("at most {} ranks in all", kMostRanks)));
  DYNMO_TRY(require_range("cluster.ranks_per_node", std::int64_t{cluster.ranks_per_node},
                          std::int64_t{1}, kMostRanks));
  DYNMO_TRY(require_one_of("cluster.order", cluster.order, {"pipeline", "data"}));
  for (const std::int64_t rank : cluster.slow_ranks) {
    DYNMO_TRY(require_range("cluster.slow_ranks", rank, std::int64_t{0}, ranks - 1));
  }
  return require(cluster.slow_speed > 0 && cluster.slow_speed <= 1000, "cluster.slow_speed",
                 cluster.slow_speed, "more than 0, at most 1000");
}

Expected<void> validate_training(const Scenario::Training& training) {
  DYNMO_TRY(require_range("training.steps", training.steps, std::int64_t{1}, kMostSteps));
  DYNMO_TRY(require_range("training.micro_batches", training.micro_batches, 1, 65536));
  DYNMO_TRY(schedule::parse_schedule_kind(training.schedule));
  DYNMO_TRY(require(
      training.schedule != "adaptive", "training.schedule", training.schedule,
      "a schedule that a shape alone gives, such as 1f1b; the search balancer finds orders"));
  DYNMO_TRY(require(training.seed >= 0, "training.seed", training.seed, "0 or more"));
  DYNMO_TRY(
      require_range("training.sample_every", training.sample_every, std::int64_t{1}, kMostSteps));
  DYNMO_TRY(require_range("training.checkpoint_every", training.checkpoint_every, std::int64_t{0},
                          kMostSteps));
  return require(training.restart_s <= 1e6, "training.restart", training.restart_s,
                 "at most 1e6 seconds");
}

Expected<void> validate_policy(const Scenario::Policy& policy) {
  DYNMO_TRY(require(!policy.compare.empty() && policy.compare.size() <= 32, "policy.compare",
                    policy.compare.size(), "1 to 32 names"));
  for (const std::string& name : policy.compare) DYNMO_TRY(parse_policy(name));
  DYNMO_TRY(require_range("policy.noise", policy.noise, 0.0, 1.0));
  DYNMO_TRY(require_range("policy.window", policy.window, 1, 1000));
  DYNMO_TRY(require_range("policy.profile_share", policy.profile_share, 0.0, 10.0));
  DYNMO_TRY(require(policy.plan_s <= 1e6, "policy.plan", policy.plan_s, "at most 1e6 seconds"));
  DYNMO_TRY(require(policy.move_bandwidth > 0 && std::isfinite(policy.move_bandwidth),
                    "policy.move_bandwidth", policy.move_bandwidth, "a finite number above 0"));
  DYNMO_TRY(require(policy.move_fixed_s <= 1e6, "policy.move_fixed", policy.move_fixed_s,
                    "at most 1e6 seconds"));
  DYNMO_TRY(require_range("policy.minimum_gain", policy.minimum_gain, 0.0, 1.0));
  DYNMO_TRY(require_range("policy.noise_factor", policy.noise_factor, 0.0, 1000.0));
  DYNMO_TRY(require_range("policy.pack_slack", policy.pack_slack, 0.0, 10.0));
  DYNMO_TRY(require_range("policy.evaluations", policy.evaluations, std::int64_t{0},
                          std::int64_t{10'000'000}));
  return require_range("policy.horizon_steps", policy.horizon_steps, std::int64_t{0}, kMostSteps);
}

Expected<void> validate_events(const Scenario& s) {
  DYNMO_TRY(require(s.events.size() <= 10'000, "event", s.events.size(), "at most 10000 of them"));
  std::int64_t before = 0;
  std::vector<char> here(static_cast<std::size_t>(s.cluster.pipeline_ranks), 1);
  const auto change = [&](std::string_view key, std::int64_t rank, char to) -> Expected<void> {
    DYNMO_TRY(
        require_range(key, rank, std::int64_t{0}, std::int64_t{s.cluster.pipeline_ranks} - 1));
    char& state = here[static_cast<std::size_t>(rank)];
    DYNMO_TRY(
        require(state != to, key, rank, to == 0 ? "a rank that is there" : "a rank that has left"));
    state = to;
    return {};
  };
  for (const Event& event : s.events) {
    DYNMO_TRY(require(
        event.step >= before && event.step < s.training.steps, "event.step", event.step,
        fmt::format("{} (the event before) to {} (the last step)", before, s.training.steps - 1)));
    before = event.step;
    for (const std::int64_t rank : event.leave) DYNMO_TRY(change("event.leave", rank, 0));
    for (const std::int64_t rank : event.join) DYNMO_TRY(change("event.join", rank, 1));
    DYNMO_TRY(require(std::count(here.begin(), here.end(), 1) > 0, "event.leave",
                      fmt::format("all ranks at step {}", event.step), "a rank that stays"));
    DYNMO_TRY(require_range("event.replicas", event.replicas, std::int64_t{0},
                            std::int64_t{s.cluster.data_parallel}));
  }
  return {};
}

std::string resolved(const std::string& path, const std::filesystem::path& folder) {
  const std::filesystem::path given(path);
  return path.empty() || given.is_absolute() ? path : (folder / given).string();
}

Expected<Scenario> read_text(std::string_view text, std::string_view origin,
                             std::span<const std::string> settings,
                             const std::filesystem::path& folder) {
  Scenario scenario;
  const std::vector<TomlKey> keys = keys_of(scenario);
  DYNMO_TRY(apply_toml(keys, text, origin));
  for (std::string* path :
       {&scenario.model.config, &scenario.model.profile, &scenario.dynamism.trace}) {
    *path = resolved(*path, folder);
  }
  DYNMO_TRY(apply_toml_settings(keys, settings, "training.steps=100"));
  if (const auto valid = validate(scenario); !valid) {
    std::string message = valid.error().message;  // names from the file can have any bytes
    std::replace(message.begin(), message.end(), '\n', ' ');
    return make_error(valid.error().code, "{}: {}", origin, message);
  }
  return scenario;
}

}  // namespace

Expected<Scenario> parse_scenario(std::string_view text, std::string_view origin) {
  return read_text(text, origin, {}, {});
}

Expected<Scenario> read_scenario(const std::filesystem::path& path,
                                 std::span<const std::string> settings) {
  DYNMO_ASSIGN(const std::string text, read_file(path));
  return read_text(text, path.string(), settings, path.parent_path());
}

Expected<void> validate(const Scenario& scenario) {
  DYNMO_TRY(validate_model(scenario.model));
  DYNMO_TRY(validate_cluster(scenario.cluster));
  const std::vector<std::string> sources(dynamism::kLoadSources.begin(),
                                         dynamism::kLoadSources.end());
  if (std::find(sources.begin(), sources.end(), scenario.dynamism.source) == sources.end()) {
    return make_error(ErrorCode::kBadInput, "dynamism.source: '{}' is not a source{}",
                      scenario.dynamism.source, suggestion(scenario.dynamism.source, sources));
  }
  DYNMO_TRY(require(scenario.dynamism.trace.empty() || scenario.dynamism.source == "none",
                    "dynamism.source", scenario.dynamism.source, "none beside dynamism.trace"));
  DYNMO_TRY(require(scenario.model.profile.empty() || scenario.dynamism.source == "none",
                    "dynamism.source", scenario.dynamism.source,
                    "none (or dynamism.trace) beside model.profile, which has no shape"));
  DYNMO_TRY(require_one_of("freezing.rule", scenario.freezing_rule,
                           {"plasticity", "schedule", "random"}));
  DYNMO_TRY(
      require_one_of("early_exit.exited", scenario.early_exit_exited, {"removed", "propagated"}));
  DYNMO_TRY(validate_training(scenario.training));
  DYNMO_TRY(validate_policy(scenario.policy));
  return validate_events(scenario);
}

std::string to_toml(const Scenario& scenario) {
  Scenario copy = scenario;
  return dynmo::to_toml(keys_of(copy));
}

}  // namespace dynmo::scenario
