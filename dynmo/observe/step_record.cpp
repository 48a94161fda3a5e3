// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/step_record.h"

#include <string>
#include <utility>

#include "dynmo/core/files.h"

namespace dynmo::observe {
namespace {

constexpr std::string_view kStepFormat = "dynmo-step-1";

}  // namespace

void list_fields(IsA<StepRecord> auto& record, auto& visit) {
  visit.format(kStepFormat);
  visit("step", record.step);
  visit.optional("rank", record.rank, kWholeFact);
  visit.optional("generation", record.generation);
  visit.optional("tokens", record.tokens);
  visit.optional("first_layer", record.first_layer, kWholeFact);
  visit.optional("layers", record.layers, kWholeFact);
  list_facts(record, FactsOf::kStep, visit);
  visit.left_out("emulated", record.emulated, false);
  visit.figures("sources", record.sources);
}

Json record_json(const StepRecord& record) { return write_list(record); }

Expected<StepRecord> parse_record(const Json& json, std::string_view origin) {
  return parse_fields<StepRecord>(json, origin);
}

Expected<void> visit_records(std::string_view text, std::string_view name,
                             const std::function<void(StepRecord)>& visit) {
  return visit_json_lines(text, name,
                          [&](const Json& json, const std::string& origin) -> Expected<void> {
                            DYNMO_ASSIGN(StepRecord record, parse_record(json, origin));
                            visit(std::move(record));
                            return {};
                          });
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
