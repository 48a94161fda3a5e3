// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/step_record.h"

#include <limits>
#include <string>

#include "dynmo/core/files.h"
#include "dynmo/observe/number_impl.h"

namespace dynmo::observe {
namespace {

constexpr std::string_view kStepFormat = "dynmo-step-1";

using internal::measured;

int count_of(JsonObject& object, const std::string& key) {
  const std::int64_t value = object.integer(key, 0);
  if (value < 0 || value > std::numeric_limits<int>::max()) {
    object.fail(key, fmt::format("is {}, wanted a whole number from 0 to 2^31 - 1", value));
    return 0;
  }
  return static_cast<int>(value);
}

}  // namespace

Json record_json(const StepRecord& record) {
  Json json = {{"format", kStepFormat},
               {"step", record.step},
               {"rank", record.rank},
               {"generation", record.generation},
               {"loss", measured(record.loss)},
               {"tokens", record.tokens},
               {"step_s", measured(record.step_s)},
               {"predicted_s", measured(record.predicted_s)},
               {"busy_s", measured(record.busy_s)},
               {"idle_s", measured(record.idle_s)},
               {"first_layer", record.first_layer},
               {"layers", record.layers},
               {"frozen_layers", record.frozen_layers},
               {"imbalance", measured(record.imbalance)},
               {"bubble", measured(record.bubble)},
               {"memory_bytes", record.memory_bytes.value},
               {"profile_s", measured(record.profile_s)},
               {"plan_s", measured(record.plan_s)},
               {"migrate_s", measured(record.migrate_s)},
               {"moved_layers", record.moved_layers},
               {"moved_bytes", record.moved_bytes.value},
               {"reduction_s", measured(record.reduction_s)},
               {"checkpoint_s", measured(record.checkpoint_s)},
               {"sent_bytes", record.sent_bytes.value},
               {"gradient_norm", measured(record.gradient_norm)},
               {"learning_rate", measured(record.learning_rate)}};
  if (record.emulated) json["emulated"] = true;
  if (!record.sources.empty()) json["sources"] = record.sources;
  return json;
}

Expected<StepRecord> parse_record(const Json& json, std::string_view origin) {
  JsonObject object(json, std::string(origin));
  const auto number = [&](const char* key) {
    return internal::read_measured(object, json, key, 0.0);
  };
  object.expect_format(kStepFormat);
  StepRecord record;
  record.step = object.integer("step");
  record.rank = count_of(object, "rank");
  record.generation = object.integer("generation", 0);
  record.loss = number("loss");
  record.tokens = object.integer("tokens", 0);
  record.step_s = number("step_s");
  record.predicted_s = number("predicted_s");
  record.busy_s = number("busy_s");
  record.idle_s = number("idle_s");
  record.first_layer = count_of(object, "first_layer");
  record.layers = count_of(object, "layers");
  record.frozen_layers = count_of(object, "frozen_layers");
  record.imbalance = number("imbalance");
  record.bubble = number("bubble");
  record.memory_bytes = object.bytes("memory_bytes", Bytes{0});
  record.profile_s = number("profile_s");
  record.plan_s = number("plan_s");
  record.migrate_s = number("migrate_s");
  record.moved_layers = count_of(object, "moved_layers");
  record.moved_bytes = object.bytes("moved_bytes", Bytes{0});
  record.reduction_s = number("reduction_s");
  record.checkpoint_s = number("checkpoint_s");
  record.sent_bytes = object.bytes("sent_bytes", Bytes{0});
  record.gradient_norm = number("gradient_norm");
  record.learning_rate = number("learning_rate");
  record.emulated = object.boolean("emulated", false);
  object.ignore("sources");
  record.sources = json.value("sources", Json::object());
  if (!record.sources.is_object()) object.fail("sources", "is not an object");
  DYNMO_TRY(object.finish());
  return record;
}

Expected<std::vector<StepRecord>> parse_records(std::string_view text, std::string_view name) {
  std::vector<StepRecord> records;
  int line_number = 0;
  for (std::size_t start = 0; start < text.size();) {
    const std::size_t newline = text.find('\n', start);
    const bool finished = newline != std::string_view::npos;
    const std::size_t end = finished ? newline : text.size();
    const std::string origin = fmt::format("{}: line {}", name, ++line_number);
    const auto json = parse_json(text.substr(start, end - start), origin);
    start = end + 1;
    if (!json && !finished) break;
    if (!json) return json.error();
    DYNMO_ASSIGN(const StepRecord record, parse_record(*json, origin));
    records.push_back(record);
  }
  return records;
}

Expected<std::vector<StepRecord>> read_records(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path));
  return parse_records(text, path.string());
}

}  // namespace dynmo::observe
