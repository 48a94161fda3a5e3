// SPDX-License-Identifier: Apache-2.0
#pragma once

// A training run on one rank. Its states are functions, in run.cpp, run_steps.cpp and
// surviving.cpp:
//
//   begin() or join() --> advance_all() --> finish()
//                           |       ^
//                    change_group() or survive()
//
// Between two groups a rank's state is in `passage_`, and its lane has no group. A loss may come in
// any state, also in survive(). It ends the run if the ranks do not know each other yet, or while
// they take the next group of a change.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/seconds_since.h"
#include "dynmo/elastic/recovery.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/process/kernel_ids.h"
#include "dynmo/train/elasticity.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/losses.h"
#include "dynmo/train/run_log.h"
#include "dynmo/train/setup/earlier_run.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/train/setup/resolved_run.h"
#include "dynmo/train/setup/start.h"
#include "dynmo/train/snapshots.h"
#include "dynmo/train/traces.h"
#include "dynmo/train/traffic_intervals.h"
#include "dynmo/transport/clocks.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {

inline Expected<void> wait_for_all(transport::Transport& transport) {
  const std::byte nothing{};
  DYNMO_TRY(transport::all_gather(transport, transport::control_tag(transport::Control::kBarrier),
                                  std::span(&nothing, 1)));
  return {};
}

class Run {
 public:
  // Prepares a run. `groups` is null if no process can be asked to leave.
  Run(transport::Transport& group, elastic::Groups* groups, ResolvedRun run,
      const Reporter& reporter)
      : run_(std::move(run)),
        reporter_(reporter),
        groups_(groups),
        folder_(config().run.directory),
        losses_(config().elastic) {
    enter(group);
    group_.leads = group.rank() == transport::Member(0);
    if (groups != nullptr && config().elastic.enabled) {
      elasticity_.emplace(*groups, run_, passage_);
    }
  }

  Expected<void> run();

  // Enters a run as a joining process, in the group in which it has a place. Steps that only this
  // process can fail come before the others depend on it.
  Expected<void> join(const std::function<void()>& taken);

 private:
  // One of the runs that advance in turn, with its part of the group.
  struct Lane {
    std::string name;
    std::unique_ptr<const ResolvedRun> other = {};  // null: the model is the run's own
    RunLane settings;
    std::optional<RunLog> log;
    std::unique_ptr<GroupRun> group;
    std::optional<TrafficIntervals> traffic;
  };

  // The current group.
  struct Group {
    transport::Transport* all = nullptr;
    std::optional<transport::Grid> grid = {};  // none: between two groups
    bool leads = false;                        // this is its rank 0, which prints for the run
    bool alone = false;                        // no group: it did not meet the others again
    std::vector<transport::ClockReading> clocks = {};  // by rank, at the beginning
  };
  // The locks of the run's folder. Those of an earlier leader are free after its process has ended.
  struct Locks {
    bool wanted = false;
    RunLocks held = {};

    void take(const TrainOptions& options) {
      if (!wanted) return;
      auto locks = lock_run(options);
      if (!locks) return;
      held = *std::move(locks);
      wanted = false;
    }
  };
  struct Done {
    std::int64_t first = 0;     // first step of this group, or after a loss the first repeated one
    std::int64_t steps = 0;     // of the run
    Generation generation = 0;  // of the newest plan
    int members = 0;            // the numbers of all ranks so far are below it
  };
  struct Recovery {
    Error why;
    std::string_view from = {};  // for the user
    bool whole = false;          // all steps are done
    std::int64_t reached = 0;    // most steps done before the loss, by any survivor
    Json ms = {};                // by phase
    std::optional<control::Decision> decision = {};  // none: the run has begun again
    std::chrono::steady_clock::time_point phase = std::chrono::steady_clock::now();

    void end_phase(const char* name) {
      ms[name] = 1e3 * seconds_since(phase);
      phase = std::chrono::steady_clock::now();
    }
  };

