// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/step_record.h"

#include <limits>
#include <string>
#include <utility>

#include "dynmo/core/files.h"

namespace dynmo::observe {
namespace {

constexpr std::string_view kStepFormat = "dynmo-step-1";

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
  Json json = {{"format", kStepFormat},   {"step", record.step},
               {"rank", record.rank},     {"generation", record.generation},
               {"tokens", record.tokens}, {"first_layer", record.first_layer},
               {"layers", record.layers}};
  write_facts(record, FactsOf::kStep, json);
  if (record.emulated) json["emulated"] = true;
  if (!record.sources.empty()) json["sources"] = record.sources;
  return json;
}

Expected<StepRecord> parse_record(const Json& json, std::string_view origin) {
  JsonObject object(json, std::string(origin));
  object.expect_format(kStepFormat);
  StepRecord record;
  record.step = object.integer("step");
  record.rank = count_of(object, "rank");
  record.generation = object.integer("generation", 0);
  record.tokens = object.integer("tokens", 0);
  record.first_layer = count_of(object, "first_layer");
  record.layers = count_of(object, "layers");
  read_facts(object, json, FactsOf::kStep, record);
  record.emulated = object.boolean("emulated", false);
  object.ignore("sources");
  record.sources = json.value("sources", Json::object());
  if (!record.sources.is_object()) object.fail("sources", "is not an object");
  DYNMO_TRY(object.finish());
  return record;
}

Expected<void> visit_records(std::string_view text, std::string_view name,
                             const std::function<void(StepRecord)>& visit) {
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
    DYNMO_ASSIGN(StepRecord record, parse_record(*json, origin));
    visit(std::move(record));
  }
  return {};
}

Expected<std::vector<StepRecord>> parse_records(std::string_view text, std::string_view name) {
  std::vector<StepRecord> records;
  DYNMO_TRY(
      visit_records(text, name, [&](StepRecord record) { records.push_back(std::move(record)); }));
  return records;
}

Expected<std::vector<StepRecord>> read_records(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path));
  return parse_records(text, path.string());
}

}  // namespace dynmo::observe
