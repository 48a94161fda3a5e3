// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/question.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/cost/device.h"
#include "dynmo/cost/files.h"
#include "dynmo/cost/hugging_face.h"

namespace dynmo::python {
namespace {

constexpr std::int64_t kMaxRanks = 1 << 16;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;

// The values of a question that are no documents.
struct Values {
  std::string device;
  std::string recompute;
  std::int64_t sequence = 0;
  std::int64_t micro_batch_size = 1;
  std::int64_t head_slices = 1;
  cost::Parallelism parallelism;
  std::int64_t ranks = 0;
  std::optional<Bytes> memory;
  std::optional<double> head_room;
  std::optional<std::string> form;
  std::optional<std::string> granularity;
};

// A whole number from 1 to `max`; `fallback` where the key is absent.
std::int64_t count(JsonObject& object, const std::string& key, std::int64_t max,
                   std::optional<std::int64_t> fallback) {
  const std::int64_t value = object.integer(key, fallback.value_or(1));
  if (value < 1 || value > max) {
    object.fail(key, fmt::format("is {}, wanted a whole number from 1 to {}", value, max));
  }
  return value;
}

Error wrong(std::string message) { return {ErrorCode::kBadInput, "dynmo: " + std::move(message)}; }

Expected<void> check_model(const Json& json) {
  const bool config = json.contains("config") || json.contains("work");
  if (config == json.contains("profile")) return wrong("wanted either costs or a config");
  for (const char* key : {"device", "sequence"}) {
    if (config && !json.contains(key)) {
      return wrong(
          "a Hugging Face config wants device, such as 'h100', and sequence, such as 4096");
    }
  }
  for (const char* key : {"device", "sequence", "micro_batch_size", "head_slices",
                          "tensor_parallel", "optimizer_shards"}) {
    if (config || !json.contains(key)) continue;
    return wrong(fmt::format("{} goes with a Hugging Face config, not with measured costs", key));
  }
  return {};
}

Expected<void> check_ranks(const Json& json) {
  if (json.contains("ranks") == json.contains("cluster")) {
    return wrong(json.contains("ranks") ? "ranks and cluster are both given, wanted one of them"
                                        : "wanted ranks=N or cluster=");
  }
  if (json.contains("memory") && json.contains("cluster")) {
    return wrong("memory goes with ranks; the ranks of a cluster have memory_bytes each");
  }
  if (json.contains("slack") && json.value("pack", Json(false)) != Json(true)) {
    return wrong("slack goes with pack=True");
  }
  if (json.contains("evaluations") && json.value("balancer", Json("search")) != Json("search")) {
    return wrong("evaluations goes with balancer='search'");
  }
  return {};
}

// Bytes as a number, or as text such as "80GiB".
Expected<std::optional<Bytes>> read_memory(const Json& json, JsonObject& object) {
  if (!json.contains("memory")) return std::optional<Bytes>{};
  Bytes memory;
  if (json["memory"].is_string()) {
    const auto parsed = parse_bytes(object.string("memory"));
    if (!parsed) return wrong("memory: " + parsed.error().message);
    memory = *parsed;
  } else {
    memory = object.bytes("memory");
  }
  if (memory <= Bytes{0}) object.fail("memory", "is not above 0, wanted bytes, such as '80GiB'");
  return std::optional<Bytes>{memory};
}

Expected<void> read_names(JsonObject& object, plan::Question& question) {
  DYNMO_ASSIGN(question.balancer, plan::parse_balancer(object.string("balancer", "search")));
  const std::string schedule = object.string("schedule", "auto");
  if (schedule != "auto") {
    DYNMO_ASSIGN(question.schedule, schedule::parse_schedule_kind(schedule));
  }
  return {};
}

Expected<Values> read_values(const Json& json, plan::Question& question) {
  JsonObject object(json, "dynmo");
  for (const char* key : {"profile", "config", "work", "cluster", "current"}) object.ignore(key);
  Values values;
  values.device = object.string("device", "");
  values.recompute = object.string("recompute", "");
  values.sequence = count(object, "sequence", kMaxTokens, 1);
  values.micro_batch_size = count(object, "micro_batch_size", kMaxTokens, 1);
  values.head_slices = count(object, "head_slices", kMaxTokens, 1);
  values.parallelism.tensor = object.integer("tensor_parallel", 1);
  values.parallelism.optimizer_shards = object.integer("optimizer_shards", 1);
  values.ranks = count(object, "ranks", kMaxRanks, 1);
  DYNMO_ASSIGN(values.memory, read_memory(json, object));
  if (json.contains("head_room")) values.head_room = object.number("head_room");
  if (json.contains("form")) values.form = object.string("form");
  if (json.contains("granularity")) values.granularity = object.string("granularity");
  question.micro_batches =
      static_cast<int>(count(object, "micro_batches", 1 << 16, question.micro_batches));
  question.evaluations = count(object, "evaluations", std::int64_t{1} << 40, question.evaluations);
  question.pack = object.boolean("pack", false);
  question.slack = object.number("slack", 0.0);
  DYNMO_TRY(read_names(object, question));
  DYNMO_TRY(object.finish());
  return values;
}

// A layer as the package counted it in a model of transformers.
Expected<cost::LayerWork> parse_layer_work(JsonObject layer) {
  cost::LayerWork work;
  work.name = layer.string("name");
  const std::string kind = layer.string("kind");
  work.kind = kind == "embedding" ? cost::LayerKind::kEmbedding
              : kind == "head"    ? cost::LayerKind::kHead
                                  : cost::LayerKind::kMlp;
  for (const auto& [key, field] : {std::pair{"matrix_flops", &cost::LayerWork::matrix_flops},
                                   {"core_flops", &cost::LayerWork::core_flops},
                                   {"moved_bytes", &cost::LayerWork::moved_bytes},
                                   {"parameters", &cost::LayerWork::parameters},
                                   {"copied_parameters", &cost::LayerWork::copied_parameters},
                                   {"product_parameters", &cost::LayerWork::product_parameters},
                                   {"activation_bytes", &cost::LayerWork::activation_bytes},
                                   {"boundary_bytes", &cost::LayerWork::boundary_bytes}}) {
    work.*field = layer.number(key);
    if (work.*field < 0) layer.fail(key, fmt::format("is {}, wanted 0 or more", work.*field));
  }
  DYNMO_TRY(layer.finish());
  return work;
}

Expected<void> set_counted(const Json& json, const Values& values, const cost::Device& device,
                           plan::Question& question) {
  if (values.head_slices != 1) return wrong("head_slices goes with a model that has formulas");
  JsonObject root(json, "dynmo");
  std::vector<cost::LayerWork> work;
  for (const JsonObject& layer : root.objects("work")) {
    DYNMO_ASSIGN(cost::LayerWork one, parse_layer_work(layer));
    work.push_back(std::move(one));
  }
  const auto tokens = static_cast<double>(values.sequence * values.micro_batch_size);
  DYNMO_TRY(plan::set_work(question, work, tokens, device, values.parallelism));
  question.costs += "; layers as transformers builds them";
  return {};
}

Expected<cost::TransformerShape> read_shape(const Json& json, const Values& values) {
  DYNMO_ASSIGN(
      cost::TransformerShape shape,
      cost::parse_config(json["config"], "config", values.sequence, values.micro_batch_size));
  shape.head_slices = values.head_slices;
  return shape;
}

Expected<void> set_model(const Json& json, const Values& values, plan::Question& question) {
  if (json.contains("profile")) {
    DYNMO_ASSIGN(question.model, cost::parse_profile(json["profile"], "costs"));
    return {};
  }
  DYNMO_ASSIGN(const cost::Device device, cost::find_device(values.device));
  if (json.contains("work")) return set_counted(json, values, device, question);
  DYNMO_ASSIGN(const cost::TransformerShape shape, read_shape(json, values));
  return plan::set_shape(question, shape, device, values.parallelism);
}

Expected<void> set_machines(const Json& json, const Values& values, plan::Question& question) {
  if (json.contains("cluster")) {
    DYNMO_ASSIGN(cost::Cluster cluster, cost::parse_cluster(json["cluster"], "cluster"));
    plan::set_cluster(question, std::move(cluster), values.head_room);
    return {};
  }
  std::optional<cost::Device> device;
  if (!values.device.empty()) {
    DYNMO_ASSIGN(device, cost::find_device(values.device));
  }
  plan::set_ranks(question, static_cast<int>(values.ranks), values.memory, device,
                  values.head_room);
  return {};
}

}  // namespace

Expected<plan::Question> read_question(const Json& json) {
  plan::Question question;
  DYNMO_TRY(check_model(json));
  DYNMO_TRY(check_ranks(json));
  DYNMO_ASSIGN(const Values values, read_values(json, question));
  DYNMO_TRY(set_model(json, values, question));
  if (values.form) {
    DYNMO_ASSIGN(question.form, plan::parse_emit_form(*values.form));
  }
  DYNMO_TRY(plan::set_granularity(question, values.granularity));
  if (!values.recompute.empty()) {
    DYNMO_ASSIGN(question.recompute, plan::parse_recompute(values.recompute));
  }
  DYNMO_TRY(set_machines(json, values, question));
  if (json.contains("current")) {
    DYNMO_ASSIGN(plan::Plan current, plan::parse_plan(json["current"], "current"));
    DYNMO_TRY(plan::set_from(question, std::move(current), "current"));
  }
  DYNMO_TRY(plan::validate(question));
  return question;
}

Expected<cost::ModelCost> read_costs(const Json& json) {
  plan::Question question;
  DYNMO_TRY(check_model(json));
  DYNMO_ASSIGN(const Values values, read_values(json, question));
  DYNMO_TRY(set_model(json, values, question));
  return std::move(question.model);
}

Expected<std::vector<cost::LayerWork>> read_work(const Json& json) {
  plan::Question question;
  DYNMO_TRY(check_model(json));
  DYNMO_ASSIGN(const Values values, read_values(json, question));
  DYNMO_ASSIGN(const cost::Device device, cost::find_device(values.device));
  if (!json.contains("config")) return wrong("wanted a config");
  DYNMO_ASSIGN(const cost::TransformerShape shape, read_shape(json, values));
  DYNMO_TRY(cost::validate(shape));
  return cost::transformer_work(shape, device.bytes_per_element);
}

}  // namespace dynmo::python
