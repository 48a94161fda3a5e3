// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <optional>
#include <utility>

#include "dynmo/observe/import/trace_parts_impl.h"

namespace dynmo::observe {
namespace {

constexpr std::string_view kActionPrefix = "PP:";

// Takes a number off the front of a text. Returns none for other text and for large numbers.
std::optional<int> take_number(std::string_view& text) {
  constexpr int kMaxNumber = 1 << 20;
  int number = 0;
  const auto [stop, fault] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (fault != std::errc() || number < 0 || number > kMaxNumber) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(stop - text.data()));
  return number;
}

struct ActionName {
  int stage = 0;
  std::string_view kind;  // F, B, I, W, SEND_F, ...
};

// Reads "PP:2F0", as schedules.py of PyTorch writes it.
std::optional<ActionName> action_name(std::string_view name) {
  if (!name.starts_with(kActionPrefix)) return std::nullopt;
  name.remove_prefix(kActionPrefix.size());
  const auto stage = take_number(name);
  if (!stage) return std::nullopt;
  const std::string_view kind = name.substr(0, name.find_first_of("0123456789"));
  name.remove_prefix(kind.size());
  if (!take_number(name) || !name.empty()) return std::nullopt;
  return ActionName{.stage = *stage, .kind = kind};
}

// Sums of the times of nodes that begin before a time.
class NodeSums {
 public:
  NodeSums(const TraceEvents& events, const TraceClock& clock) {
    for (const std::size_t i : outer_nodes(events)) {
      const TraceEvent& node = events.nodes[i];
      const double seconds = clock.seconds(node);
      starts_us_.push_back(node.start_us);
      all_s_.push_back(all_s_.back() + seconds);
      weight_s_.push_back(weight_s_.back() + weight_share(events.name(node)) * seconds);
    }
  }

  [[nodiscard]] bool empty_in(const TraceEvent& range) const {
    return before(range.start_us) == before(range.end_us());
  }

  // Returns the weights' share of the nodes' time in a range, or one half without nodes.
  [[nodiscard]] double share_in(const TraceEvent& range) const {
    const std::size_t begin = before(range.start_us);
    const std::size_t end = before(range.end_us());
    const double all = all_s_[end] - all_s_[begin];
    if (!(all > 0)) return 0.5;
    return std::clamp((weight_s_[end] - weight_s_[begin]) / all, 0.0, 1.0);
  }

 private:
  [[nodiscard]] std::size_t before(double time_us) const {
    return static_cast<std::size_t>(
        std::lower_bound(starts_us_.begin(), starts_us_.end(), time_us) - starts_us_.begin());
  }

  std::vector<double> starts_us_;
  std::vector<double> all_s_ = {0};
  std::vector<double> weight_s_ = {0};
};

// Ranges of one stage, by pass.
struct StageRanges {
  std::vector<const TraceEvent*> forward, whole, input, weight;
};

PartTimes times_of(const StageRanges& ranges, const TraceClock& clock, const NodeSums& nodes) {
  PartTimes times;
  const auto seconds = [&](const std::vector<const TraceEvent*>& list) {
    std::vector<double> result;
    for (const TraceEvent* range : list) result.push_back(clock.seconds_of_action(*range));
    return result;
  };
  times.forward_s = seconds(ranges.forward);
  // PyTorch runs the whole backward pass of its first stage as W.
  const bool idle_input = std::ranges::all_of(
      ranges.input, [&](const TraceEvent* range) { return nodes.empty_in(*range); });
  if (!ranges.weight.empty() && !idle_input) {
    times.input_s = seconds(ranges.input);
    times.weight_s = seconds(ranges.weight);
    return times;
  }
  for (const auto* list : {&ranges.whole, &ranges.weight}) {
    for (const TraceEvent* range : *list) {
      const double all = clock.seconds_of_action(*range);
      const double share = nodes.share_in(*range);
      times.input_s.push_back((1 - share) * all);
      times.weight_s.push_back(share * all);
    }
  }
  return times;
}

}  // namespace

const StageAction* StageActions::at(double time_us) const {
  const auto after = std::upper_bound(
      list.begin(), list.end(), time_us,
      [](double time, const StageAction& action) { return time < action.range->start_us; });
  if (after == list.begin()) return nullptr;
  const StageAction& last = *std::prev(after);
  return time_us < last.range->end_us() ? &last : nullptr;
}

StageActions find_actions(const TraceEvents& events) {
  constexpr std::string_view kPasses = "FBIW";
  StageActions actions;
  for (const TraceEvent& range : events.ranges) {
    const std::string_view name = events.name(range);
    if (name.starts_with("PP:(")) ++actions.overlapped;
    const auto action = action_name(name);
    if (!action) continue;
    if (action->kind == "SEND_F") actions.senders.insert(action->stage);
    if (action->kind == "RECV_F") actions.receivers.insert(action->stage);
    if (action->kind.size() != 1 || kPasses.find(action->kind) == std::string_view::npos) continue;
    actions.list.push_back({.stage = action->stage, .pass = action->kind[0], .range = &range});
  }
  return actions;
}

std::map<int, PartTimes> stage_times(const TraceEvents& events, const TraceClock& clock,
                                     const StageActions& actions) {
  std::map<int, StageRanges> stages;
  for (const StageAction& action : actions.list) {
    StageRanges& ranges = stages[action.stage];
    auto& list = action.pass == 'F'   ? ranges.forward
                 : action.pass == 'B' ? ranges.whole
                 : action.pass == 'I' ? ranges.input
                                      : ranges.weight;
    list.push_back(action.range);
  }
  const NodeSums nodes(events, clock);
  std::map<int, PartTimes> times;
  for (const auto& [stage, ranges] : stages) times[stage] = times_of(ranges, clock, nodes);
  return times;
}

}  // namespace dynmo::observe
