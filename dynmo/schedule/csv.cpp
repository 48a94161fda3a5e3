// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/csv.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "dynmo/schedule/text.h"

namespace dynmo::schedule {
namespace {

constexpr std::size_t kMaxShown = 40;  // characters of a bad cell in its message
constexpr std::string_view kOverlap = "OVERLAP_F_B";
constexpr std::array<std::string_view, 3> kIgnored = {"UNSHARD", "RESHARD", "REDUCE_GRAD"};
constexpr std::string_view kBlanks = " \t";
constexpr std::string_view kDigits = "0123456789";
// Limit of (stage, micro-batch) pairs per action. A valid schedule has an F for each pair. Some may
// be missing, for check() to find, but a short text must not request a large table.
constexpr std::size_t kPairsPerAction = 4;

std::string_view trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

// Removes from `rest` the part before the next separator, and the separator. Returns the part.
std::string_view next_part(std::string_view& rest, char separator) {
  const std::size_t end = std::min(rest.find(separator), rest.size());
  const std::string_view part = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return part;
}

// Returns a bad cell, shortened and without control characters, for a message.
std::string shown(std::string_view text) {
  std::string result(text.substr(0, kMaxShown));
  if (text.size() > kMaxShown) result += "...";
  std::replace_if(
      result.begin(), result.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return result;
}

// Returns whether a cell is left out, such as 0UNSHARD. A micro-batch may follow, which PyTorch
// reads but does not write.
bool is_ignored(std::string_view cell) {
  const std::size_t letters = cell.find_first_not_of(kDigits);
  if (letters == 0 || letters == std::string_view::npos) return false;
  const std::size_t last = cell.find_last_not_of(kDigits);
  const std::string_view kind = cell.substr(letters, last - letters + 1);
  return std::find(kIgnored.begin(), kIgnored.end(), kind) != kIgnored.end();
}

// Reads the actions by row, and derives the pipeline from them.
class Reader {
 public:
  explicit Reader(std::string_view origin) : origin_(origin) {}

  Expected<void> read(std::string_view text) {
    while (!text.empty()) {
      std::string_view row = next_part(text, '\n');
      if (row.ends_with('\r')) row.remove_suffix(1);
      rows_.emplace_back();
      for (column_ = 1; !row.empty(); ++column_) DYNMO_TRY(read_cell(trimmed(next_part(row, ','))));
    }
    return {};
  }

  Expected<CsvSchedule> finish() {
    const auto stages = static_cast<std::size_t>(last_stage_ + 1);
    const auto micro_batches = static_cast<std::size_t>(last_micro_batch_ + 1);
    const std::size_t most = kPairsPerAction * static_cast<std::size_t>(actions_);
    if (stages > most || micro_batches > most || stages * micro_batches > most) {
      return make_error(ErrorCode::kBadInput,
                        "{}: stages up to {} and micro-batches up to {}, but only {} actions; want "
                        "an F for each pair",
                        origin_, last_stage_, last_micro_batch_, actions_);
    }
    CsvSchedule read{.schedule = {.shape = {.ranks = static_cast<int>(rows_.size()),
                                            .micro_batches = static_cast<int>(micro_batches),
                                            .stages = {}},
                                  .ranks = {},
                                  .lowered = lowered_},
                     .ignored = ignored_};
    DYNMO_ASSIGN(read.schedule.shape.stages, stage_shapes(stages));
    if (const auto valid = validate(read.schedule.shape); !valid) {
      return make_error(ErrorCode::kBadInput, "{}: {}", origin_, valid.error().message);
    }
    read.schedule.ranks = std::move(rows_);
    return read;
  }

 private:
  Expected<void> read_cell(std::string_view cell) {
    if (cell.empty()) return {};
    if (cell.front() == '(') return read_overlap(cell);
    if (is_ignored(cell)) {
      ++ignored_;
      return {};
    }
    return read_action(cell);
  }

  Expected<void> read_overlap(std::string_view cell) {
    const std::size_t close = cell.find(')');
    if (close == std::string_view::npos || trimmed(cell.substr(close + 1)) != kOverlap) {
      return bad_cell(
          fmt::format("'{}' is not an action; want overlapped ones as "
                      "(1F0;2B1){}",
                      shown(cell), kOverlap));
    }
    std::string_view inside = cell.substr(1, close - 1);
    while (!inside.empty()) {
      const std::string_view part = trimmed(next_part(inside, ';'));
      if (!part.empty()) DYNMO_TRY(read_action(part));
    }
    return {};
  }

  Expected<void> read_action(std::string_view text) {
    const Expected<Action> action = parse_action(shown(text));
    if (!action) return bad_cell(action.error().message);
    rows_.back().push_back(*action);
    ++actions_;
    lowered_ = lowered_ || !is_compute(action->kind);
    last_stage_ = std::max<std::int64_t>(last_stage_, action->stage.value);
    last_micro_batch_ = std::max<std::int64_t>(last_micro_batch_, action->micro_batch.value);
    return {};
  }

  // Returns the shape of each stage, by the row that runs its F. The number of stages is bounded by
  // that of actions.
  [[nodiscard]] Expected<std::vector<StageShape>> stage_shapes(std::size_t stages) const {
    constexpr std::int32_t kNowhere = -1;
    std::vector<StageShape> shapes(stages, {.rank = Rank{kNowhere}, .frozen = true});
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      for (const Action& action : rows_[row]) {
        StageShape& stage = shapes[action.stage.index()];
        if (is_compute(action.kind) && action.kind != ActionKind::kForward) stage.frozen = false;
        if (action.kind != ActionKind::kForward) continue;
        const Rank here(static_cast<std::int32_t>(row));
        if (stage.rank.value == kNowhere) stage.rank = here;
        if (stage.rank != here) {
          return make_error(ErrorCode::kBadInput,
                            "{}: stage {} runs F in rows {} and {}; want one row a stage", origin_,
                            action.stage, stage.rank.value + 1, row + 1);
        }
      }
    }
    for (std::size_t s = 0; s < stages; ++s) {
      if (shapes[s].rank.value == kNowhere) {
        return make_error(ErrorCode::kBadInput,
                          "{}: stage {} has no F, which would say its rank; want one for each of "
                          "{} stages",
                          origin_, s, stages);
      }
      if (s > 0 && !shapes[s - 1].frozen) shapes[s].frozen = false;
    }
    return shapes;
  }

  [[nodiscard]] Error bad_cell(std::string_view problem) const {
    return make_error(ErrorCode::kBadInput, "{}: row {}, column {}: {}", origin_, rows_.size(),
                      column_, problem);
  }

  std::string origin_;
  std::vector<std::vector<Action>> rows_;
  std::size_t column_ = 0;  // of the cell being read, from 1
  std::int64_t actions_ = 0;
  std::int64_t ignored_ = 0;
  std::int64_t last_stage_ = -1;
  std::int64_t last_micro_batch_ = -1;
  bool lowered_ = false;
};

}  // namespace

Expected<CsvSchedule> read_csv(std::string_view text, std::string_view origin) {
  if (text.size() > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
    return make_error(ErrorCode::kBadInput, "{}: {} bytes of CSV; want less than 2^31", origin,
                      text.size());
  }
  Reader reader(origin);
  DYNMO_TRY(reader.read(text));
  return reader.finish();
}

std::string write_csv(const Schedule& schedule) {
  std::string text;
  for (const std::vector<Action>& list : schedule.ranks) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (i > 0) text += ',';
      text += to_string(list[i]);
    }
    text += "\r\n";
  }
  return text;
}

}  // namespace dynmo::schedule
