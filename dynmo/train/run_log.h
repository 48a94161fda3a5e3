// SPDX-License-Identifier: Apache-2.0
#pragma once

// A run log writes the files of one run, on one rank: records and traces. The leader also has
// events, load trace and the history of the run. The log lives as long as the run, through all its
// groups.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/observe/event_log.h"
#include "dynmo/observe/load_trace_writer.h"
#include "dynmo/observe/metrics/metrics_log.h"
#include "dynmo/observe/record_writer.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/run_history.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/move_log.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/train/traces.h"
#include "dynmo/transport/place.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

class RunLog {
 public:
  // Selects whether the history has the layers' times and plan of each step, which a comparison
  // needs.
  enum class Keeps { kNumbers, kCosts };

  // Opens the files. `run.name` is for the user. The first step is above 0 for a resumed run.
  // `rank` names the records' file. Rank 0 is the leader. Fails with kBadInput.
  [[nodiscard]] static Expected<RunLog> open(const config::Config& config,
                                             observe::RunHistory::Run run,
                                             observe::RunFolder folder, WorldRank rank,
                                             std::int64_t first_step,
                                             Keeps keeps = Keeps::kNumbers);

  // Makes this rank the leader. It continues the events of the earlier leader, and adds known
  // events that are missing there. The history has the losses then. It has the rest after
  // settle_history() has read the folder. After an error the events are kept, and the file is tried
  // again at each step.
  [[nodiscard]] Expected<void> lead();

  // Records the start of the run, for its load trace.
  void start(dynamism::RunStart start) {
    if (files_.load_trace) files_.load_trace->start(std::move(start));
  }
  // Adds a step that began at `begin_ns` (steady clock). `group` is this rank's part of the run.
  // Returns lines for the user.
  std::vector<Line> add(const runtime::StepReport& report, const GroupRun& group,
                        std::int64_t begin_ns);
  // Notes an event before step `step` (observe/event_log.h). All ranks call it equally. The leader
  // writes the event. The others keep it until they know that it is written.
  void event(std::string_view kind, std::int64_t step, const Json& more = nullptr);
  void note_validation(const observe::RunHistory::Validation& outcome);
  [[nodiscard]] const std::optional<observe::RunHistory::Validation>& validation() const {
    return validation_;
  }
  // Notes checkpoints that were written or have failed since the last call, in this group.
  void note_checkpoints(const CheckpointTotals& totals, std::int64_t step);
  void add_traffic(const observe::TrafficInterval& interval) { history_.add_traffic(interval); }
  // Begins another group of the run. Comparisons of a group's steps start again, and the trace has
  // only steps of the new group. Files that close() has closed are opened again.
  [[nodiscard]] Expected<void> begin_group();
  // Continues from another step than the next one of this rank. Records, events and the load trace
  // continue from that step.
  [[nodiscard]] Expected<void> go_back();
  // Completes the history with all `steps` steps, at the end of the run after closing the logs.
  // Reads the folder if this rank was not the leader in all steps. Returns a line for the user, or
  // "".
  [[nodiscard]] std::string settle_history(std::int64_t steps);
  // Adds an activity of this kind from `begin_ns` until now.
  void add_span(SpanKind kind, std::int64_t begin_ns);
  // Texts for the user about files that could not be written. The run itself does not depend on
  // them.
  struct Closed {
    std::string records;
    std::string load_trace;
  };
  [[nodiscard]] Closed close();

  // Sends a text of each event to the log of this rank from now on.
  void set_messages(std::function<void(config::LogLevel, std::string_view)> log) {
    messages_ = std::move(log);
  }
  // Sets the products of a step in the dense model, for MFU.
  void set_step_flops(double flops) { settings_.scale.step_flops = flops; }
  [[nodiscard]] const observe::RunScale& scale() const { return settings_.scale; }
  // Returns the resident memory in the newest record.
  [[nodiscard]] Bytes memory() const { return recorded_.memory; }
  [[nodiscard]] const std::string& name() const { return history_.run().name; }
  [[nodiscard]] const observe::RunFolder& folder() const { return folder_; }
  // Returns the number of lines that the records lack so far. It is final after close().
  [[nodiscard]] std::int64_t missing_records() const { return files_.records->missing(); }
  // Returns the history. Requires that this rank is the leader.
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
  [[nodiscard]] Expected<void> take_over_events();
  [[nodiscard]] Expected<void> open_records(observe::RecordWriterOptions::Start start);
  void write_events(const runtime::StepReport& report, const runtime::Pipeline& pipeline);
  void write_record(const runtime::StepReport& report, const GroupRun& group);
  void add_to_history(const runtime::StepReport& report, const runtime::Pipeline& pipeline);
  // Writes the step to the load trace, if the run has one. Returns a line for the user if that
  // fails, else "".
  [[nodiscard]] std::string write_load(const runtime::StepReport& report,
                                       const runtime::Pipeline& pipeline);
  // Writes an event to the file of events, which must be open.
  void write_event(std::string_view kind, std::int64_t step, const Json& more);
  void fold(std::string_view kind, std::int64_t step, const Json& more);

  struct Settings {
    bool emulated = false;
    bool leads = false;  // keeps the history, and writes the events
    WorldRank rank;      // in the records
    Keeps keeps = Keeps::kNumbers;
    std::int64_t tokens_per_step = 0;
    std::int64_t trace_steps = 0;
    std::int64_t load_trace_every = 0;  // 0: there is none
    observe::RunScale scale;            // of the newest step
  };

  Settings settings_;
  observe::RunFolder folder_;
  observe::RunHistory history_;
  // The files that each step is written to.
  struct StepFiles {
    std::unique_ptr<observe::MetricsLog> metrics;  // outlives `records`, which fills it; null: none
    std::unique_ptr<observe::RecordWriter> records;
    std::unique_ptr<observe::LoadTraceWriter> load_trace;  // null: none
    std::optional<observe::EventLog> events;  // the leader's; nullopt: it cannot be written
  };
  StepFiles files_;
  bool whole_ = false;        // the history has every step and event
  std::vector<Noted> noted_;  // without events: since the newest step, on the leader all
  std::optional<observe::RunHistory::Validation> validation_;  // the newest
  bool closed_ = false;
  std::deque<StepTrace> traces_;
  MoveLog moves_;
  // Values that are in the files so far.
  struct Recorded {
    int frozen_layers = 0;              // in the newest event of the sources
    Bytes sent;                         // in step records
    double pause_s = 0;                 // of checkpoints
    CheckpointTotals checkpoints = {};  // in events
    Bytes memory;                       // in the newest step record
  };
  Recorded recorded_;
  std::function<void(config::LogLevel, std::string_view)> messages_;  // empty: none
};

// Returns a line about the records that the logs of all ranks lack, or "". All ranks of the group
// call it after closing their logs. `why` is this rank's reason. Fails with kPeerLost.
[[nodiscard]] Expected<std::string> missing_records(transport::Transport& group, const RunLog& log,
                                                    const std::string& why);

[[nodiscard]] std::int64_t now_ns();  // steady clock

}  // namespace dynmo::train
