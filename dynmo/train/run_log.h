// SPDX-License-Identifier: Apache-2.0
#pragma once

// A run log writes what one run leaves behind, on one rank: records and traces, and at the rank
// that leads events, load trace and the history of the run. It lives as long as the run, however
// its groups change.

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
#include "dynmo/observe/run_history.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/move_log.h"
#include "dynmo/train/traces.h"
#include "dynmo/transport/place.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

class RunLog {
 public:
  // Whether the history has the layers' times and plan of each step, which a comparison needs.
  enum class Keeps { kNumbers, kCosts };

  // `run.name` for people; the first step is past 0 where the run is a resumed one. `rank` names
  // the records' file; rank 0 leads.
  [[nodiscard]] static Expected<RunLog> open(const config::Config& config,
                                             observe::RunHistory::Run run,
                                             observe::RunFolder folder, WorldRank rank,
                                             std::int64_t first_step,
                                             Keeps keeps = Keeps::kNumbers);

  // This rank leads from now on. It goes on with the events of the leader before, and adds those
  // that this one knows of and the leader before has not written. The history knows of losses, and
  // of all else when settle_history() has read the folder.
  [[nodiscard]] Expected<void> lead();

  // Records the start of the run, for its load trace.
  void start(dynamism::RunStart start) {
    if (load_trace_) load_trace_->start(std::move(start));
  }
  // Takes in a step of the run's part of the group, which began at `begin_ns` (steady clock).
  // Returns lines for people.
  std::vector<std::string> add(const runtime::StepReport& report, const GroupRun& group,
                               std::int64_t begin_ns);
  // Notes an event before step `step` (observe/event_log.h). All ranks call it alike: the leader
  // writes it, and the others keep it until they know that the leader has.
  void event(std::string_view kind, std::int64_t step, const Json& more = nullptr);
  void note_validation(const observe::RunHistory::Validation& outcome);
  [[nodiscard]] const std::optional<observe::RunHistory::Validation>& validation() const {
    return validation_;
  }
  // Notes checkpoints that were written or have failed since the call before, in this group.
  void note_checkpoints(const CheckpointTotals& totals, std::int64_t step);
  void add_traffic(const observe::TrafficInterval& interval) { history_.add_traffic(interval); }
  // The run goes on in another group: what compares steps of one group begins anew, and the trace
  // has that group's steps alone.
  void begin_group();
  // The run goes on from another step than the one after this rank's newest. Records and events go
  // on, and so does the load trace, from that step.
  [[nodiscard]] Expected<void> go_back();
  // At the end of the run, whose logs are closed: the history tells of all its `steps` steps
  // afterwards. Reads the folder where this rank has not led them all. Returns a line for people,
  // or "".
  [[nodiscard]] std::string settle_history(std::int64_t steps);
  // Work of this kind has taken from `begin_ns` until now.
  void add_span(SpanKind kind, std::int64_t begin_ns);
  // Closes the files: what of them could not be written, for people. Records tell of a run and are
  // not the run: it is done without them.
  struct Closed {
    std::string records;
    std::string load_trace;
  };
  [[nodiscard]] Closed close();

  [[nodiscard]] const std::string& name() const { return history_.run().name; }
  [[nodiscard]] const observe::RunFolder& folder() const { return folder_; }
  // Lines that the records lack so far; final after close().
  [[nodiscard]] std::int64_t missing_records() const { return records_->missing(); }
  // Requires that this rank leads.
  [[nodiscard]] const observe::RunHistory& history() const { return history_; }
  [[nodiscard]] const std::deque<StepTrace>& traces() const { return traces_; }

 private:
  struct Noted {
    std::string kind;
    std::int64_t step = 0;
    Json more = {};
  };
  RunLog(const config::Config& config, observe::RunHistory::Run run, observe::RunFolder folder,
         WorldRank rank, Keeps keeps);
  [[nodiscard]] Expected<void> open_records(observe::RecordWriterOptions::Start start);
  void write_events(const runtime::StepReport& report, const runtime::Pipeline& pipeline);
  void write_record(const runtime::StepReport& report, const GroupRun& group);
  void add_to_history(const runtime::StepReport& report, const runtime::Pipeline& pipeline);
  // Returns a line for people, or "".
  [[nodiscard]] std::string write_load(const runtime::StepReport& report,
                                       const runtime::Pipeline& pipeline);
  void fold(std::string_view kind, std::int64_t step, const Json& more);

  struct Settings {
    bool emulated = false;
    WorldRank rank;  // that the records name
    Keeps keeps = Keeps::kNumbers;
    std::int64_t tokens_per_step = 0;
    std::int64_t trace_steps = 0;
    std::int64_t load_trace_every = 0;  // 0: there is none
  };

  Settings settings_;
  observe::RunFolder folder_;
  std::unique_ptr<observe::RecordWriter> records_;
  observe::RunHistory history_;
  bool whole_ = false;        // the history has every step and event
  std::vector<Noted> noted_;  // at a rank that does not lead, since its newest step
  std::optional<observe::RunHistory::Validation> validation_;  // the newest
  bool closed_ = false;
  std::deque<StepTrace> traces_;
  control::SlowRankDetector slow_;
  MoveLog moves_;
  std::unique_ptr<observe::LoadTraceWriter> load_trace_;  // null: none
  std::optional<observe::EventLog> events_;               // the leader's
  struct Recorded {
    int frozen_layers = 0;              // as the newest event of the sources says
    Bytes sent;                         // in step records so far
    double pause_s = 0;                 // of the checkpoints'
    CheckpointTotals checkpoints = {};  // in events so far
  };
  Recorded recorded_;
};

// Called by all ranks of the group, whose logs are closed: a line on the records that all of them
// lack, "" where they lack none. `why` of this rank's.
[[nodiscard]] Expected<std::string> missing_records(transport::Transport& group, const RunLog& log,
                                                    const std::string& why);

[[nodiscard]] std::int64_t now_ns();  // steady clock

}  // namespace dynmo::train
