// SPDX-License-Identifier: Apache-2.0
#pragma once

// Schedules in the CSV of PyTorch's pipelining (2.11: _dump_csv and _load_csv of its schedules),
// compute-only ("compute_only") or lowered ("compute_comms"). One row a rank, one action a cell in
// the spelling of text.h; an empty cell is a bubble, an empty row an idle rank.

#include <cstdint>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

struct CsvSchedule {
  Schedule schedule;  // lowered if the text has a send or a receive
  // Cells that stand for no action of ours and were left out: UNSHARD, RESHARD, REDUCE_GRAD of
  // fully sharded parameters.
  std::int64_t ignored = 0;
};

// The text says nothing of the pipeline but its actions. So a stage is on the rank whose row has
// its F; stages and micro-batches are numbered up to the largest number found; the first stages
// without a backward are frozen. An overlapped pair "(1F0;2B1)OVERLAP_F_B" is its actions in order.
//
// kBadInput with `origin`, row and column (both from 1), or with the stage: a cell that is no
// action, a stage without F or with F in two rows, far more stages x micro-batches than actions,
// what validate(PipelineShape) refuses. Whether the order is valid is for check() to say, after
// lower() if it is compute-only. Time and memory are linear in the text.
[[nodiscard]] Expected<CsvSchedule> read_csv(std::string_view text, std::string_view origin);

// Lines end as PyTorch writes them, "\r\n". Read back it is the same schedule, if it is valid and
// frozen stages run forward only.
[[nodiscard]] std::string write_csv(const Schedule& schedule);

}  // namespace dynmo::schedule
