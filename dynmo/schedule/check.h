// SPDX-License-Identifier: Apache-2.0
#pragma once

// Proves that a lowered schedule completes and computes what it should, before a step runs it. A
// schedule is valid if and only if (docs/schedules.md has the same list):
//
// 1. Every action names a stage of its own rank and a micro-batch below M, and occurs once. Trained
//    stages run B, or I and W; frozen ones neither. A send or receive exists only between
//    neighbouring stages on different ranks, for gradients only if both are trained.
// 2. Every (stage, micro-batch) has its F and, if trained, its B or its I and W; every message has
//    its send and its receive.
// 3. In the list of a rank, F stands before B or I, I before W, a receive before the action that
//    uses it, a send after the action that makes its value, and the same holds between neighbouring
//    stages on one rank, which exchange no message. Weight gradients (B, W) of a stage are in
//    micro-batch order.
// 4. The receives of a channel are in the order of its sends.
// 5. A rendezvous replay reaches the end of all lists: ranks run their lists in order; posting
//    never blocks; a message passes once both ends are posted; F, B, I block until theirs has
//    passed; sends are waited for after the list.
//
// How early a receive and how late a send is posted costs time, not validity.

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

// kBadInput with one line that names what is wrong and, for a deadlock, the ranks that wait for
// each other. Time and memory are linear in the number of actions.
[[nodiscard]] Expected<ScheduleFacts> check(const Schedule& lowered);

// The first violation in the order of the list above; none if valid.
struct Fault {
  std::string message;           // one line, that of check()
  std::vector<Position> marked;  // the actions it is about: for a deadlock, each rank of the cycle
};
[[nodiscard]] std::optional<Fault> find_fault(const Schedule& lowered);
// The same of rules 1 to 4, for who replays the schedule anyhow and sees whether it ends.
[[nodiscard]] std::optional<Fault> find_fault_in_lists(const Schedule& lowered);

// The message of the fault, then the grid with the fault's actions marked (a long list only around
// its marks). "" for a valid schedule.
[[nodiscard]] std::string explain(const Schedule& lowered);

// For each stage, the most micro-batches between the start of F and the end of W (or B); 0 if
// frozen. Requires lists that a valid schedule could have, lowered or not.
[[nodiscard]] std::vector<int> in_flight(const Schedule& schedule);

}  // namespace dynmo::schedule
