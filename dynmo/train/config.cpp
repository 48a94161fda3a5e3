// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <cmath>
#include <optional>
#include <sstream>
#include <type_traits>

#include "dynmo/core/digest.h"
#include "dynmo/core/files.h"
#include "dynmo/core/nearest.h"
#include "dynmo/dynamism/freezing.h"
#include "dynmo/plan/balance.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::train {
namespace {

// The one list of keys: reading, --set, saving and the nearest-key message all follow it.
template <typename AnyConfig, typename Visit>
void visit(AnyConfig& c, Visit&& key) {
  key("model.hidden", c.model.hidden);
  key("model.blocks", c.model.blocks);
  key("model.heads", c.model.heads);
  key("model.kv_heads", c.model.kv_heads);
  key("model.intermediate", c.model.intermediate);
  key("model.sequence", c.model.sequence);
  key("model.dropout", c.model.dropout);
  key("model.rope_theta", c.model.rope_theta);
  key("data.path", c.data.path);
  key("batch.micro_batches", c.batch.micro_batches);
  key("batch.micro_batch_size", c.batch.micro_batch_size);
  key("optimizer.learning_rate", c.optimizer.learning_rate);
  key("optimizer.minimum_learning_rate", c.optimizer.minimum_learning_rate);
  key("optimizer.warmup_steps", c.optimizer.warmup_steps);
  key("optimizer.beta1", c.optimizer.beta1);
  key("optimizer.beta2", c.optimizer.beta2);
  key("optimizer.epsilon", c.optimizer.epsilon);
  key("optimizer.weight_decay", c.optimizer.weight_decay);
  key("optimizer.clip_norm", c.optimizer.clip_norm);
  key("train.steps", c.train.steps);
  key("train.seed", c.train.seed);
  key("train.validation_every", c.train.validation_every);
  key("train.validation_steps", c.train.validation_steps);
  key("pipeline.ranks", c.pipeline.ranks);
  key("pipeline.schedule", c.pipeline.schedule);
  key("pipeline.balancer", c.pipeline.balancer);
  key("pipeline.cut", c.pipeline.cut);
  key("pipeline.measure_steps", c.pipeline.measure_steps);
  key("pipeline.pin", c.pipeline.pin);
  key("pipeline.timeout_s", c.pipeline.timeout_s);
  key("balance.enabled", c.balance.enabled);
  key("balance.balancer", c.balance.balancer);
  key("balance.minimum_gain", c.balance.minimum_gain);
  key("balance.noise_factor", c.balance.noise_factor);
  key("balance.window", c.balance.window);
  key("freezing.enabled", c.freezing.enabled);
  key("freezing.start", c.freezing.start);
  key("freezing.end", c.freezing.end);
  key("freezing.fraction", c.freezing.fraction);
  key("freezing.every", c.freezing.every);
  key("checkpoint.every", c.checkpoint.every);
  key("checkpoint.keep", c.checkpoint.keep);
  key("run.directory", c.run.directory);
  key("run.trace_steps", c.run.trace_steps);
}

std::vector<std::string> all_keys() {
  std::vector<std::string> keys;
  const Config config;
  visit(config, [&](const char* key, const auto&) { keys.emplace_back(key); });
  return keys;
}

// Reads a TOML value into a field; the wanted type's name if it is another.
const char* read(const toml::node& node, std::int64_t& field) {
  if (!node.is_integer()) return "a whole number";
  field = node.as_integer()->get();
  return nullptr;
}
const char* read(const toml::node& node, double& field) {
  const std::optional<double> value = node.is_number() ? node.value<double>() : std::nullopt;
  if (!value || !std::isfinite(*value)) return "a finite number";
  field = *value;
  return nullptr;
}
const char* read(const toml::node& node, bool& field) {
  if (!node.is_boolean()) return "true or false";
  field = node.as_boolean()->get();
  return nullptr;
}
const char* read(const toml::node& node, std::string& field) {
  if (!node.is_string()) return "a string";
  field = node.as_string()->get();
  return nullptr;
}
const char* read(const toml::node& node, std::vector<std::int64_t>& field) {
  if (!node.is_array()) return "an array of whole numbers";
  std::vector<std::int64_t> values;
  for (const toml::node& element : *node.as_array()) {
    std::int64_t value = 0;
    if (read(element, value) != nullptr) return "an array of whole numbers";
    values.push_back(value);
  }
  field = std::move(values);
  return nullptr;
}

std::string shown(const toml::node& node) {
  std::ostringstream text;
  node.visit([&](const auto& value) {
    if constexpr (toml::is_table<decltype(value)>) {
      text << "a table";
    } else {
      text << value;
    }
  });
  return text.str();
}

// Sets the field of a dotted key. `where` precedes the message.
Expected<void> set(Config& config, const std::string& key, const toml::node& value,
                   const std::string& where) {
  bool known = false;
  const char* wanted = nullptr;
  visit(config, [&](const char* name, auto& field) {
    if (key != name) return;
    known = true;
    wanted = read(value, field);
  });
  if (!known) {
    return make_error(ErrorCode::kBadInput, "{}: '{}' is not a known key{}", where, key,
                      suggestion(key, all_keys()));
  }
  if (wanted != nullptr) {
    return make_error(ErrorCode::kBadInput, "{}: {} is {}, wanted {}", where, key, shown(value),
                      wanted);
  }
  return {};
}

Expected<void> set_table(Config& config, const toml::table& table, const std::string& prefix,
                         const std::string& file) {
  for (const auto& [name, value] : table) {
    const std::string key =
        prefix.empty() ? std::string(name.str()) : fmt::format("{}.{}", prefix, name.str());
    const std::string where = fmt::format("{}:{}", file, value.source().begin.line);
    if (value.is_table() && prefix.empty()) {
      DYNMO_TRY(set_table(config, *value.as_table(), key, file));
    } else {
      DYNMO_TRY(set(config, key, value, where));
    }
  }
  return {};
}

Expected<toml::table> parse(const std::string& text, const std::string& origin) {
  try {
    return toml::parse(text, origin);
  } catch (const toml::parse_error& fault) {
    return make_error(ErrorCode::kBadInput, "{}:{}: wanted TOML: {}", origin,
                      fault.source().begin.line, fault.description());
  }
}

std::string toml_value(std::int64_t value) { return fmt::format("{}", value); }
std::string toml_value(bool value) { return value ? "true" : "false"; }
std::string toml_value(double value) {
  const std::string text = fmt::format("{}", value);
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}
std::string toml_value(const std::string& value) {
  std::ostringstream text;
  text << toml::value<std::string>(value);
  return text.str();
}
std::string toml_value(const std::vector<std::int64_t>& value) {
  return fmt::format("[{}]", fmt::join(value, ", "));
}

template <typename T>
Expected<void> require(bool holds, const char* key, const T& value, const char* wanted) {
  if (holds) return {};
  return make_error(ErrorCode::kBadInput, "{} is {}, wanted {}", key, value, wanted);
}

// What the engine runs: one stage a rank, the backward pass in one.
Expected<void> runnable_schedule(const std::string& name) {
  DYNMO_ASSIGN(const auto kind, schedule::parse_schedule_kind(name));
  if (kind == schedule::ScheduleKind::kGpipe || kind == schedule::ScheduleKind::k1F1B) return {};
  return make_error(ErrorCode::kBadInput,
                    "pipeline.schedule is '{}', which the engine cannot run yet, wanted gpipe or "
                    "1f1b",
                    name);
}

Expected<void> runnable_balancer(const std::string& name, std::string_view key) {
  DYNMO_ASSIGN(const auto balancer, plan::parse_balancer(name));
  if (balancer != plan::Balancer::kVPair && balancer != plan::Balancer::kSearch) return {};
  return make_error(ErrorCode::kBadInput,
                    "{} is '{}', which wants schedules that the engine cannot run yet, wanted "
                    "uniform, parameters, time, diffusion-parameters, diffusion-time or optimal",
                    key, name);
}

}  // namespace

