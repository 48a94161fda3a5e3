// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/check.h"

#include <algorithm>
#include <array>
#include <utility>

#include "dynmo/schedule/action_index_impl.h"
#include "dynmo/schedule/lowering.h"

namespace dynmo::schedule {
namespace {

using MaybeFault = std::optional<Fault>;
using enum ActionKind;

constexpr int kAbsent = ActionIndex::kAbsent;
constexpr std::size_t kLongList = 40;  // longest list that is shown as a whole
constexpr int kAround = 6;             // actions shown around a mark in longer ones

int position_of(const int* row, ActionKind kind) { return row[static_cast<std::size_t>(kind)]; }

Action make_action(ActionKind kind, std::size_t stage, std::size_t micro_batch) {
  return {.kind = kind,
          .stage = StageId(static_cast<std::int32_t>(stage)),
          .micro_batch = MicroBatchId(static_cast<std::int32_t>(micro_batch))};
}

MaybeFault check_form(const Schedule& schedule) {
  if (const Expected<void> valid = validate(schedule.shape); !valid) {
    return Fault{valid.error().message, {}};
  }
  if (!schedule.lowered) {
    return Fault{"a compute-only schedule; want one with sends and receives, lower it first", {}};
  }
  if (std::cmp_not_equal(schedule.ranks.size(), schedule.shape.ranks)) {
    return Fault{fmt::format("{} lists of actions for {} ranks; want one a rank",
                             schedule.ranks.size(), schedule.shape.ranks),
                 {}};
  }
  return std::nullopt;
}

// Checks rule 1 for one action, and stores its position.
MaybeFault place(ActionIndex& index, Position here, const Action& action) {
  const auto fault = [&](std::string_view problem) {
    return Fault{fmt::format("{} on rank {} {}", to_string(action), here.rank, problem), {here}};
  };
  const bool known = action.stage.value >= 0 && action.stage.index() < index.stages();
  if (!known) return fault(fmt::format("names no stage; want one below {}", index.stages()));
  if (index.rank_of(action) != here.rank) {
    return fault(fmt::format("is in the wrong list: stage {} is on rank {}", action.stage,
                             index.rank_of(action)));
  }
  if (action.micro_batch.value < 0 || action.micro_batch.index() >= index.micro_batches()) {
    return fault(fmt::format("names no micro-batch; want one below {}", index.micro_batches()));
  }
  if (!index.may(action.stage.index(), action.kind)) {
    return fault(is_compute(action.kind)
                     ? "has no place: the stage is frozen and runs forward only"
                     : "has no peer: the neighbour is missing, on the same rank, or frozen");
  }
  int& slot = index.at(action);
  if (slot != kAbsent) {
    return Fault{fmt::format("{} stands twice on rank {}, at {} and {}; want it once",
                             to_string(action), here.rank, slot, here.index),
                 {{here.rank, slot}, here}};
  }
  slot = here.index;
  return std::nullopt;
}

MaybeFault check_actions(ActionIndex& index) {
  for (std::size_t r = 0; r < index.schedule().ranks.size(); ++r) {
    const std::vector<Action>& list = index.schedule().ranks[r];
    for (std::size_t i = 0; i < list.size(); ++i) {
      const Position here{Rank(static_cast<std::int32_t>(r)), static_cast<int>(i)};
      if (MaybeFault fault = place(index, here, list[i])) return fault;
    }
  }
  return std::nullopt;
}

// Checks rule 2.
MaybeFault check_complete(const ActionIndex& index) {
  constexpr std::array kOnce = {kForward, kSendActivation, kReceiveActivation, kSendGradient,
                                kReceiveGradient};
  for (std::size_t s = 0; s < index.stages(); ++s) {
    for (std::size_t m = 0; m < index.micro_batches(); ++m) {
      const int* row = index.row(s, m);
      for (const ActionKind kind : kOnce) {
        if (!index.may(s, kind) || position_of(row, kind) != kAbsent) continue;
        const Action missing = make_action(kind, s, m);
        Fault fault{fmt::format("rank {} has no {}; want it exactly once", index.rank_of(missing),
                                to_string(missing)),
                    {}};
        // If a message has lost one end, the other end shows the place.
        if (!is_compute(kind) && index.position(peer(missing)).index != kAbsent) {
          fault.marked.push_back(index.position(peer(missing)));
        }
        return fault;
      }
      if (!index.may(s, kBackward)) continue;
      const bool whole = position_of(row, kBackward) != kAbsent;
      const bool inputs = position_of(row, kInputGradient) != kAbsent;
      const bool weights = position_of(row, kWeightGradient) != kAbsent;
      if (whole ? inputs || weights : !inputs || !weights) {
        return Fault{fmt::format("stage {} runs {}{}{}{} for micro-batch {}; want either B, or I "
                                 "and W",
                                 s, whole ? "B" : "", inputs ? "I" : "", weights ? "W" : "",
                                 whole || inputs || weights ? "" : "no backward", m),
                     {}};
      }
    }
  }
  return std::nullopt;
}

// Checks that two actions of one rank are in this order, if both exist.
MaybeFault ordered(const ActionIndex& index, const Action& first, const Action& second,
                   std::string_view reason) {
  const Position a = index.position(first);
  const Position b = index.position(second);
  if (a.index == kAbsent || b.index == kAbsent || a.index < b.index) return std::nullopt;
  return Fault{fmt::format("{} stands before {} on rank {}; {}", to_string(second),
                           to_string(first), a.rank, reason),
               {b, a}};
}

struct OrderRule {
  ActionKind first;
  ActionKind second;
  std::string_view reason;
};

constexpr std::string_view kReceiveFirst = "post a receive before the action that uses it";
constexpr std::string_view kValueFirst = "send a value after the action that makes it";
constexpr std::string_view kForwardFirst = "run backward after forward";
constexpr std::array kOrderRules = {
    OrderRule{kReceiveActivation, kForward, kReceiveFirst},
    OrderRule{kForward, kSendActivation, kValueFirst},
    OrderRule{kForward, kBackward, kForwardFirst},
    OrderRule{kForward, kInputGradient, kForwardFirst},
    OrderRule{kInputGradient, kWeightGradient, "run W after I"},
    OrderRule{kReceiveGradient, kBackward, kReceiveFirst},
    OrderRule{kReceiveGradient, kInputGradient, kReceiveFirst},
    OrderRule{kBackward, kSendGradient, kValueFirst},
    OrderRule{kInputGradient, kSendGradient, kValueFirst},
};

// Returns B or I: the action that computes the gradient of a stage's input.
Action gradient_of(const ActionIndex& index, std::size_t stage, std::size_t micro_batch) {
  const bool whole = position_of(index.row(stage, micro_batch), kBackward) != kAbsent;
  return make_action(whole ? kBackward : kInputGradient, stage, micro_batch);
}

// Returns B or W: the action that adds to a stage's weight gradients.
Action weights_of(const ActionIndex& index, std::size_t stage, std::size_t micro_batch) {
  const bool whole = position_of(index.row(stage, micro_batch), kBackward) != kAbsent;
  return make_action(whole ? kBackward : kWeightGradient, stage, micro_batch);
}

// Checks rule 3 for one (stage, micro-batch).
MaybeFault check_order(const ActionIndex& index, std::size_t s, std::size_t m) {
  const int* row = index.row(s, m);
  for (const OrderRule& rule : kOrderRules) {
    // Compares positions first, because most pairs are in order, and making the actions takes time.
    const int first = position_of(row, rule.first);
    const int second = position_of(row, rule.second);
    if (first < second || second == kAbsent) continue;
    return ordered(index, make_action(rule.first, s, m), make_action(rule.second, s, m),
                   rule.reason);
  }
  const std::vector<StageShape>& stages = index.schedule().shape.stages;
  const bool trained = !stages[s].frozen;
  if (s + 1 < index.stages() && stages[s].rank == stages[s + 1].rank) {
    if (MaybeFault fault =
            ordered(index, make_action(kForward, s, m), make_action(kForward, s + 1, m),
                    "a stage runs forward after the one before it")) {
      return fault;
    }
    if (!trained) return std::nullopt;
    if (MaybeFault fault = ordered(index, gradient_of(index, s + 1, m), gradient_of(index, s, m),
                                   "a stage runs backward after the one behind it")) {
      return fault;
    }
  }
  if (!trained || m == 0) return std::nullopt;
  return ordered(index, weights_of(index, s, m - 1), weights_of(index, s, m),
                 "weight gradients are summed in micro-batch order");
}

MaybeFault check_orders(const ActionIndex& index) {
  for (std::size_t s = 0; s < index.stages(); ++s) {
    for (std::size_t m = 0; m < index.micro_batches(); ++m) {
      if (MaybeFault fault = check_order(index, s, m)) return fault;
    }
  }
  return std::nullopt;
}

// Checks rule 4. Every channel has M messages here. So the sends fill a row of micro-batches for
// each channel, and the receives are compared with it.
MaybeFault check_channels(const ActionIndex& index) {
  const auto channels = static_cast<std::size_t>(channel_count(index.schedule().shape));
  std::vector<std::int32_t> sent(channels * index.micro_batches());
  std::vector<std::size_t> count(channels, 0);
  const auto next = [&](const Action& action) -> std::int32_t& {
    const auto c = static_cast<std::size_t>(channel(action));
    return sent[c * index.micro_batches() + count[c]++];
  };
  for (const std::vector<Action>& list : index.schedule().ranks) {
    for (const Action& action : list) {
      if (is_send(action.kind)) next(action) = action.micro_batch.value;
    }
  }
  std::fill(count.begin(), count.end(), 0);
  for (const std::vector<Action>& list : index.schedule().ranks) {
    for (const Action& action : list) {
      if (is_compute(action.kind) || is_send(action.kind)) continue;
      const std::int32_t micro_batch = next(action);
      if (micro_batch == action.micro_batch.value) continue;
      Action send = peer(action);
      send.micro_batch = MicroBatchId{micro_batch};
      return Fault{fmt::format("rank {} posts {} where rank {} posts {}: the ends of a channel "
                               "disagree; want one order at both",
                               index.rank_of(action), to_string(action), index.rank_of(send),
                               to_string(send)),
                   {index.position(action), index.position(send)}};
    }
  }
  return std::nullopt;
}

MaybeFault check_lists(ActionIndex& index) {
  if (MaybeFault fault = check_actions(index)) return fault;
  if (MaybeFault fault = check_complete(index)) return fault;
  if (MaybeFault fault = check_orders(index)) return fault;
  return check_channels(index);
}

}  // namespace

ActionIndex::ActionIndex(const Schedule& of)
    : schedule_(of),
      micro_batches_(static_cast<std::size_t>(of.shape.micro_batches)),
      kinds_(of.shape.stages.size(), bit(kForward)),
      at_(kinds_.size() * micro_batches_ * kKinds, kAbsent) {
  for (std::size_t s = 0; s < kinds_.size(); ++s) {
    if (!of.shape.stages[s].frozen) {
      kinds_[s] |= bit(kBackward) | bit(kInputGradient) | bit(kWeightGradient);
    }
    for (const ActionKind kind :
         {kSendActivation, kReceiveActivation, kSendGradient, kReceiveGradient}) {
      const StageId stage(static_cast<std::int32_t>(s));
      if (exchanges(of.shape, kind, stage)) kinds_[s] |= bit(kind);
    }
  }
}

MaybeFault find_fault(const Schedule& lowered) {
  if (MaybeFault fault = check_form(lowered)) return fault;
  ActionIndex index(lowered);
  if (MaybeFault fault = check_lists(index)) return fault;
  return find_deadlock(index);
}

MaybeFault find_fault_in_lists(const Schedule& lowered) {
  if (MaybeFault fault = check_form(lowered)) return fault;
  ActionIndex index(lowered);
  return check_lists(index);
}

Expected<ScheduleFacts> check(const Schedule& lowered) {
  if (MaybeFault fault = find_fault(lowered)) {
    return Error{ErrorCode::kBadInput, std::move(fault->message)};
  }
  ScheduleFacts facts{.in_flight = in_flight(lowered)};
  for (const std::vector<Action>& list : lowered.ranks) {
    facts.actions += static_cast<std::int64_t>(list.size());
    facts.messages +=
        std::count_if(list.begin(), list.end(), [](const Action& a) { return is_send(a.kind); });
  }
  return facts;
}

std::string explain(const Schedule& lowered) {
  const MaybeFault fault = find_fault(lowered);
  if (!fault) return "";
  const bool cut = std::any_of(lowered.ranks.begin(), lowered.ranks.end(),
                               [](const auto& list) { return list.size() > kLongList; });
  return fault->message + "\n" +
         to_grid(lowered, {.marked = fault->marked, .context = cut ? kAround : -1});
}

std::vector<int> in_flight(const Schedule& schedule) {
  const std::vector<StageShape>& stages = schedule.shape.stages;
  std::vector<int> now(stages.size(), 0);
  std::vector<int> peak(stages.size(), 0);
  for (const std::vector<Action>& list : schedule.ranks) {
    for (const Action& action : list) {
      const std::size_t s = action.stage.index();
      if (action.kind == kForward && !stages[s].frozen) peak[s] = std::max(peak[s], ++now[s]);
      if (action.kind == kBackward || action.kind == kWeightGradient) --now[s];
    }
  }
  return peak;
}

}  // namespace dynmo::schedule
