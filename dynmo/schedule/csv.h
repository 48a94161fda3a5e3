// SPDX-License-Identifier: Apache-2.0
#pragma once

// Schedules in the CSV format of PyTorch's pipelining (2.11, _dump_csv and _load_csv of its
// schedules). They are compute-only ("compute_only") or lowered ("compute_comms"). The text has a
// row for each rank and an action in each cell, spelled as in text.h. An empty cell is a bubble, an
// empty row an idle rank.

#include <cstdint>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

struct CsvSchedule {
  Schedule schedule;  // lowered if the text has a send or a receive
  // Number of cells that were left out, because they have no action of ours. These are UNSHARD,
  // RESHARD and REDUCE_GRAD of fully sharded parameters.
  std::int64_t ignored = 0;
};

// Reads a schedule and derives its pipeline from the actions, because the text says nothing else
// about it. A stage is on the rank whose row has its F. Stages and micro-batches are numbered up to
// the largest number found. The first stages without a backward are frozen. An overlapped pair
// "(1F0;2B1)OVERLAP_F_B" becomes its actions in order.
//
// Time and memory are linear in the text. The order of actions is not checked: call check(), after
// lower() if the schedule is compute-only.
//
// Fails with kBadInput, which names `origin`, row and column (both from 1), or the stage. Faults
// are a cell that is no action, and a stage without F or with F in two rows. Far more stages x
// micro-batches than actions are a fault, too. Other faults are those of validate(PipelineShape).
[[nodiscard]] Expected<CsvSchedule> read_csv(std::string_view text, std::string_view origin);

// Returns the text, whose lines end with "\r\n" as PyTorch writes them. Reading it gives the same
// schedule if it is valid and frozen stages run forward only.
[[nodiscard]] std::string write_csv(const Schedule& schedule);

}  // namespace dynmo::schedule
