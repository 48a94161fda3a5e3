// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/traffic.h"

#include <algorithm>
#include <tuple>

#include "dynmo/core/fields.h"

namespace dynmo {
namespace {

constexpr std::array<std::string_view, kPurposes.size()> kNames = {
    "activation", "gradient", "reduction", "migration", "control"};

constexpr Limits kNumber{.wanted = "the number of a rank"};

auto key(const TrafficRow& row) { return std::tuple(row.from, row.to, row.purpose); }

}  // namespace

std::string_view name(Purpose purpose) { return kNames[static_cast<std::size_t>(purpose)]; }

Expected<Purpose> parse_purpose(std::string_view text) {
  for (const Purpose purpose : kPurposes) {
    if (text == name(purpose)) return purpose;
  }
  return make_error(ErrorCode::kBadInput,
                    "purpose is '{}', wanted activation, gradient, reduction, migration or control",
                    text);
}

TrafficRows sums_of(std::vector<TrafficRow> rows) {
  std::erase_if(rows, [](const TrafficRow& row) { return row.count.messages == 0; });
  std::sort(rows.begin(), rows.end(),
            [](const TrafficRow& a, const TrafficRow& b) { return key(a) < key(b); });
  TrafficRows sums;
  for (const TrafficRow& row : rows) {
    if (sums.empty() || key(sums.back()) != key(row)) {
      sums.push_back(row);
    } else {
      add(sums.back().count, row.count);
    }
  }
  return sums;
}

void list_fields(IsA<TrafficRow> auto& row, auto& visit) {
  visit("from", row.from, kNumber);
  visit("to", row.to, kNumber);
  visit.mapped("purpose", row.purpose, name, parse_purpose);
  visit("messages", row.count.messages, kCount);
  visit("bytes", row.count.bytes);
}
Json to_json(const TrafficRow& row) { return write_list(row); }
void read_fields(JsonObject& object, TrafficRow& row) { read_list(object, row); }

Json traffic_json(const TrafficRows& rows) { return internal::written(rows); }

}  // namespace dynmo
