// SPDX-License-Identifier: Apache-2.0
#pragma once

// A run log writes what one run leaves behind, on one rank: records, series, traces, load trace. It
// lives as long as the run, however its groups change.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/control/slow_rank.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/observe/event_log.h"
#include "dynmo/observe/load_trace_writer.h"
#include "dynmo/observe/record_writer.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/kept_series.h"
#include "dynmo/train/move_log.h"
#include "dynmo/train/setup/run_series.h"
#include "dynmo/train/traces.h"
#include "dynmo/transport/place.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

class RunLog {
 public:
  // `name` for people; the first step is past 0 where the run is a resumed one. `rank` names the
  // records' file; rank 0 writes the load trace.
  [[nodiscard]] static Expected<RunLog> open(const config::Config& config, std::string name,
                                             observe::RunFolder folder, WorldRank rank,
                                             std::int64_t first_step, Kept kept = Kept::kNumbers);

  // Rank 0 has left the run, and this rank goes on with what it wrote: the events. (The load trace
  // ends with rank 0.)
  [[nodiscard]] Expected<void> lead();

  // Records the start of the run, for its load trace.
  void start(dynamism::RunStart start) {
    if (load_trace_) load_trace_->start(std::move(start));
  }
  // Takes in a step of the run's part of the group, which began at `begin_ns` (steady clock).
  // Returns lines for people.
  std::vector<std::string> add(const runtime::StepReport& report, const GroupRun& group,
                               std::int64_t begin_ns);
  // On rank 0, before step `step`; see observe/event_log.h.
  void event(std::string_view kind, std::int64_t step, const Json& more = nullptr) {
    if (events_) events_->add(kind, step, more);
  }
  // The run goes on in another group: what compares steps of one group begins anew, and the trace
  // has that group's steps alone.
  void begin_group();
  // From now on roll_back() may come back to what is known before step `step`, at which there is a
  // checkpoint, or a snapshot: of these the newest two are kept.
  void keep(std::int64_t step) { kept_.add_checkpoint(step, series_); }
  void keep_snapshot(std::int64_t step) { kept_.add_snapshot(step, series_); }
  // Whether the series tells of all that the run has done: not at a rank that came later, and not
  // where roll_back() came to what this rank does not know.
  [[nodiscard]] bool knows_all() const { return kept_.knows_all; }
  void set_knows_all(bool knows_all) { kept_.knows_all = knows_all; }
  // The run goes on from step `step`, which it has been at before: what was kept then, but for what
  // tells of groups and losses. Records and events go on; the load trace ends.
  [[nodiscard]] Expected<void> roll_back(std::int64_t step);
  // Work of this kind has taken from `begin_ns` until now.
  void add_span(SpanKind kind, std::int64_t begin_ns);
  void add_checkpoints(const CheckpointTotals& totals);
  // Closes the files: what of them could not be written, for people. Records tell of a run and are
  // not the run: it is done without them.
  struct Closed {
    std::string records;
    std::string load_trace;
  };
  [[nodiscard]] Closed close();

  [[nodiscard]] const std::string& name() const { return series_.name; }
  [[nodiscard]] const observe::RunFolder& folder() const { return folder_; }
  // Lines that the records lack so far; final after close().
  [[nodiscard]] std::int64_t missing_records() const { return records_->missing(); }
  [[nodiscard]] const RunSeries& series() const { return series_; }
  [[nodiscard]] RunSeries& series() { return series_; }
  [[nodiscard]] const std::deque<StepTrace>& traces() const { return traces_; }

 private:
  RunLog(const config::Config& config, std::string name, observe::RunFolder folder, Kept kept);
  [[nodiscard]] Expected<void> open_records(observe::RecordWriterOptions::Start start);
  void write_events(const runtime::StepReport& report, const runtime::Pipeline& pipeline);
  void write_record(const runtime::StepReport& report, const GroupRun& group);

  bool emulated_;
  WorldRank rank_;  // that the records name
  std::int64_t trace_steps_;
  observe::RunFolder folder_;
  std::unique_ptr<observe::RecordWriter> records_;
  RunSeries series_;  // on every rank alike, but for the times of its own clock
  KeptSeries kept_;
  bool closed_ = false;
  std::deque<StepTrace> traces_;
  control::SlowRankDetector slow_;
  MoveLog moves_;
  std::unique_ptr<observe::LoadTraceWriter> load_trace_;  // null: none, or not rank 0
  std::optional<observe::EventLog> events_;               // rank 0's alone
  struct Recorded {
    int frozen_layers = 0;  // as the newest event of the sources says
    Bytes sent;             // in step records so far
    double pause_s = 0;     // of the checkpoints'
  };
  Recorded recorded_;
};

// Called by all ranks of the group, whose logs are closed: a line on the records that all of them
// lack, "" where they lack none. `why` of this rank's.
[[nodiscard]] Expected<std::string> missing_records(transport::Transport& group, const RunLog& log,
                                                    const std::string& why);

[[nodiscard]] std::int64_t now_ns();  // steady clock

}  // namespace dynmo::train
