// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/cost/files.h"
#include "dynmo/kernels/processor.h"
#include "dynmo/train/last_files.h"
#include "dynmo/train/report.h"
#include "dynmo/train/run_impl.h"
#include "dynmo/train/setup/measured_keys.h"
#include "dynmo/train/setup/start.h"

namespace dynmo::train {

using config::LogLevel;

namespace {

// Resolves the run, and checks and prepares what all ranks share. All ranks call it before the run
// begins.
Expected<ResolvedRun> prepare(transport::Transport& transport, const ValidOptions& given,
                              const Reporter& reporter) {
  DYNMO_ASSIGN(const int ranks, pipeline_ranks(given.config(), transport.size()));
  if (!given.options().resume) DYNMO_TRY(check_ranks(given.config(), ranks));
  DYNMO_ASSIGN(ResolvedRun run, resolve(given));
  const TrainOptions& options = run.options();
  if (options.resume) {
    DYNMO_ASSIGN(const std::vector<std::string> measured, measured_before(run.config()));
    DYNMO_TRY(run.set(measured));
  }
  DYNMO_TRY(check_same_settings(transport, run));
  DYNMO_TRY(agree_on_kernels(transport, run));
  DYNMO_ASSIGN(const std::string unlike,
               unlike_processors(transport, kernels::instruction_set_name()));
  if (!unlike.empty() && transport.rank() == transport::Member(0)) reporter.say(unlike);
  DYNMO_TRY(check_folder_is_free(options));
  if (transport.rank() == transport::Member(0)) {
    DYNMO_ASSIGN(const bool removed, remove_earlier_run(options));
    if (removed) {
      reporter.say(fmt::format("removed  the earlier run in '{}'", options.config.run.directory));
    }
  }
  DYNMO_TRY(make_directories(options.config.run.directory));
  DYNMO_TRY(wait_for_all(transport));  // no rank writes before all have looked
  DYNMO_TRY(measure_keys(transport, run, reporter));
  return run;
}

Expected<void> train_in(transport::Transport& transport, elastic::Groups* groups,
                        const ValidOptions& options, const Reporter& reporter) {
  auto run = prepare(transport, options, reporter);
  if (!run) {
    const bool elastic = groups != nullptr && options.config().elastic.enabled;
    return elastic ? named_as_early(run.error()) : run.error();
  }
  return Run(transport, groups, *std::move(run), reporter).run();
}

}  // namespace

Expected<void> Run::run() {
  DYNMO_TRY(losses_.check_respawn());
  if (elasticity_) {
    if (const auto begun = elasticity_->begin(); !begun) return named_as_early(begun.error());
  }
  return through_losses(begin());
}

Expected<void> Run::join(const std::function<void()>& taken) {
  Lane& lane = add_lane("", nullptr);
  DYNMO_ASSIGN(auto part, elasticity_->enter(lane.settings));
  done_.first = done_.steps = part->pipeline().next_step();
  DYNMO_ASSIGN(lane.log, open_log("", RunLog::Keeps::kNumbers));
  DYNMO_TRY(elasticity_->join(*part));
  DYNMO_TRY(enter_group(lane, std::move(part)));
  taken();
  return through_losses(advance_all());
}

Expected<void> Run::begin() {
  const Beginning beginning = {.host = groups_ != nullptr ? groups_->self().host : options().host,
                               .resumes = options().resume};
  if (!options().compare.empty() && options().compare.front() == "dense") {
    DYNMO_ASSIGN(ResolvedRun dense, run_.dense());
    auto other = std::make_unique<const ResolvedRun>(std::move(dense));
    DYNMO_ASSIGN(const Start begin, begin_run(world(), *other, beginning));
    DYNMO_TRY(open_lane(add_lane("dense", std::move(other)), begin));
  }
  if (elasticity_) add_lane("", nullptr);  // a loss may come before it is open
  DYNMO_ASSIGN(const Start begin, begin_run(world(), run_, beginning));
  for (const std::string& note : begin.notes) say(note);
  if (begin.step() >= config().train.steps) {
    say(fmt::format("finished all {} steps of the run are done; train.steps may grow",
                    config().train.steps));
    return {};
  }
  for (const std::string& name : names()) {
    if (name == "dense") continue;
    DYNMO_TRY(open_lane(elasticity_ ? lanes_.front() : add_lane(name, nullptr), begin));
  }
  DYNMO_TRY(write_config());
  say_start();
  return advance_all();
}

void Run::say_start() const {
  const Lane& lane = lanes_.back();
  const runtime::Pipeline& pipeline = lane.group->pipeline();
  for (const std::string& line : start_lines(run_of(lane), grid(), pipeline)) {
    say(line);
  }
}

RunLane Run::settings_of(const std::string& name, int number) const {
  const bool balanced = name.empty() ? config().balance.enabled : name == "balanced";
  return {.number = number,
          .balancing = balanced ? runtime::Balancing::kAutomatic : runtime::Balancing::kNever,
          .directory = folder_.of(name).root(),
          // If two runs alternate, a background write of one would disturb the other.
          .checkpoints_wait = options().compare.empty() ? Waiting::kNever : Waiting::kAlways,
          .writer = checkpoint_writer(config()),
          .asks = [this] {
            if (elasticity_) return elasticity_->asks();
            return groups_ != nullptr && groups_->asked_to_leave();
          }};
}

Expected<RunLog> Run::open_log(const std::string& name, RunLog::Keeps keeps) const {
  const WorldRank number = elasticity_ ? WorldRank(elasticity_->self().number) : grid().rank();
  config::Config own = config();
  if (name != names().back()) own.run.metrics_port = 0;  // one of the runs has the port
  DYNMO_ASSIGN(RunLog log, RunLog::open(own,
                                        {.name = name.empty() ? "run" : name,
                                         .replicas = static_cast<int>(own.pipeline.replicas),
                                         .elastic = elasticity_.has_value()},
                                        folder_.of(name), number, done_.first, keeps));
  if (!own.run.log.empty()) log.set_messages(reporter_.log);
  // The shape of a caller's own layers is not known.
  if (!options().make_model) {
    log.set_step_flops(config::step_flops(own, run_.batches().vocabulary()));
  }
  return log;
}

Run::Lane& Run::add_lane(const std::string& name, std::unique_ptr<const ResolvedRun> other) {
  const int number = static_cast<int>(lanes_.size());
  lanes_.push_back({.name = name,
                    .other = std::move(other),
                    .settings = settings_of(name, number),
                    .log = {},
                    .group = nullptr,
                    .traffic = {}});
  lanes_.back().traffic.emplace(run_of(lanes_.back()).config());
  return lanes_.back();
}

Expected<void> Run::open_lane(Lane& lane, const Start& begin) {
  DYNMO_ASSIGN(auto part, open_group(lane, begin));
  if (!lane.log) DYNMO_TRY(start_log(lane, begin));
  return enter_group(lane, std::move(part));
}

Expected<void> Run::start_log(Lane& lane, const Start& begin) {
  done_.first = done_.steps = begin.step();
  // Rank 0 says at the end what was possible, from what the layers cost in every step.
  const bool compared = first_rank() && names().size() > 1;
  DYNMO_ASSIGN(lane.log,
               open_log(lane.name, compared ? RunLog::Keeps::kCosts : RunLog::Keeps::kNumbers));
  RunLog& log = *lane.log;
  if (group_.leads && elasticity_ && elasticity_->self().number > 0) DYNMO_TRY(log.lead());
  log.start(load_trace_start(begin.first, run_of(lane).config()));
  Json about = {{"plan", plan::to_json(begin.first.plan)},
                {"ranks", world().size()},
                {"steps", config().train.steps},
                {"micro_batches", run_of(lane).config().batch.micro_batches}};
  if (!options().program.empty()) about["program"] = options().program;
  log.event("start", done_.first, about);
  return {};
}

Expected<void> Run::write_config() const {
  // A run that cannot be continued with other settings keeps those it had.
  DYNMO_TRY(wait_for_all(world()));
  if (!first_rank()) return {};
  return write_file_durably(folder_.config(), to_toml(config()));
}

void Run::write_cluster() const {
  if (!first_rank()) return;
  const Json cluster = cost::cluster_json(lanes_.front().group->pipeline().cluster());
  const auto written = write_file_durably(folder_.cluster(), cluster.dump(1) + "\n");
  if (!written) {
    say(fmt::format("cluster  {}; training goes on", written.error().message), LogLevel::kWarning);
  }
}

Expected<void> Run::finish() {
  // Before any file is written, because errors grow with the time since a measurement.
  DYNMO_ASSIGN(const auto last, read_clocks());
  std::vector<transport::ClockFit> clocks;
  for (std::size_t rank = 0; rank < last.size(); ++rank) {
    clocks.push_back({.first = group_.clocks[rank], .last = last[rank]});
  }
  for (Lane& lane : lanes_) {
    DYNMO_TRY(finish(lane, clocks));
    const std::int64_t step = lane.group->pipeline().next_step();
    if (step == config().train.steps) lane.log->event("end", step);
  }
  if (elasticity_) {
    DYNMO_TRY(elasticity_->finish());
    note_events(lanes_.back(), lanes_.back().group->pipeline().next_step());
  }
  if (first_rank()) DYNMO_TRY(report());
  // A rank that ends with an error takes the others with it, also one that is still telling.
  DYNMO_TRY(wait_for_all(world()));
  for (const Lane& lane : lanes_) {
    const Checkpointer* checkpoints = lane.group->checkpoints();
    if (checkpoints == nullptr || !checkpoints->failure()) continue;
    return make_error(ErrorCode::kNoCheckpoint,
                      "the run is done, but its last checkpoint could not be written: {}",
                      checkpoints->failure()->message);
  }
  return {};
}

Expected<void> Run::finish(Lane& lane, std::span<const transport::ClockFit> clocks) {
  if (Checkpointer* checkpoints = lane.group->checkpoints()) {
    if (config().checkpoint.every > 0 || checkpoints->active()) DYNMO_TRY(finish_checkpoint(lane));
    if (elasticity_) elasticity_->answer_checkpoints(*lane.group);
  }
  const RunLog::Closed closed = lane.log->close();
  DYNMO_ASSIGN(const std::string missing, missing_records(world(), *lane.log, closed.records));
  if (!missing.empty()) say(missing, LogLevel::kWarning);
  DYNMO_TRY(note_traffic(lane, lane.traffic->end(world(), *lane.group)));
  if (!closed.load_trace.empty()) say(closed.load_trace, LogLevel::kWarning);
  DYNMO_ASSIGN(const LastFiles files,
               write_last_files(world(), *lane.group, *lane.log, run_of(lane).config(), clocks));
  for (const std::string& line : files.lines) say(line);
  if (!files.clocks.empty()) {
    lane.log->event("clocks", lane.group->pipeline().next_step(),
                    observe::clocks_json(files.clocks));
  }
  return {};
}

Expected<void> Run::report() {
  for (Lane& lane : lanes_) {
    const std::string fault = lane.log->settle_history(lane.group->pipeline().next_step());
    if (!fault.empty()) say(fault, LogLevel::kWarning);
  }
  DYNMO_ASSIGN(
      const Report report,
      make_report(histories(), lanes_.back().group->pipeline().profiler().known(),
                  run_of(lanes_.back()).model().given_costs, config(), grid().positions()));
  DYNMO_TRY(write_file_durably(folder_.summary(), report.summary.dump(2) + "\n"));
  for (const std::string& line : report.lines) reporter_.say(line);
  return {};
}

Expected<std::unique_ptr<GroupRun>> Run::open_group(const Lane& lane, const Start& begin) {
  DYNMO_ASSIGN(runtime::LayerStates states, first_states(begin, run_of(lane), grid().position()));
  auto group = std::make_unique<GroupRun>(
      world(), run_of(lane), lane.settings, begin.cluster,
      runtime::RankState{
          .plan = begin.first.plan, .layers = std::move(states), .step = begin.step()});
  if (begin.restored) {
    DYNMO_TRY(dynamism::restore(group->pipeline().sources(), begin.restored->sources));
  }
  if (begin.first.profiler) DYNMO_TRY(group->pipeline().use(*begin.first.profiler));
  return group;
}

Expected<void> train(transport::Transport& transport, const TrainOptions& options,
                     const Reporter& reporter) {
  DYNMO_ASSIGN(const ValidOptions valid, validated(options));
  return train_in(transport, nullptr, valid, reporter);
}

Expected<void> train(elastic::Groups& groups, const ValidOptions& options,
                     const Reporter& reporter) {
  return train_in(groups.group(), &groups, options, reporter);
}

Expected<void> join(elastic::Groups& groups, ResolvedRun run, const Reporter& reporter,
                    const std::function<void()>& taken) {
  return Run(groups.group(), &groups, std::move(run), reporter).join(taken);
}

}  // namespace dynmo::train