  const TrainOptions& options() const { return run_.options(); }
  const config::Config& config() const { return run_.config(); }
  transport::Transport& world() const { return *group_.all; }
  const transport::Grid& grid() const { return *group_.grid; }
  void enter(transport::Transport& group) {
    group_.all = &group;
    group_.grid.emplace(group, static_cast<int>(config().pipeline.replicas));
  }
  // Compares the clocks of all ranks, for the trace of the group.
  Expected<std::vector<transport::ClockReading>> read_clocks() const {
    return transport::read_clocks(world(), {.id = process::steady_clock_id(), .now_ns = now_ns});
  }
  bool first_rank() const { return group_.leads; }
  // Prints the text if this rank is the first. All ranks log it.
  void say(std::string_view text, config::LogLevel level = config::LogLevel::kInfo) const {
    if (first_rank()) reporter_.line(text);
    reporter_.log(level, text);
  }
  void say(const std::vector<Line>& lines) const {
    for (const Line& line : lines) say(line.text, line.level);
  }
  [[nodiscard]] bool logs(config::LogLevel level) const {
    return !config().run.log.empty() && level >= config().run.log_level;
  }
  // Prints the message if this rank is the first. The others end with the same error.
  Error say_stopped(Error why) const {
    if (why.code == ErrorCode::kInterrupted) say(why.message);
    return why;
  }
  std::vector<std::string> names() const {
    return options().compare.empty() ? std::vector<std::string>{""} : options().compare;
  }
  std::vector<const observe::RunHistory*> histories() const {
    std::vector<const observe::RunHistory*> all;
    for (const Lane& lane : lanes_) all.push_back(&lane.log->history());
    return all;
  }
  const ResolvedRun& run_of(const Lane& lane) const { return lane.other ? *lane.other : run_; }
  const runtime::RankState& state_of(const Lane& lane) const {
    return lane.group == nullptr ? passage_.state : lane.group->pipeline().state();
  }

  // Begins the run. The functions from here on are in run.cpp.
  Expected<void> begin();
  RunLane settings_of(const std::string& name, int number) const;
  Lane& add_lane(const std::string& name, std::unique_ptr<const ResolvedRun> other);
  // Opens the lane's part of the group, and its log if it has none.
  Expected<void> open_lane(Lane& lane, const Start& begin);
  Expected<void> start_log(Lane& lane, const Start& begin);
  Expected<RunLog> open_log(const std::string& name, RunLog::Keeps keeps) const;
  Expected<std::unique_ptr<GroupRun>> open_group(const Lane& lane, const Start& begin);
  Expected<void> write_config() const;
  // Writes the ranks of the current group, for `dynmo plan --cluster`. The run continues if that
  // fails.
  void write_cluster() const;
  void say_start() const;
  Expected<void> finish();
  Expected<void> finish(Lane& lane, std::span<const transport::ClockFit> clocks);
  Expected<void> report();

  // Runs all steps, with the work between them. The functions from here on are in run_steps.cpp.
  Expected<void> advance_all();
  // Runs one step of one run, with its logs. Returns whether a rank has a message for all before
  // the next step. The barrier ensures that each run is charged its own time only.
  Expected<bool> advance(Lane& lane);
  // Does the work that is due before the next step.
  Expected<void> after_step(Lane& lane, bool has_checkpoint = false);
  Expected<void> validate(Lane& lane);
  Expected<void> checkpoint(Lane& lane, bool due);
  Expected<void> finish_checkpoint(Lane& lane);
  Expected<void> take_snapshot(Lane& lane, std::int64_t step);
  // Handles a signal to a rank of a group that cannot change. The runs of a comparison are not
  // continued.
  Expected<void> stop(std::int64_t step);
  // Handles the requests of clients and signals between two steps. Returns false if this rank has
  // left the run.
  Expected<bool> change_size(Lane& lane, bool asked);
  // Returns whether a change must wait for the disk. It does not wait for several checkpoints in
  // sequence.
  Expected<bool> waits_for_checkpoint(Lane& lane, const elastic::SizeChange& change);
  // Changes to the next group. Returns false if this rank has left the run.
  Expected<bool> change_group(Lane& lane, const elastic::SizeChange& change);
  // Writes the messages of one plan after it has ended. Ranks get the numbers that users see.
  Expected<void> note_traffic(Lane& lane, TrafficIntervals::Ended ended) const;
  // Gives the lane its part of the group that has begun. The log continues at the part's step.
  Expected<void> enter_group(Lane& lane, std::unique_ptr<GroupRun> part);
  // Logs the group that has begun: its ranks, their hosts and its plan.
  void note_group(const Lane& lane) const;
  // Prints and logs the events between two steps.
  void note_events(Lane& lane, std::int64_t step);
  void report_progress(std::int64_t step) const;
  // Does `work`, and adds its time to the trace.
  template <typename Work>
  Expected<void> traced(Lane& lane, SpanKind kind, Work work) {
    const std::int64_t begin_ns = now_ns();
    DYNMO_TRY(work());
    lane.log->add_span(kind, begin_ns);
    return {};
  }

