// SPDX-License-Identifier: Apache-2.0
#pragma once

// Traffic between ranks by purpose, as rows of a sparse matrix. It is counted in a run
// (transport/traffic.h) or predicted for a plan (plan/traffic.h).

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"

namespace dynmo {

enum class Purpose { kActivation, kGradient, kReduction, kMigration, kControl };
inline constexpr std::array kPurposes = {Purpose::kActivation, Purpose::kGradient,
                                         Purpose::kReduction, Purpose::kMigration,
                                         Purpose::kControl};
[[nodiscard]] std::string_view name(Purpose purpose);                  // "activation"
[[nodiscard]] Expected<Purpose> parse_purpose(std::string_view text);  // kBadInput

struct MessageCount {
  std::int64_t messages = 0;
  Bytes bytes;
  friend bool operator==(const MessageCount&, const MessageCount&) = default;
};
inline void add(MessageCount& sum, const MessageCount& count) {
  sum.messages += count.messages;
  sum.bytes += count.bytes;
}

struct TrafficRow {
  WorldRank from;
  WorldRank to;
  Purpose purpose = Purpose::kControl;
  MessageCount count;
  friend bool operator==(const TrafficRow&, const TrafficRow&) = default;
};
// Rows ascend by from, to and purpose. No two rows are equal in all three.
using TrafficRows = std::vector<TrafficRow>;

// Sums up rows with the same ranks and purpose. `rows` may come in any order. Omits rows without a
// message.
[[nodiscard]] TrafficRows sums_of(std::vector<TrafficRow> rows);

// Writes and reads the fields of an object (core/fields.h). Ranks are not checked.
[[nodiscard]] Json to_json(const TrafficRow& row);
void read_fields(JsonObject& object, TrafficRow& row);
[[nodiscard]] Json traffic_json(const TrafficRows& rows);

}  // namespace dynmo
