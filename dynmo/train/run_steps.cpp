// SPDX-License-Identifier: Apache-2.0
// A run's steps, and what is done between two of them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

#include "dynmo/observe/table.h"
#include "dynmo/runtime/side_copies.h"
#include "dynmo/train/report.h"
#include "dynmo/train/run_impl.h"

namespace dynmo::train {

using config::LogLevel;

namespace {

std::string debug_text(const runtime::StepReport& report, const GroupRun& group, Bytes memory) {
  std::string text = fmt::format(
      "step {:5}  loss {}, gradient norm {}, took {}, of this rank busy {}; {} sent so far; memory "
      "{}",
      report.step, report.loss, report.gradient_norm, format_seconds(report.step_s),
      format_seconds(report.busy_s), format_bytes(group.transport().sent_bytes()),
      format_bytes(memory));
  if (const auto& beside = group.pipeline().staging().beside) {
    text += fmt::format(", {} of it pinned for copies of layers; at most {} of the device's",
                        format_bytes(beside->held()), format_bytes(report.device_memory_bytes));
  }
  return text;
}

}  // namespace

Expected<void> Run::advance_all() {
  DYNMO_ASSIGN(group_.clocks, read_clocks());
  for (std::int64_t step = done_.first; step < config().train.steps; ++step) {
    bool asked = false;
    if (elasticity_) {
      losses_.begin_step(elasticity_->view().generation);
      DYNMO_TRY(take_snapshot(lanes_.front(), step));
    }
    for (Lane& lane : lanes_) {
      DYNMO_ASSIGN(const bool one, advance(lane));
      asked = asked || one;
    }
    done_.generation = lanes_.front().group->pipeline().plan().generation;
    report_progress(step);
    if (step + 1 == config().train.steps) continue;
    if (!elasticity_ && asked) return stop(step + 1);
    if (!elasticity_) continue;
    DYNMO_ASSIGN(const bool stays, change_size(lanes_.front(), asked));
    if (!stays) return {};
  }
  return finish();
}

Expected<void> Run::stop(std::int64_t step) {
  if (options().compare.empty()) DYNMO_TRY(checkpoint(lanes_.front(), /*due=*/true));
  for (Lane& lane : lanes_) lane.log->event("stop", step, {{"why", "a signal"}});
  DYNMO_TRY(finish());
  return say_stopped(make_error(ErrorCode::kInterrupted, "stopped before step {} of {}: a signal",
                                step, config().train.steps));
}

Expected<bool> Run::advance(Lane& lane) {
  if (lanes_.size() > 1) DYNMO_TRY(wait_for_all(world()));
  DYNMO_TRY(note_traffic(lane, lane.traffic->before_step(world(), *lane.group)));
  const std::int64_t begin_ns = now_ns();
  DYNMO_ASSIGN(const runtime::StepReport report, lane.group->step());
  if (report.stop) return *report.stop;  // at all ranks
  // The step is done from here on, also where a loss ends what follows it.
  say(lane.log->add(report, *lane.group, begin_ns));
  if (const auto why = groups_ != nullptr ? groups_->take_warning() : std::nullopt) {
    say(fmt::format("ranks    {}", *why), LogLevel::kWarning);
  }
  if (logs(LogLevel::kDebug))
    reporter_.log(LogLevel::kDebug, debug_text(report, *lane.group, lane.log->memory()));
  done_.steps = report.step + 1;
  DYNMO_TRY(note_traffic(lane, lane.traffic->after_step(world(), *lane.group, report)));
  if (elasticity_) elasticity_->observe(report, *lane.group, lane.log->history());
  snapshots_.observe(report.step_s);
  DYNMO_TRY(after_step(lane));
  return report.asked;
}

Expected<void> Run::after_step(Lane& lane, bool has_checkpoint) {
  const std::int64_t done = lane.group->pipeline().next_step();
  const bool last = done == config().train.steps;
  if (run_.batches().validates() && (done % config().train.validation_every == 0 || last)) {
    DYNMO_TRY(traced(lane, SpanKind::kValidation, [&] { return validate(lane); }));
  }
  if (Checkpointer* checkpoints = lane.group->checkpoints()) {
    const std::int64_t every = config().checkpoint.every;
    const bool due = every > 0 && (done % every == 0 || last) && !has_checkpoint;
    if (due || checkpoints->active()) DYNMO_TRY(checkpoint(lane, due));
  }
  return {};
}

Expected<void> Run::validate(Lane& lane) {
  DYNMO_ASSIGN(const double loss, lane.group->validate());
  lane.traffic->validated();
  const std::int64_t step = lane.group->pipeline().next_step();
  observe::RunHistory::Validation outcome{.step = step, .loss = loss};
  const dynamism::Sources& sources = lane.group->pipeline().sources();
  if (std::ranges::any_of(sources, [](const auto& s) { return s->generates_otherwise(); })) {
    DYNMO_ASSIGN(const double generated, lane.group->validate(model::Pass::kGeneration));
    lane.traffic->validated();
    outcome.generation_loss = generated;
  }
  lane.log->note_validation(outcome);
  return {};
}

Expected<void> Run::take_snapshot(Lane& lane, std::int64_t step) {
  if (!snapshots_.due(step, world().size())) return {};
  DYNMO_ASSIGN(const Snapshots::Taken taken,
               snapshots_.take(*lane.group, elasticity_->view(), world()));
  if (!taken.line.empty()) say(taken.line, LogLevel::kWarning);
  reporter_.log(LogLevel::kDebug, fmt::format("step {:5}  snapshot of the layers", step));
  if (!taken.keepers.empty()) lane.traffic->copied(*lane.group, taken.keepers);
  return {};
}

Expected<void> Run::checkpoint(Lane& lane, bool due) {
  DYNMO_TRY(traced(lane, SpanKind::kCheckpoint, [&] { return lane.group->checkpoint(due); }));
  const std::int64_t step = lane.group->pipeline().next_step();
  lane.log->note_checkpoints(lane.group->checkpoints()->totals(), step);
  if (due) lane.log->event("checkpoint", step);
  for (const auto& note : lane.group->checkpoints()->take_notes()) say(note, LogLevel::kWarning);
  return {};
}

Expected<void> Run::finish_checkpoint(Lane& lane) {
  Checkpointer* checkpoints = lane.group->checkpoints();
  DYNMO_TRY(traced(lane, SpanKind::kCheckpoint, [&] { return checkpoints->finish(); }));
  lane.log->note_checkpoints(checkpoints->totals(), lane.group->pipeline().next_step());
  for (const std::string& note : checkpoints->take_notes()) say(note, LogLevel::kWarning);
  return {};
}

Expected<void> Run::enter_group(Lane& lane, std::unique_ptr<GroupRun> part) {
  lane.group = std::move(part);
  const std::int64_t step = lane.group->pipeline().next_step();
  DYNMO_TRY(step == done_.steps ? lane.log->begin_group() : lane.log->go_back());
  done_.first = done_.steps = step;
  snapshots_.begin_group();
  if (elasticity_) {
    enter(elasticity_->group());
    for (const elastic::Member& member : elasticity_->view().members) {
      done_.members = std::max(done_.members, member.number + 1);
    }
  }
  lane.traffic->begin(*lane.group);
  note_group(lane);
  write_cluster();
  return {};
}

void Run::note_group(const Lane& lane) const {
  if (!logs(LogLevel::kInfo)) return;
  const runtime::Pipeline& pipeline = lane.group->pipeline();
  std::string ranks = observe::format_count(world().size(), "rank");
  if (elasticity_) {
    std::vector<std::string> members;
    for (const elastic::Member& member : elasticity_->view().members) {
      members.push_back(
          fmt::format("{} on {} (process {})", member.number, member.host, member.pid));
    }
    ranks = fmt::format("{}: {}", ranks, fmt::join(members, ", "));
  }
  std::set<int> nodes;
  for (const cost::ClusterRank& rank : lane.group->cluster().ranks) nodes.insert(rank.node);
  reporter_.log(LogLevel::kInfo,
                fmt::format("step {:5}  group of generation {} with {}; {}; this is {}; plan {}",
                            pipeline.next_step(), pipeline.plan().generation, ranks,
                            observe::format_count(std::ssize(nodes), "node"),
                            pipeline.grid().name_of(pipeline.grid().position()),
                            plan::to_string(pipeline.plan())));
}

void Run::note_events(Lane& lane, std::int64_t step) {
  elasticity_->tell_events([&](const elastic::BoundaryEvent& event) {
    if (!event.line.empty()) say(fmt::format("step {:5}  {}", step, event.line));
    if (!event.kind.empty()) lane.log->event(event.kind, step, event.json);
  });
}

Expected<bool> Run::change_size(Lane& lane, bool asked) {
  locks_.take(options());
  if (const int failed = elasticity_->take_failed_starts()) losses_.will_respawn(failed);
  if (const auto line = losses_.respawn(group_.leads)) say(*line);
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
  DYNMO_ASSIGN(const bool hooks, elasticity_->waits_for_hook(*decision.change));
  if (hooks) return true;
  DYNMO_ASSIGN(const bool waits, waits_for_checkpoint(lane, *decision.change));
  if (waits) return true;
  elasticity_->answer_checkpoints(*lane.group);  // another rank would not know its client
  DYNMO_ASSIGN(const bool possible, elasticity_->prepare(*decision.change, *lane.group));
  note_events(lane, step);
  return possible ? change_group(lane, *decision.change) : true;
}

Expected<bool> Run::waits_for_checkpoint(Lane& lane, const elastic::SizeChange& change) {
  if (!lane.group->checkpoints()->active()) return false;
  const std::int64_t every = config().checkpoint.every;
  if (every == 0 || change.waited < every) {
    elasticity_->defer(change);
    return true;
  }
  DYNMO_TRY(finish_checkpoint(lane));
  return false;
}

Expected<bool> Run::change_group(Lane& lane, const elastic::SizeChange& change) {
  DYNMO_TRY(note_traffic(lane, lane.traffic->end(world(), *lane.group)));
  group_.grid.reset();
  const std::int64_t step = lane.group->pipeline().next_step();
  DYNMO_ASSIGN(Regrouped next, elasticity_->change(change, std::move(lane.group), lane.settings));
  if (elasticity_->leads() && !group_.leads) lead();
  note_events(lane, step);
  if (next.group == nullptr) {  // records are no reason to end with an error
    static_cast<void>(lane.log->close());
    return false;
  }
  DYNMO_TRY(enter_group(lane, std::move(next.group)));
  DYNMO_ASSIGN(group_.clocks, read_clocks());
  return true;
}

Expected<void> Run::note_traffic(Lane& lane, TrafficIntervals::Ended ended) const {
  if (!ended) return ended.error();
  if (!*ended || !first_rank()) return {};
  observe::TrafficInterval interval = **std::move(ended);
  if (elasticity_) renumber(interval, elastic::numbers_of(elasticity_->view()));
  lane.log->add_traffic(interval);
  const auto written = observe::append_traffic(lane.log->folder().traffic(), interval);
  if (!written) {
    say(fmt::format("traffic  {}; training goes on", written.error().message), LogLevel::kWarning);
  }
  return {};
}

void Run::report_progress(std::int64_t step) const {
  if (!first_rank()) return;
  const runtime::Pipeline& newest = lanes_.back().group->pipeline();
  const auto text = [&] {
    const RunLog& log = *lanes_.back().log;
    return progress_line(step, config().train.steps, histories(), newest.plan()) +
           usage_text(log.history(), log.scale(), !config::sparse_sources(config()).empty(),
                      log.memory()) +
           dynamism::progress(newest.sources()) + (emulates(config()) ? "  EMULATED" : "");
  };
  reporter_.progress({.done = step + 1, .steps = config().train.steps, .text = text});
}

}  // namespace dynmo::train
