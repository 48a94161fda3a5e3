// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/picture.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <vector>

#include "dynmo/core/check.h"

namespace dynmo::observe {
namespace {

using schedule::ActionKind;
using schedule::TimedAction;

constexpr int kMinWidth = 40;
constexpr int kColumnsOfLabel = 4;  // an action, where micro-batches are named
constexpr char kIdle = '.';
constexpr char kPadding = '-';
constexpr std::string_view kKinds = "FfIiWwBb";

// The compute actions of one rank.
struct Row {
  std::vector<TimedAction> actions;
  StageId first_stage;
};

std::vector<Row> compute_rows(const schedule::Timeline& timeline) {
  std::vector<Row> rows(timeline.ranks.size());
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (const TimedAction& timed : timeline.ranks[r]) {
      if (!schedule::is_compute(timed.action.kind)) continue;
      if (rows[r].actions.empty() || timed.action.stage < rows[r].first_stage) {
        rows[r].first_stage = timed.action.stage;
      }
      rows[r].actions.push_back(timed);
    }
  }
  return rows;
}

// Returns the action's index in kKinds.
std::size_t letter(const Row& row, const schedule::Action& action) {
  std::size_t kind = 0;
  if (action.kind == ActionKind::kInputGradient) kind = 2;
  if (action.kind == ActionKind::kWeightGradient) kind = 4;
  if (action.kind == ActionKind::kBackward) kind = 6;
  return action.stage == row.first_stage ? kind : kind + 1;
}

// Draws a row whose actions name their micro-batches, as far as their columns suffice.
std::string labelled(const Row& row, double columns_a_ns, int columns) {
  std::string line(static_cast<std::size_t>(columns), kIdle);
  for (const TimedAction& timed : row.actions) {
    const auto begin = static_cast<std::size_t>(
        std::lround(static_cast<double>(timed.start.count()) * columns_a_ns));
    const auto end = static_cast<std::size_t>(
        std::lround(static_cast<double>(timed.end.count()) * columns_a_ns));
    const std::size_t room = end - begin;
    if (room == 0) continue;
    std::string cell(1, kKinds[letter(row, timed.action)]);
    const std::string number = fmt::format("{}", timed.action.micro_batch);
    if (cell.size() + number.size() <= room) cell += number;
    cell.resize(room, kPadding);
    line.replace(begin, room, cell);
  }
  return line;
}

// Draws a row whose columns show the kind that fills most of them. In a tie the first in kKinds
// wins, and idle loses.
std::string filled(const Row& row, double columns_a_ns, int columns) {
  std::vector<std::array<double, kKinds.size()>> shares(static_cast<std::size_t>(columns));
  for (auto& share : shares) share.fill(0);
  for (const TimedAction& timed : row.actions) {
    const double begin = static_cast<double>(timed.start.count()) * columns_a_ns;
    const double end = static_cast<double>(timed.end.count()) * columns_a_ns;
    const std::size_t kind = letter(row, timed.action);
    for (auto c = static_cast<std::size_t>(begin);
         c < shares.size() && static_cast<double>(c) < end; ++c) {
      const double left = std::max(begin, static_cast<double>(c));
      shares[c][kind] += std::min(end, static_cast<double>(c + 1)) - left;
    }
  }
  std::string line;
  for (const auto& share : shares) {
    double idle = 1;
    for (const double part : share) idle -= part;
    const auto most = std::max_element(share.begin(), share.end());
    line += *most >= idle ? kKinds[static_cast<std::size_t>(most - share.begin())] : kIdle;
  }
  return line;
}

std::string legend(const std::string& drawn) {
  const auto has = [&](std::string_view letters) {
    return drawn.find_first_of(letters) != std::string::npos;
  };
  std::string text;
  if (has("Ff")) text += "F forward, ";
  if (has("Ii")) text += "I input gradient, ";
  if (has("Ww")) text += "W weight gradient, ";
  if (has("Bb")) text += "B both, ";
  if (has("fiwb")) text += "lower case: later stages of a rank, ";
  return text + ". idle";
}

void replace_all(std::string& text, char from, std::string_view to) {
  std::string replaced;
  for (const char c : text) {
    if (c == from) {
      replaced += to;
    } else {
      replaced += c;
    }
  }
  text = std::move(replaced);
}

}  // namespace

std::string picture(const schedule::Timeline& timeline, const PictureOptions& options) {
  DYNMO_CHECK(options.width >= kMinWidth && options.rows >= 2,
              "a picture of at least {} x 2, got {} x {}", kMinWidth, options.width, options.rows);
  const std::vector<Row> rows = compute_rows(timeline);
  Nanoseconds end{0};
  std::size_t max_actions = 0;
  for (const Row& row : rows) {
    max_actions = std::max(max_actions, row.actions.size());
    for (const TimedAction& timed : row.actions) end = std::max(end, timed.end);
  }
  if (end.count() <= 0) return "";

  const std::size_t margin = fmt::format("rank {}", rows.size() - 1).size();
  const int columns = options.width - static_cast<int>(margin) - 3;  // " |" and "|"
  const double columns_a_ns = columns / static_cast<double>(end.count());
  const bool labels = max_actions * kColumnsOfLabel <= static_cast<std::size_t>(columns);
  const auto shown = static_cast<std::size_t>(options.rows);
  const std::size_t first_hidden = rows.size() > shown ? (shown + 1) / 2 : rows.size();
  const std::size_t hidden = rows.size() > shown ? rows.size() - shown : 0;

  std::string text;
  std::string drawn;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (r == first_hidden && hidden > 0) {
      text += fmt::format("{:>{}} ({} more ranks)\n", "...", margin, hidden);
      r += hidden;
    }
    std::string line =
        labels ? labelled(rows[r], columns_a_ns, columns) : filled(rows[r], columns_a_ns, columns);
    drawn += line;
    if (!options.ascii) {
      replace_all(line, kIdle, "·");
      replace_all(line, kPadding, "─");
    }
    const std::string_view bar = options.ascii ? "|" : "│";
    text += fmt::format("{:<{}} {}{}{}\n", fmt::format("rank {}", r), margin, bar, line, bar);
  }
  const auto axis = static_cast<std::size_t>(columns);
  text += fmt::format("{:<{}}  0{:>{}}\n", "", margin, format_seconds(to_seconds(end)), axis - 1);
  std::string key = legend(drawn);
  if (!options.ascii) replace_all(key, kIdle, "·");
  return text + fmt::format("{:<{}}  {}\n", "", margin, key);
}

}  // namespace dynmo::observe
