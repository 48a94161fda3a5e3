// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <vector>

#include "dynmo/core/nearest.h"

namespace dynmo::schedule {
namespace {

constexpr std::array<std::string_view, 8> kNames = {"F",      "B",      "I",      "W",
                                                    "SEND_F", "RECV_F", "SEND_B", "RECV_B"};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::optional<std::int32_t> parse_number(std::string_view digits) {
  std::int32_t number = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, number);
  if (digits.empty() || error != std::errc() || stop != end) return std::nullopt;
  return number;
}

// Returns which actions of a rank are shown: those near a mark, or all without a context.
std::vector<bool> shown(std::size_t actions, const std::vector<bool>& marks, int context) {
  if (context < 0) return std::vector<bool>(actions, true);
  std::vector<bool> result(actions, false);
  const auto reach = static_cast<std::size_t>(context);
  for (std::size_t i = 0; i < actions; ++i) {
    if (!marks[i]) continue;
    const std::size_t end = std::min(actions, i + reach + 1);
    for (std::size_t k = i < reach ? 0 : i - reach; k < end; ++k) result[k] = true;
  }
  return result;
}

// Returns the cells of one line.
std::vector<std::string> cells(const std::vector<Action>& actions, const std::vector<bool>& marks,
                               int context) {
  const std::vector<bool> visible = shown(actions.size(), marks, context);
  std::vector<std::string> line;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    if (visible[i]) {
      line.push_back(marks[i] ? ">" + to_string(actions[i]) + "<" : to_string(actions[i]));
    } else if (i == 0 || visible[i - 1]) {
      line.emplace_back("...");
    }
  }
  if (actions.empty()) line.emplace_back("idle");
  return line;
}

std::string aligned(const std::vector<std::vector<std::string>>& lines) {
  std::vector<std::size_t> widths;
  for (const auto& line : lines) {
    if (widths.size() < line.size()) widths.resize(line.size(), 0);
    // The last cell of a line needs no column width.
    for (std::size_t c = 0; c + 1 < line.size(); ++c) {
      widths[c] = std::max(widths[c], line[c].size());
    }
  }
  const std::size_t digits = std::to_string(lines.empty() ? 0 : lines.size() - 1).size();
  std::string text;
  for (std::size_t rank = 0; rank < lines.size(); ++rank) {
    text += fmt::format("rank {:>{}} |", rank, digits);
    for (std::size_t c = 0; c < lines[rank].size(); ++c) {
      // The last cell is not padded: no blanks at the end of a line.
      const std::size_t width = c + 1 < lines[rank].size() ? widths[c] : 0;
      text += fmt::format(" {:<{}}", lines[rank][c], width);
    }
    text += '\n';
  }
  return text;
}

}  // namespace

std::string_view name(ActionKind kind) { return kNames.at(static_cast<std::size_t>(kind)); }

std::string to_string(const Action& action) {
  return fmt::format("{}{}{}", action.stage, name(action.kind), action.micro_batch);
}

Expected<Action> parse_action(std::string_view text) {
  const auto letters = std::find_if_not(text.begin(), text.end(), is_digit);
  const auto tail = std::find_if(letters, text.end(), is_digit);
  const auto part = [&](auto from, auto to) {
    return text.substr(static_cast<std::size_t>(from - text.begin()),
                       static_cast<std::size_t>(to - from));
  };
  const std::string_view kind = part(letters, tail);
  const auto stage = parse_number(part(text.begin(), letters));
  const auto micro_batch = parse_number(part(tail, text.end()));
  if (!stage || !micro_batch || kind.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' is not an action; want stage, kind, micro-batch such as 2F0 or "
                      "1SEND_F0",
                      text);
  }
  const auto known = std::find(kNames.begin(), kNames.end(), kind);
  if (known == kNames.end()) {
    const std::vector<std::string> names(kNames.begin(), kNames.end());
    return make_error(ErrorCode::kBadInput, "action '{}' has the unknown kind '{}'{}", text, kind,
                      suggestion(kind, names));
  }
  return Action{.kind = static_cast<ActionKind>(known - kNames.begin()),
                .stage = StageId{*stage},
                .micro_batch = MicroBatchId{*micro_batch}};
}

std::string to_grid(const Schedule& schedule, const GridOptions& options) {
  std::vector<std::vector<std::string>> lines;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const std::vector<Action>& actions = schedule.ranks[rank];
    std::vector<bool> marks(actions.size(), false);
    for (const Position& position : options.marked) {
      const bool here = position.rank.value == static_cast<std::int32_t>(rank);
      if (here && position.index >= 0 && std::cmp_less(position.index, actions.size())) {
        marks[static_cast<std::size_t>(position.index)] = true;
      }
    }
    lines.push_back(cells(actions, marks, options.context));
  }
  return aligned(lines);
}

}  // namespace dynmo::schedule
