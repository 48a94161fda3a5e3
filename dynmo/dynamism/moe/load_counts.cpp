// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/moe/load_counts.h"

#include <fmt/format.h>

#include <iterator>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"

namespace dynmo::dynamism {
namespace {

constexpr double kMaxTokens = 1e15;  // of a step

using RowsOfCounts = std::vector<std::vector<double>>;

Error bad_counts(std::string_view place, std::string_view fault) {
  return Error{ErrorCode::kBadInput,
               fmt::format("{}: /sources/moe/counts {}, wanted a list of tokens by expert for each "
                           "block, as a training with moe.enabled writes it",
                           place, fault)};
}

// Returns the counts of a record, or null if it has none.
const Json* find_counts(const Json& record) {
  const Json* found = &record;
  for (const char* key : {"sources", "moe", "counts"}) {
    if (!found->is_object()) return nullptr;
    const auto next = found->find(key);
    if (next == found->end()) return nullptr;
    found = &*next;
  }
  return found;
}

Expected<RowsOfCounts> counts_of(const Json& json, std::string_view place) {
  if (!json.is_array() || json.empty()) return bad_counts(place, "is no list of blocks");
  RowsOfCounts counts;
  for (const Json& block : json) {
    if (!block.is_array() || block.empty()) return bad_counts(place, "has a block without experts");
    std::vector<double>& own = counts.emplace_back();
    for (const Json& count : block) {
      if (!count.is_number()) return bad_counts(place, "has a count that is not numeric");
      own.push_back(count.get<double>());
      if (!(own.back() >= 0 && own.back() <= kMaxTokens)) {
        return bad_counts(place, fmt::format("has a count of {}", own.back()));
      }
    }
    if (own.size() != counts.front().size())
      return bad_counts(place, "has blocks of unequal sizes");
  }
  return counts;
}

Expected<void> take(RecordedCounts& recorded, const Json& record, std::string_view place) {
  const Json* json = find_counts(record);
  if (json == nullptr) return {};
  DYNMO_ASSIGN(RowsOfCounts counts, counts_of(*json, place));
  const auto step = record.find("step");
  if (step == record.end() || !step->is_number_integer()) {
    return make_error(ErrorCode::kBadInput, "{}: /step is no whole number", place);
  }
  const bool other =
      !recorded.steps.empty() && (counts.size() != recorded.steps.begin()->second.size() ||
                                  std::ssize(counts.front()) != recorded.experts);
  if (other) return bad_counts(place, "has other sizes than in the lines before");
  recorded.experts = std::ssize(counts.front());
  recorded.steps.insert_or_assign(step->get<std::int64_t>(), std::move(counts));
  return {};
}

}  // namespace

const RowsOfCounts& RecordedCounts::at(std::int64_t step) const {
  DYNMO_CHECK(!steps.empty(), "recorded counts");
  const auto after = steps.upper_bound(step);
  return after == steps.begin() ? after->second : std::prev(after)->second;
}

Expected<RecordedCounts> parse_counts(std::string_view text, std::string_view origin) {
  RecordedCounts recorded;
  const auto add = [&](const Json& record, const std::string& place) {
    return take(recorded, record, place);
  };
  DYNMO_TRY(visit_json_lines(text, origin, add, ":"));
  if (recorded.steps.empty()) {
    return make_error(
        ErrorCode::kBadInput,
        "'{}' has no record with /sources/moe/counts, wanted those of a training with "
        "moe.enabled = true, such as RUN/records/rank-0.jsonl",
        origin);
  }
  return recorded;
}

Expected<RecordedCounts> read_counts(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, read_file(path));
  return parse_counts(text, path.string());
}

}  // namespace dynmo::dynamism
