// SPDX-License-Identifier: Apache-2.0
#pragma once

// A training run as one rank sees it: it begins, trains and finishes, and after a loss begins again
// with the ranks that are left.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/files.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/cost/files.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/train/elasticity.h"
#include "dynmo/train/generation.h"
#include "dynmo/train/last_files.h"
#include "dynmo/train/report.h"
#include "dynmo/train/run_log.h"
#include "dynmo/train/setup/earlier_run.h"
#include "dynmo/train/setup/emulation.h"
#include "dynmo/train/setup/first_plan.h"
#include "dynmo/train/setup/pipeline_options.h"
#include "dynmo/train/setup/start.h"
#include "dynmo/train/snapshots.h"
#include "dynmo/train/traces.h"
#include "dynmo/train/traffic_intervals.h"
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
  // `groups`: null where nobody asks a process to leave.
  Run(transport::Transport& group, elastic::Groups* groups, const TrainOptions& options,
      const Reporter& reporter, Inputs inputs)
      : options_(options),
        config_(options.config),
        reporter_(reporter),
        groups_(groups),
        folder_(config_.run.directory),
        inputs_(std::move(inputs)),
        group_(&group),
        grid_(std::in_place, group, static_cast<int>(config_.pipeline.replicas)),
        leads_(group.rank() == transport::Member(0)) {
    if (groups != nullptr && config_.elastic.enabled) {
      elasticity_.emplace(*groups, config_, inputs_);
    }
  }

  Expected<void> run() {
    DYNMO_TRY(check_respawn());
    if (elasticity_) DYNMO_TRY(elasticity_->begin());
    return through_losses(begin());
  }

  // Called by a process that joins a run, in the group in which it was given a place. What may go
  // wrong with it alone comes before the others count on it.
  Expected<void> join(const std::function<void()>& taken) {
    Lane& lane = add_lane("", nullptr);
    DYNMO_ASSIGN(lane.group, elasticity_->enter(lane.settings));
    first_step_ = reached_ = lane.group->pipeline().next_step();
    DYNMO_ASSIGN(lane.log, open_log("", Kept::kNumbers));
    DYNMO_TRY(elasticity_->join(*lane.group));
    lane.traffic->begin(*lane.group);
    taken();
    lane.log->keep(first_step_);
    return through_losses(advance_all());
  }

 private:
  struct OtherModel {
    TrainOptions options;
    Inputs inputs;
  };
  // One of the runs that advance in turn: what lives as long as it, and its part of the group.
  struct Lane {
    std::string name;
    // Null where the model is that of the options.
    std::unique_ptr<const OtherModel> other = {};
    RunLane settings;
    std::optional<RunLog> log;
    std::unique_ptr<GroupRun> group;
    std::optional<TrafficIntervals> traffic;
  };

  bool first_rank() const { return leads_; }

  Expected<void> begin();
  void say_start() const {
    const Lane& lane = lanes_.back();
    const runtime::Pipeline& pipeline = lane.group->pipeline();
    for (const std::string& line :
         start_lines(config_of(lane), inputs_of(lane), *grid_, pipeline)) {
      say(line);
    }
  }

  // surviving.cpp: what all ranks decide alike ends the run, and so does an error of this rank
  // alone. A loss before the ranks know each other has nothing to go on from.
  bool may_survive(const Error& why) const;
  // Goes on after each loss that the run survives.
  Expected<void> through_losses(Expected<void> done);
  // False: this rank has left the run, or all is done.
  Expected<bool> survive(const Error& why);
  // All steps are done, and the first rank has written its last file, the summary: who is lost now
  // is not missed. (Where this rank has not found it, the first one may be writing it: it has when
  // its process has ended.)
  bool is_whole() const;
  Expected<elastic::View> meet_survivors(const elastic::View& before, const Error& why);
  struct Recovery {
    Error why;
    std::string_view from = {};  // for people
    bool whole = false;          // all is done
    std::int64_t reached = 0;    // steps done before the loss, by any rank that is left
    Json ms = {};                // by phase
    std::chrono::steady_clock::time_point phase = std::chrono::steady_clock::now();

    void end_phase(const char* name) {
      ms[name] = 1e3 * seconds_since(phase);
      phase = std::chrono::steady_clock::now();
    }
  };
  Expected<void> take_snapshot(Lane& lane, std::int64_t step);
  const runtime::RankState& state_of(const Lane& lane) const {
    return lane.group == nullptr ? held_ : lane.group->pipeline().state();
  }
  // Goes on from the newest step that the ranks have all layers of, whether as they are, in
  // snapshots or in a checkpoint; or from the beginning.
  Expected<void> recover(Lane& lane, Recovery& recovery);
  Expected<void> finish_step(Lane& lane, const elastic::UpdateRecord& record);
  Expected<void> regroup_at(Lane& lane, const plan::Plan& plan, std::int64_t step,
                            const cost::Cluster& cluster);
  Expected<void> share_series(Lane& lane, bool has_it);
  Expected<void> after_step_again(Lane& lane);
  // elastic.respawn: later, the more losses there were lately.
  Expected<void> check_respawn() const;
  void will_respawn(int ranks);
  void respawn();
  // From the newest checkpoint, or where there is none from the beginning.
  Expected<void> begin_again(Lane& lane, Generation generation);
  void note_loss(Lane& lane, const elastic::View& before, const Recovery& recovery);

  Expected<void> advance_all() {
    for (std::int64_t step = first_step_; step < config_.train.steps; ++step) {
      bool asked = false;
      if (elasticity_) DYNMO_TRY(take_snapshot(lanes_.front(), step));
      for (Lane& lane : lanes_) {
        DYNMO_ASSIGN(const bool one, advance(lane));
        asked = asked || one;
      }
      reached_ = step + 1;
      newest_generation_ = lanes_.front().group->pipeline().plan().generation;
      report_progress(step);
      if (step + 1 == config_.train.steps) continue;
      if (!elasticity_ && asked) return stop(step + 1);
      if (!elasticity_) continue;
      DYNMO_ASSIGN(const bool stays, change_size(lanes_.front(), asked));
      if (!stays) return {};
    }
    return finish();
  }
  // A signal has asked a rank of a group that stays as it is. The runs of a comparison are not
  // continued.
  Expected<void> stop(std::int64_t step) {
    if (options_.compare.empty()) DYNMO_TRY(checkpoint(lanes_.front(), /*due=*/true));
    for (Lane& lane : lanes_) lane.log->event("stop", step, {{"why", "a signal"}});
    DYNMO_TRY(finish());
    return say_stopped(make_error(ErrorCode::kInterrupted, "stopped before step {} of {}: a signal",
                                  step, config_.train.steps));
  }
  // The rank that speaks for the run says it; the others end with the same error.
  Error say_stopped(Error why) const {
    if (why.code == ErrorCode::kInterrupted) say(why.message);
    return why;
  }
  // From now on this rank speaks for the run, and knows of it what the one before knew.
  Expected<void> lead(const Json& known);
  // Those of a rank that has led before are free when its process has ended.
  void take_locks();
  void say(std::string_view text) const {
    if (first_rank()) reporter_.line(text);
  }
  std::vector<std::string> names() const {
    return options_.compare.empty() ? std::vector<std::string>{""} : options_.compare;
  }
  std::vector<const RunSeries*> all_series() const {
    std::vector<const RunSeries*> series;
    for (const Lane& lane : lanes_) series.push_back(&lane.log->series());
    return series;
  }

  RunLane settings_of(const std::string& name, int number) const {
    const bool balanced = name.empty() ? config_.balance.enabled : name == "balanced";
    return {.number = number,
            .balancing = balanced ? runtime::Balancing::kAutomatic : runtime::Balancing::kNever,
            .directory = folder_.of(name).root(),
            // With two runs in turn, neither is to be disturbed by what the other leaves to a
            // thread.
            .checkpoints_wait = options_.compare.empty() ? Waiting::kNever : Waiting::kAlways,
            .asks = [this] {
              if (elasticity_) return elasticity_->asks();
              return groups_ != nullptr && groups_->asked_to_leave();
            }};
  }

  const config::Config& config_of(const Lane& lane) const {
    return lane.other ? lane.other->options.config : config_;
  }
  const Inputs& inputs_of(const Lane& lane) const {
    return lane.other ? lane.other->inputs : inputs_;
  }

  Expected<RunLog> open_log(const std::string& name, Kept kept) const {
    const WorldRank number = elasticity_ ? WorldRank(elasticity_->self().number) : grid_->rank();
    return RunLog::open(config_, name.empty() ? "run" : name, folder_.of(name), number, first_step_,
                        kept);
  }

  Expected<std::unique_ptr<GroupRun>> open_group(const Lane& lane, const Start& begin);

  Lane& add_lane(const std::string& name, std::unique_ptr<const OtherModel> other);
  Expected<void> open_lane(Lane& lane, const Start& begin);

  Expected<void> write_config() const {
    // A run that cannot be continued with other settings keeps those it had.
    DYNMO_TRY(wait_for_all(*group_));
    if (!first_rank()) return {};
    return write_file_durably(folder_.config(), to_toml(config_));
  }

  // The ranks of the group in force, for `dynmo plan --cluster`. A run goes on without the file.
  void write_cluster() const {
    if (!first_rank()) return;
    const Json cluster = cost::cluster_json(lanes_.front().group->pipeline().cluster());
    const auto written = write_file_durably(folder_.cluster(), cluster.dump(1) + "\n");
    if (!written) say(fmt::format("cluster  {}; training goes on", written.error().message));
  }

  // One step of one run, with what hangs on it: whether a rank has something to tell all before the
  // next one. The barrier charges every run its own time only.
  Expected<bool> advance(Lane& lane) {
    if (lanes_.size() > 1) DYNMO_TRY(wait_for_all(*group_));
    DYNMO_TRY(note_traffic(lane, lane.traffic->before_step(*group_, *lane.group)));
    const std::int64_t begin_ns = now_ns();
    DYNMO_ASSIGN(const runtime::StepReport report, lane.group->step());
    if (report.stop) return *report.stop;  // at all ranks
    DYNMO_TRY(note_traffic(lane, lane.traffic->after_step(*group_, *lane.group, report)));
    for (const std::string& line : lane.log->add(report, *lane.group, begin_ns)) say(line);
    if (elasticity_) elasticity_->observe(report, *lane.group);
    snapshots_.observe(report.step_s);
    DYNMO_TRY(after_step(lane));
    return report.asked;
  }
  // Does what is due before the next step.
  Expected<void> after_step(Lane& lane, bool has_checkpoint = false) {
    const std::int64_t done = lane.group->pipeline().next_step();
    const bool last = done == config_.train.steps;
    if (inputs_.batches.validates() && (done % config_.train.validation_every == 0 || last)) {
      DYNMO_TRY(traced(lane, SpanKind::kValidation, [&] { return validate(lane); }));
    }
    if (Checkpointer* checkpoints = lane.group->checkpoints()) {
      const std::int64_t every = config_.checkpoint.every;
      const bool due = every > 0 && (done % every == 0 || last) && !has_checkpoint;
      if (due || checkpoints->active()) DYNMO_TRY(checkpoint(lane, due));
    }
    return {};
  }

  Expected<void> checkpoint(Lane& lane, bool due) {
    DYNMO_TRY(traced(lane, SpanKind::kCheckpoint, [&] { return lane.group->checkpoint(due); }));
    if (due) lane.log->event("checkpoint", lane.group->pipeline().next_step());
    if (due && elasticity_) lane.log->keep(lane.group->pipeline().next_step());
    for (const std::string& note : lane.group->checkpoints()->take_notes()) say(note);
    return {};
  }

  Expected<void> finish_checkpoint(Lane& lane) {
    Checkpointer* checkpoints = lane.group->checkpoints();
    DYNMO_TRY(traced(lane, SpanKind::kCheckpoint, [&] { return checkpoints->finish(); }));
    for (const std::string& note : checkpoints->take_notes()) say(note);
    return {};
  }

  // Prints and logs what has happened between two steps.
  void note_events(Lane& lane, std::int64_t step) {
    for (const elastic::BoundaryEvent& event : elasticity_->take_events()) {
      if (!event.line.empty()) say(fmt::format("step {:5}  {}", step, event.line));
      if (!event.kind.empty()) lane.log->event(event.kind, step, event.json);
    }
  }

  // Does what clients and signals ask for between two steps. False: this rank has left the run.
  Expected<bool> change_size(Lane& lane, bool asked) {
    if (wants_locks_) take_locks();
    respawn();
    const std::int64_t step = lane.group->pipeline().next_step();
    DYNMO_ASSIGN(elastic::BoundaryDecision decision, elasticity_->next(*lane.group, asked));
    note_events(lane, step);
    if (decision.checkpoint || decision.stop) DYNMO_TRY(checkpoint(lane, /*due=*/true));
    if (decision.stop) {
      const Error why = elasticity_->stop(decision, *lane.group, finish());
      note_events(lane, step);
      return say_stopped(why);
    }
    if (!decision.change) return true;
    DYNMO_ASSIGN(const bool waits, waits_for_checkpoint(lane, *decision.change));
    if (waits) return true;
    elasticity_->answer_checkpoints(*lane.group);  // another rank would not know who asked
    DYNMO_ASSIGN(const bool possible, elasticity_->prepare(*decision.change, *lane.group));
    note_events(lane, step);
    return possible ? change_group(lane, *decision.change) : true;
  }

  // A change waits for the disk, but not for one checkpoint after the other.
  Expected<bool> waits_for_checkpoint(Lane& lane, const elastic::SizeChange& change) {
    if (!lane.group->checkpoints()->active()) return false;
    const std::int64_t every = config_.checkpoint.every;
    if (every == 0 || change.waited < every) {
      elasticity_->defer(change);
      return true;
    }
    DYNMO_TRY(finish_checkpoint(lane));
    return false;
  }

  // From one group to the next. False: this rank has left the run.
  Expected<bool> change_group(Lane& lane, const elastic::SizeChange& change) {
    DYNMO_TRY(end_group(lane));
    grid_.reset();
    const int ranks = group_->size();
    const std::int64_t step = lane.group->pipeline().next_step();
    const Json known = leads_ ? lane.log->series().to_json() : Json();
    DYNMO_ASSIGN(Regrouped next,
                 elasticity_->change(change, std::move(lane.group), lane.settings, known));
    lane.group = std::move(next.group);
    if (!next.run.is_null()) DYNMO_TRY(lead(next.run));
    note_events(lane, step);
    if (lane.group == nullptr) {  // records are no reason to end with an error
      static_cast<void>(lane.log->close());
      return false;
    }
    group_ = &elasticity_->group();
    grid_.emplace(*group_, static_cast<int>(config_.pipeline.replicas));
    lane.log->begin_group();
    snapshots_.begin_group();
    lane.traffic->begin(*lane.group);
    RunSeries& series = lane.log->series();
    series.add_move(next.moves.count, next.moves.layers, next.moves.bytes, next.moves.seconds);
    if (!next.done) return true;
    write_cluster();
    series.changing_rank_s += ranks * next.pause_s;
    ++series.size_changes;
    for (const int number : elastic::numbers_of(elasticity_->view())) {
      series.members = std::max(series.members, number + 1);
    }
    return true;
  }

  // Collects the state of the run from the group that ends.
  Expected<void> end_group(Lane& lane) {
    lane.log->add_checkpoints(lane.group->checkpoints()->totals());
    return gather_traffic(lane);
  }

  // Messages of one plan, once it is no longer in force. Ranks get their numbers for people.
  Expected<void> note_traffic(Lane& lane, TrafficIntervals::Ended ended) const {
    if (!ended) return ended.error();
    if (!*ended || !first_rank()) return {};
    observe::TrafficInterval interval = **std::move(ended);
    if (elasticity_) renumber(interval, elastic::numbers_of(elasticity_->view()));
    const auto written = observe::append_traffic(lane.log->folder().traffic(), interval);
    if (!written) say(fmt::format("traffic  {}; training goes on", written.error().message));
    return {};
  }

  Expected<void> gather_traffic(Lane& lane) {
    DYNMO_TRY(note_traffic(lane, lane.traffic->end(*group_, *lane.group)));
    DYNMO_ASSIGN(
        const transport::Traffic traffic,
        transport::gather_traffic(*group_, transport::control_tag(transport::Control::kTraffic),
                                  lane.group->transport().sent()));
    lane.log->series().add_traffic(
        traffic, elasticity_ ? elastic::numbers_of(elasticity_->view()) : std::vector<int>());
    return {};
  }

  // Where in the trace it was.
  template <typename Work>
  Expected<void> traced(Lane& lane, SpanKind kind, Work work) {
    const std::int64_t begin_ns = now_ns();
    DYNMO_TRY(work());
    lane.log->add_span(kind, begin_ns);
    return {};
  }

  Expected<void> validate(Lane& lane);

  void report_progress(std::int64_t step) const {
    if (!first_rank()) return;
    const runtime::Pipeline& newest = lanes_.back().group->pipeline();
    const std::string text = progress_line(step, config_.train.steps, all_series(), newest.plan()) +
                             dynamism::progress(newest.sources()) +
                             (emulates(config_) ? "  EMULATED" : "");
    reporter_.progress({.done = step + 1, .steps = config_.train.steps, .text = text});
  }

  Expected<void> finish();

  Expected<void> finish(Lane& lane);

  Expected<void> report() const;

  const TrainOptions& options_;
  const config::Config& config_;
  const Reporter& reporter_;
  elastic::Groups* groups_;
  const observe::RunFolder folder_;
  Inputs inputs_;
  transport::Transport* group_;  // in force
  std::optional<transport::Grid> grid_;
  bool leads_;                // rank 0 of the group in force
  bool wants_locks_ = false;  // of the run's folder
  RunLocks locks_;
  std::int64_t first_step_ = 0;
  std::int64_t reached_ = 0;          // steps done
  Generation newest_generation_ = 0;  // of the plan
  std::int64_t lost_at_ = -1;         // the steps done at the newest loss, and how many losses
  int times_lost_ = 0;                // there were before a step more was done
  bool alone_ = false;                // has no group: it did not meet the others again
  int missing_ = 0;                   // ranks that are to be started for lost ones
  int losses_lately_ = 0;
  std::chrono::steady_clock::time_point lost_ = {};        // the newest
  std::chrono::steady_clock::time_point respawn_at_ = {};  // the missing ranks
  Snapshots snapshots_{config_};
  runtime::RankState held_;  // between two groups, after a loss
  // From a loss until the run is whole again, which may take more than one recovery.
  struct Recovering {
    elastic::View before;    // the members before the first loss
    elastic::View numbered;  // those whose positions the controller knows
  };
  std::optional<Recovering> recovering_;
  std::optional<Elasticity> elasticity_;
  std::vector<Lane> lanes_;
};

}  // namespace dynmo::train