Expected<void> apply_file(Config& config, const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path));
  DYNMO_ASSIGN(const toml::table table, parse(text, path.string()));
  return set_table(config, table, "", path.string());
}

Expected<void> apply_settings(Config& config, std::span<const std::string> settings) {
  for (const std::string& setting : settings) {
    const std::string where = fmt::format("--set {}", setting);
    const auto equals = setting.find('=');
    if (equals == std::string::npos || equals == 0) {
      return make_error(ErrorCode::kBadInput, "{}: wanted key=value, such as train.steps=100",
                        where);
    }
    const std::string key = setting.substr(0, equals);
    const std::string value = setting.substr(equals + 1);
    auto table = parse("value = " + value, where);
    if (!table || table->size() != 1) {  // a string without quotes
      toml::table text;
      text.insert("value", value);
      table = std::move(text);
    }
    DYNMO_TRY(set(config, key, *table->get("value"), where));
  }
  return {};
}

Expected<void> validate(const Config& c) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 24;
  const auto in = [](std::int64_t value, std::int64_t low) {
    return value >= low && value <= kLarge;
  };
  DYNMO_TRY(require(in(c.batch.micro_batches, 1), "batch.micro_batches", c.batch.micro_batches,
                    "1 or more"));
  DYNMO_TRY(require(in(c.batch.micro_batch_size, 1), "batch.micro_batch_size",
                    c.batch.micro_batch_size, "1 or more"));
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
  DYNMO_TRY(require(c.pipeline.timeout_s > 0, "pipeline.timeout_s", c.pipeline.timeout_s,
                    "more than 0 seconds"));
  DYNMO_TRY(runnable_schedule(c.pipeline.schedule));
  DYNMO_TRY(runnable_balancer(c.pipeline.balancer, "pipeline.balancer"));
  DYNMO_TRY(runnable_balancer(c.balance.balancer, "balance.balancer"));
  DYNMO_TRY(require(c.balance.minimum_gain >= 0, "balance.minimum_gain", c.balance.minimum_gain,
                    "0 or more"));
  DYNMO_TRY(require(c.balance.noise_factor >= 0, "balance.noise_factor", c.balance.noise_factor,
                    "0 or more"));
  DYNMO_TRY(require(in(c.balance.window, 1), "balance.window", c.balance.window, "1 or more"));
  DYNMO_TRY(dynamism::validate({.start = c.freezing.start,
                                .end = c.freezing.end,
                                .fraction = c.freezing.fraction,
                                .every = c.freezing.every}));
  DYNMO_TRY(require(in(c.checkpoint.every, 0), "checkpoint.every", c.checkpoint.every,
                    "0 (none) or more"));
  DYNMO_TRY(require(in(c.checkpoint.keep, 1), "checkpoint.keep", c.checkpoint.keep, "1 or more"));
  DYNMO_TRY(require(in(c.run.trace_steps, 0), "run.trace_steps", c.run.trace_steps, "0 or more"));
  DYNMO_TRY(require(!c.run.directory.empty(), "run.directory", "''", "a folder"));
  return {};
}

std::string to_toml(const Config& config) {
  std::string text;
  std::string table;
  visit(config, [&](const std::string& key, const auto& field) {
    const auto dot = key.find('.');
    if (key.substr(0, dot) != table) {
      table = key.substr(0, dot);
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", table);
    }
    text += fmt::format("{} = {}\n", key.substr(dot + 1), toml_value(field));
  });
  return text;
}

std::string identity(const Config& config) {
  std::string text;
  visit(config, [&](const std::string& key, const auto& field) {
    const std::string table = key.substr(0, key.find('.'));
    const bool decides = table == "model" || table == "batch" || table == "optimizer" ||
                         table == "freezing" || key == "train.steps" || key == "train.seed";
    if (decides) text += fmt::format("{}={}\n", key, toml_value(field));
  });
  return digest_of(text).hex();
}

}  // namespace dynmo::train
