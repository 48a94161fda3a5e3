// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/scenario.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <limits>
#include <utility>

#include "dynmo/core/effects.h"
#include "dynmo/core/files.h"
#include "dynmo/core/nearest.h"
#include "dynmo/core/toml.h"
#include "dynmo/dynamism/registry.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/scenario/policy_name.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::scenario {
namespace {

std::vector<TomlKey> keys_of(Event& event) {
  return {{"event.step", &event.step},       {"event.leave", &event.leave},
          {"event.join", &event.join},       {"event.replicas", &event.replicas},
          {"event.failure", &event.failure}, {"event.slow", &event.slow},
          {"event.speed", &event.speed}};
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

// Returns whether `is` holds for one of the compared policies.
template <typename Is>
bool any_policy(const Scenario& scenario, Is is) {
  return std::ranges::any_of(scenario.policy.compare, [&](const std::string& name) {
    const auto policy = parse_policy(name);
    return policy && is(*policy);
  });
}

std::vector<TomlKey> model_keys(Scenario::Model& m) {
  constexpr double kMaxSize = 1 << 24;
  const Range size = between(0, kMaxSize, "(0: the family's)");
  // The layers of a profile or of a recorded load cannot be changed by keys.
  const ActsIf shaped = when_empty("model.profile");
  const ActsIf computed = when_empty("dynamism.trace");
  const ActsIf described = when_empty("model.config");
  const ActsIf has_experts =
      when_so(m.family == "mixtral" || m.experts > 0,
              fmt::format("model.family = {} and model.experts = 0", m.family), "model.experts");
  std::vector<TomlKey> keys =
      only_if({computed}, {{"model.config", &m.config}, {"model.profile", &m.profile}});
  const std::vector<TomlKey> shape =
      only_if({computed, shaped, described},
              {
                  {"model.family", &m.family, Names{"gpt", "llama", "mixtral"}},
                  {"model.blocks", &m.shape.blocks, between(1, 4096)},
                  {"model.hidden", &m.shape.hidden, between(1, kMaxSize)},
                  {"model.heads", &m.shape.heads, size},
                  {"model.kv_heads", &m.shape.kv_heads, size},
                  {"model.intermediate", &m.shape.intermediate, size},
                  {"model.vocabulary", &m.shape.vocabulary, size},
                  {"model.experts", &m.experts, size},
                  {"model.experts_per_token", &m.experts_per_token, size, {has_experts}},
              });
  keys.insert(keys.end(), shape.begin(), shape.end());
  const std::vector<TomlKey> work = {
      {"model.sequence", &m.shape.sequence, between(0, kMaxSize)},
      {"model.micro_batch_size", &m.micro_batch_size, between(1, 65536)},
      {"model.head_slices", &m.shape.head_slices, between(1, kMaxSize), {computed, shaped}},
      {"model.fused_attention", &m.fused_attention, {}, {computed, shaped}},
  };
  keys.insert(keys.end(), work.begin(), work.end());
  return keys;
}

std::vector<TomlKey> cluster_keys(Scenario::Cluster& c) {
  const std::int64_t ranks = std::int64_t{c.pipeline_ranks} * c.data_parallel;
  const ActsIf has_nodes = when_so(
      ranks > c.ranks_per_node,
      fmt::format("all {} ranks on a node (cluster.ranks_per_node = {})", ranks, c.ranks_per_node),
      "more ranks, or fewer on a node");
  const ActsIf has_neighbors =
      when("cluster.ranks_per_node", at_least(2), "cluster.ranks_per_node of 2 or more");
  const ActsIf has_replicas =
      when("cluster.data_parallel", at_least(2), "cluster.data_parallel of 2 or more");
  return {
      {"cluster.pipeline_ranks", &c.pipeline_ranks, between(1, kMaxPipelineRanks)},
      {"cluster.data_parallel", &c.data_parallel, between(1, kMaxRanks)},
      {"cluster.ranks_per_node", &c.ranks_per_node, between(1, kMaxRanks)},
      {"cluster.order", &c.order, Names{"pipeline", "data"}, {has_replicas}},
      {"cluster.memory", &c.memory},
      {"cluster.inside_latency", TomlSeconds{&c.inside_latency_s}, {}, {has_neighbors}},
      {"cluster.inside_bandwidth", TomlBandwidth{&c.inside_bandwidth}, {}, {has_neighbors}},
      {"cluster.between_latency", TomlSeconds{&c.between_latency_s}, {}, {has_nodes}},
      {"cluster.between_bandwidth", TomlBandwidth{&c.between_bandwidth}, {}, {has_nodes}},
      {"cluster.nic_bandwidth", TomlBandwidth{&c.nic_bandwidth}, {}, {has_nodes}},
      {"cluster.slow_ranks", &c.slow_ranks},
      {"cluster.slow_speed",
       &c.slow_speed,
       above_to(0, 1000),
       {when_given("cluster.slow_ranks", "cluster.slow_ranks")}},
  };
}

std::vector<TomlKey> training_keys(Scenario& s) {
  Scenario::Training& t = s.training;
  const bool fails = std::ranges::any_of(s.events, &Event::failure);
  const ActsIf after_failures = when_so(fails, "no failure", "an [[event]] with failure = true");
  const ActsIf restarts = when_so(
      fails || std::ranges::any_of(s.events, [](const Event& e) { return !e.leave.empty(); }),
      "no rank that leaves or fails", "an [[event]] with leave or failure");
  return {
      {"training.steps", &t.steps, between(1, kMaxSteps)},
      {"training.micro_batches", &t.micro_batches, between(1, 65536)},
      {"training.schedule", &t.schedule, readable_by(schedule::parse_schedule_kind)},
      {"training.recompute", &t.recompute, readable_by(plan::parse_recompute)},
      {"training.seed", &t.seed, at_least(0)},
      {"training.sample_every", &t.sample_every, between(1, kMaxSteps)},
      {"training.checkpoint_every", &t.checkpoint_every, between(0, kMaxSteps), {after_failures}},
      {"training.restart", TomlSeconds{&t.restart_s}, between(0, 1e6, "seconds"), {restarts}},
  };
}

std::vector<TomlKey> policy_keys(Scenario& s) {
  const double largest = std::numeric_limits<double>::max();
  Scenario::Policy& p = s.policy;
  const bool any_replans = replans(s);
  const auto is_search = [](const Policy& policy) {
    return policy.balancer == plan::Balancer::kSearch;
  };
  const ActsIf replanned =
      when_so(any_replans, "no policy that re-plans", "a NAME such as optimal in policy.compare");
  const ActsIf moved = when_so(any_replans || !s.events.empty(), "no policy that moves layers",
                               "a NAME such as optimal in policy.compare");
  const ActsIf searched =
      when_so(any_policy(s, is_search), "no policy that searches", "search in policy.compare");
  const ActsIf packed = when_so(
      any_policy(s,
                 [](const Policy& policy) { return policy.rank_use == control::RankUse::kFewest; }),
      "no policy that packs", "a NAME+pack in policy.compare");
  return {
      {"policy.compare", &p.compare},
      {"policy.noise", &p.noise, between(0, 1), {replanned}},
      {"policy.window", &p.window, between(1, 1000), {replanned}},
      {"policy.profile_share", &p.profile_share, between(0, 10), {replanned}},
      {"policy.plan", TomlSeconds{&p.plan_s}, between(0, 1e6, "seconds")},
      {"policy.search", TomlSeconds{&p.search_s}, between(0, 1e6, "seconds"), {searched}},
      {"policy.move_bandwidth", TomlBandwidth{&p.move_bandwidth}, above_to(0, largest), {moved}},
      {"policy.move_fixed", TomlSeconds{&p.move_fixed_s}, between(0, 1e6, "seconds"), {moved}},
      {"policy.minimum_gain", &p.minimum_gain, between(0, 1), {replanned}},
      {"policy.noise_factor", &p.noise_factor, between(0, 1000), {replanned}},
      {"policy.horizon_steps", &p.horizon_steps, between(0, kMaxSteps), {replanned}},
      {"policy.pack_slack", &p.pack_slack, between(0, 10), {packed}},
      {"policy.release_after", &p.release_after, between(1, kMaxSteps), {packed}},
      {"policy.ranks_min", &p.ranks_min, between(1, kMaxPipelineRanks), {packed}},
      {"policy.evaluations", &p.evaluations, between(0, 10'000'000), {searched}},
  };
}

template <typename T>
Expected<void> require(bool holds, std::string_view key, const T& value, std::string_view wanted) {
  if (holds) return {};
  return make_error(ErrorCode::kBadInput, "{} is {}, wanted {}", key, value, wanted);
}

Expected<void> check_ranks(const Scenario::Cluster& cluster) {
  const std::int64_t ranks = std::int64_t{cluster.pipeline_ranks} * cluster.data_parallel;
  DYNMO_TRY(require(ranks <= kMaxRanks, "cluster.data_parallel", cluster.data_parallel,
                    fmt::format("at most {} ranks in all", kMaxRanks)));
  for (const std::int64_t rank : cluster.slow_ranks) {
    DYNMO_TRY(
        check_allowed("cluster.slow_ranks", rank, between(0, static_cast<double>(ranks - 1))));
  }
  return {};
}

Expected<void> check_loads(const Scenario& scenario) {
  const std::string& source = scenario.dynamism.source;
  const std::vector<std::string> known = dynamism::load_names(scenario.sources);
  const auto found = std::find(known.begin(), known.end(), source);
  if (found == known.end()) {
    return make_error(ErrorCode::kBadInput, "dynamism.source: '{}' is not a source{}", source,
                      suggestion(source, known));
  }
  DYNMO_TRY(require(scenario.dynamism.trace.empty() || source == "none", "dynamism.source", source,
                    "none with dynamism.trace"));
  return require(scenario.model.profile.empty() || source == "none", "dynamism.source", source,
                 "none (or dynamism.trace) with model.profile, which has no shape");
}

Expected<void> check_events(const Scenario& s) {
  DYNMO_TRY(require(s.events.size() <= 10'000, "event", s.events.size(), "at most 10000 of them"));
  std::int64_t before = 0;
  std::vector<char> here(static_cast<std::size_t>(s.cluster.pipeline_ranks), 1);
  const auto change = [&](std::string_view key, std::int64_t rank, char to) -> Expected<void> {
    DYNMO_TRY(check_allowed(key, rank, between(0, s.cluster.pipeline_ranks - 1)));
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
    DYNMO_TRY(check_allowed("event.replicas", event.replicas, between(0, s.cluster.data_parallel)));
    for (const std::int64_t rank : event.slow) {
      DYNMO_TRY(check_allowed("event.slow", rank, between(0, s.cluster.pipeline_ranks - 1)));
    }
    DYNMO_TRY(check_allowed("event.speed", event.speed, above_to(0, 1)));
    DYNMO_TRY(require(event.speed == 1 || !event.slow.empty(), "event.speed", event.speed,
                      "event.slow with it, the ranks of that speed"));
  }
  return {};
}

std::string resolved(const std::string& path, const std::filesystem::path& folder) {
  const std::filesystem::path given(path);
  return path.empty() || given.is_absolute() ? path : (folder / given).string();
}

// Returns whether a text has no key. It would compare all defaults, which is never intended.
bool says_nothing(std::string_view text) {
  for (bool comment = false; const char c : text) {
    if (c == '\n') comment = false;
    if (c == '#') comment = true;
    if (!comment && std::isspace(static_cast<unsigned char>(c)) == 0) return false;
  }
  return true;
}

Expected<Scenario> read_text(std::string_view text, std::string_view origin,
                             std::vector<std::string> settings, std::vector<std::string> compare,
                             const std::filesystem::path& folder) {
  Scenario scenario;
  DYNMO_TRY(apply_toml(keys_of(scenario), text, origin));
  for (std::string* path :
       {&scenario.model.config, &scenario.model.profile, &scenario.dynamism.trace}) {
    *path = resolved(*path, folder);
  }
  if (!compare.empty()) settings.push_back("policy.compare=" + toml_value(&compare));
  Scenario standard;
  DYNMO_TRY(apply_overrides([&] { return keys_of(scenario); }, keys_of(standard), settings,
                            "training.steps=100"));
  if (const auto valid = validate(scenario); !valid) {
    std::string message = valid.error().message;  // names from the file can have any bytes
    std::replace(message.begin(), message.end(), '\n', ' ');
    return make_error(valid.error().code, "{}: {}", origin, message);
  }
  return scenario;
}

}  // namespace

Expected<Scenario> parse_scenario(std::string_view text, std::string_view origin,
                                  std::vector<std::string> compare) {
  return read_text(text, origin, {}, std::move(compare), {});
}

Expected<Scenario> read_scenario(const std::filesystem::path& path,
                                 std::span<const std::string> settings,
                                 std::vector<std::string> compare) {
  DYNMO_ASSIGN(const std::string text, read_file(path, kMaxTomlBytes));
  if (settings.empty() && says_nothing(text)) {
    return make_error(ErrorCode::kBadInput,
                      "{}: is empty, wanted a scenario, such as one of examples/scenarios",
                      path.string());
  }
  return read_text(text, path.string(), {settings.begin(), settings.end()}, std::move(compare),
                   path.parent_path());
}

std::vector<TomlKey> keys_of(Scenario& s) {
  std::vector<TomlKey> keys;
  const auto append = [&](const std::vector<TomlKey>& more) {
    keys.insert(keys.end(), more.begin(), more.end());
  };
  append(model_keys(s.model));
  append({{"device.name", &s.device}});
  append(cluster_keys(s.cluster));
  append({{"dynamism.source", &s.dynamism.source}, {"dynamism.trace", &s.dynamism.trace}});
  append(s.sources.scenario_keys());
  append(training_keys(s));
  append(policy_keys(s));
  append({{"event", tables_of(s.events)}});
  return keys;
}

Expected<void> validate(const Scenario& scenario) {
  Scenario copy = scenario;
  Scenario standard;
  standard.sources = scenario.sources.defaults();
  DYNMO_TRY(check_values(keys_of(copy)));
  DYNMO_TRY(require(scenario.model.config.empty() || scenario.model.profile.empty(),
                    "model.profile", scenario.model.profile,
                    "either model.config or model.profile"));
  const bool layers_given = !scenario.model.profile.empty() || !scenario.dynamism.trace.empty();
  DYNMO_TRY(require(!layers_given || scenario.model.shape.head_slices == 1, "model.head_slices",
                    scenario.model.shape.head_slices,
                    "1 with model.profile or dynamism.trace, which have the layers they have"));
  DYNMO_TRY(check_ranks(scenario.cluster));
  DYNMO_TRY(check_loads(scenario));
  DYNMO_TRY(require(
      scenario.training.schedule != "adaptive", "training.schedule", scenario.training.schedule,
      "a schedule that a shape alone gives, such as 1f1b; the search balancer finds orders"));
  const std::vector<std::string>& compare = scenario.policy.compare;
  DYNMO_TRY(require(!compare.empty() && compare.size() <= 32, "policy.compare",
                    fmt::format("a list of {}", compare.size()), "1 to 32 names"));
  for (auto name = compare.begin(); name != compare.end(); ++name) {
    DYNMO_TRY(parse_policy(*name));
    if (std::find(compare.begin(), name, *name) == name) continue;
    return make_error(ErrorCode::kBadInput, "policy.compare names '{}' twice: wanted each once",
                      *name);
  }
  const cost::DecoderShape& sizes = scenario.model.shape;
  DYNMO_TRY(require(sizes.heads == 0 || sizes.hidden % sizes.heads == 0, "model.heads", sizes.heads,
                    fmt::format("a divisor of model.hidden ({})", sizes.hidden)));
  DYNMO_TRY(check_events(scenario));
  return check_effects(keys_of(copy), keys_of(standard));
}

bool replans(const Scenario& scenario) {
  return any_policy(
      scenario, [](const Policy& policy) { return policy.replanning == Replanning::kAutonomous; });
}

std::string idle_source(const Scenario& scenario) {
  const bool sized = scenario.model.config.empty();
  for (const std::string_view table : scenario.sources.tables()) {
    if (dynamism::load_name(table) != scenario.dynamism.source) continue;
    return scenario.sources.idle_in(table, {.steps = scenario.training.steps,
                                            .blocks = sized ? scenario.model.shape.blocks : 0});
  }
  return "";
}

std::string to_toml(const Scenario& scenario) {
  Scenario copy = scenario;
  return dynmo::to_toml(keys_of(copy));
}

}  // namespace dynmo::scenario
