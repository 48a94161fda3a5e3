// SPDX-License-Identifier: Apache-2.0
#pragma once

// Proves that a lowered schedule completes and computes what it should, before a step runs it. A
// schedule is valid if and only if it keeps these rules (docs/schedules.md has the same list):
//
// 1. Every action names a stage of its own rank and a micro-batch below M, and occurs once. Trained
//    stages run B, or I and W; frozen ones neither. A send or receive exists only between
//    neighbouring stages on different ranks, for gradients only if both are trained.
// 2. Every (stage, micro-batch) has its F and, if trained, its B or its I and W. Every message has
//    its send and its receive.
// 3. In the list of a rank, F comes before B or I, and I before W. A receive comes before the
//    action that uses it, a send after the action that makes its value. The same order holds
//    between neighbouring stages on one rank, which exchange no message. Weight gradients (B, W) of
//    a stage are in micro-batch order.
// 4. The receives of a channel are in the order of its sends.
// 5. A rendezvous replay reaches the end of all lists. Ranks run their lists in order, and posting
//    never blocks. A message passes once both ends are posted. F, B, I block until their message
//    has passed. Sends are waited for after the list.
//
// An early receive or a late send costs time, not validity.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/schedule/text.h"

namespace dynmo::schedule {

struct ScheduleFacts {
  std::vector<int> in_flight;  // by stage: most micro-batches stashed at once
  std::int64_t actions = 0;
  std::int64_t messages = 0;
};

// Checks all rules and returns figures of the schedule. Time and memory are linear in the number of
// actions.
//
// Fails with kBadInput and one line that names the fault. For a deadlock the line names the ranks
// that wait for each other.
[[nodiscard]] Expected<ScheduleFacts> check(const Schedule& lowered);

// The first violation in the order of the rules.
struct Fault {
  std::string message;           // one line, as in check()
  std::vector<Position> marked;  // actions of the fault; one of each rank of a deadlock's cycle
};
[[nodiscard]] std::optional<Fault> find_fault(const Schedule& lowered);
// Like find_fault(), for rules 1 to 4 only. A caller that replays the schedule sees itself whether
// it ends.
[[nodiscard]] std::optional<Fault> find_fault_in_lists(const Schedule& lowered);

// Returns the message of the fault and the grid with the fault's actions marked, or "" for a valid
// schedule. A long list is shown only around its marks.
[[nodiscard]] std::string explain(const Schedule& lowered);

// Returns for each stage the most micro-batches between the start of F and the end of W (or B). The
// number is 0 for a frozen stage. Requires lists that a valid schedule could have, lowered or not.
[[nodiscard]] std::vector<int> in_flight(const Schedule& schedule);

}  // namespace dynmo::schedule