  // Returns whether the run may survive the error. A common decision of all ranks ends the run. So
  // does an error of this rank alone, and a loss before the ranks know each other. The functions
  // from here on are in surviving.cpp.
  bool may_survive(const Error& why) const;
  // Continues after each loss that the run survives.
  Expected<void> through_losses(Expected<void> done);
  // Handles a loss. Returns false if this rank has left the run, or all is done.
  Expected<bool> survive(const Error& why);
  // Returns whether all steps are done and the first rank has written its last file, the summary. A
  // rank lost after that is not missed. If the file is absent, the first rank may still be writing
  // it, until its process ends.
  bool is_whole() const;
  Expected<elastic::Survival> meet_survivors(const elastic::View& before, const Error& why);
  // Continues from the newest step for which the ranks have all layers. These may be live, in
  // snapshots or in a checkpoint. Otherwise continues from the beginning.
  Expected<void> recover(Lane& lane, Recovery& recovery);
  // Decides from the reports of all ranks. A listed checkpoint may be damaged, or have been on a
  // lost host. So sets `restored` before memory is given up for it. Otherwise decides without it.
  Expected<elastic::Decision> decide(std::vector<elastic::Report> reports,
                                     std::optional<Restored>& restored) const;
  // Begins again from `restored` or the newest checkpoint, or from the beginning.
  Expected<void> recover_from_files(Lane& lane, Recovery& recovery, Generation generation,
                                    std::optional<Restored> restored);
  // Regroups the layers of `step` under a plan for the ranks that are left.
  Expected<void> recover_from_memory(Lane& lane, Recovery& recovery, std::int64_t step,
                                     Generation generation);
  Expected<control::AfterLoss> plan_after_loss(std::int64_t step, const cost::Cluster& cluster);
  Expected<void> finish_step(Lane& lane, const elastic::UpdateRecord& record);
  // Ensures a checkpoint of the current step. Returns the step, or none if that failed.
  Expected<std::optional<std::int64_t>> keep_in_checkpoint(Lane& lane);
  // Returns whether the first rank sees a checkpoint of the step, or any.
  Expected<bool> has_checkpoint(std::optional<std::int64_t> step = {}) const;
  Expected<void> after_step_again(Lane& lane);
  // Begins from the checkpoint, or from the beginning if there is none.
  Expected<void> begin_again(Lane& lane, Generation generation, std::optional<Restored> restored);
  void note_loss(Lane& lane, const Passage::Lost& since, const Recovery& recovery);
  // Makes this rank print and log for the run.
  void lead();

  ResolvedRun run_;
  const Reporter& reporter_;
  elastic::Groups* groups_;
  const observe::RunFolder folder_;
  Group group_;
  Locks locks_;
  Done done_;
  Losses losses_;
  Snapshots snapshots_{config()};
  Passage passage_;
  std::optional<Elasticity> elasticity_;
  std::vector<Lane> lanes_;
};

}  // namespace dynmo::train
