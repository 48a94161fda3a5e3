// SPDX-License-Identifier: Apache-2.0
// A schedule as CSV that is taken has a verdict of the checker; what the checker passes is written
// and read back the same.
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/csv.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  const auto read = schedule::read_csv(text, "schedule.csv");
  if (!read) return refused(read.error());
  const schedule::Schedule& made = read->schedule;
  if (!schedule::check(made.lowered ? made : schedule::lower(made))) return Outcome::kTaken;
  const auto again = schedule::read_csv(schedule::write_csv(made), "again");
  DYNMO_CHECK(again.has_value() && again->schedule == made, "a schedule that reads back, got {}",
              schedule::write_csv(made));
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  schedule::PipelineShape shape{.ranks = 2, .micro_batches = 3, .stages = {}};
  for (int rank = 0; rank < 2; ++rank) shape.stages.push_back({.rank = Rank{rank}});
  const auto made = schedule::make_schedule(schedule::ScheduleKind::k1F1B, shape);
  return {schedule::write_csv(*made), schedule::write_csv(schedule::lower(*made)),
          "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2,0REDUCE_GRAD\r\n1F0,,1B0,1F1,1B1,1F2,1B2",
          "0F0,0I0,0W0\n"};
}

}  // namespace dynmo::fuzz
