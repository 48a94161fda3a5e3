// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/run_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <span>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/observe/run_events.h"
#include "dynmo/observe/step_record.h"
#include "dynmo/observe/table.h"
#include "dynmo/process/host_memory.h"
#include "dynmo/train/load_trace_step.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

observe::StepRecord record_of(const runtime::StepReport& report,
                              const runtime::Pipeline& pipeline) {
  observe::StepRecord record{report, report.step};
  record.generation = pipeline.plan().generation;
  for (const plan::PlanStage& stage : pipeline.plan().stages) {
    if (stage.rank != pipeline.grid().position()) continue;
    if (record.layers == 0) record.first_layer = stage.layers.first.value;
    record.layers += stage.layers.count;
  }
  record.memory_bytes = process::resident_memory();
  record.sources = dynamism::figures(pipeline.sources());
  return record;
}

}  // namespace

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

RunLog::RunLog(const config::Config& config, std::string name, observe::RunFolder folder, Kept kept)
    : emulated_(emulates(config)),
      trace_steps_(config.run.trace_steps),
      folder_(std::move(folder)),
      series_(std::move(name), kept),
      kept_(config.checkpoint.keep) {
  series_.replicas = static_cast<int>(config.pipeline.replicas);
  series_.tokens_per_step =
      step_micro_batches(config) * config.batch.micro_batch_size * config.model.shape.sequence;
}

Expected<RunLog> RunLog::open(const config::Config& config, std::string name,
                              observe::RunFolder folder, WorldRank rank, std::int64_t first_step,
                              Kept kept) {
  RunLog log(config, std::move(name), std::move(folder), kept);
  log.rank_ = rank;
  DYNMO_TRY(make_directories(log.folder_.records()));
  using Records = observe::RecordWriterOptions;
  DYNMO_TRY(log.open_records(first_step > 0 ? Records::Start::kAppend : Records::Start::kEmpty));
  if (rank != WorldRank(0)) return log;
  using Events = observe::EventLog;
  DYNMO_ASSIGN(log.events_,
               Events::open(log.folder_.events(),
                            first_step > 0 ? Events::Start::kAppend : Events::Start::kEmpty));
  if (config.run.load_trace == 0) return log;
  using Device = dynamism::TraceLines::Device;
  DYNMO_ASSIGN(log.load_trace_, observe::LoadTraceWriter::open(
                                    log.folder_.load_trace(first_step), config.run.load_trace,
                                    log.emulated_ ? Device::kEmulated : Device::kReal));
  return log;
}

Expected<void> RunLog::open_records(observe::RecordWriterOptions::Start start) {
  DYNMO_ASSIGN(records_, observe::RecordWriter::open(folder_.records_of(rank_), {.start = start}));
  closed_ = false;
  return {};
}

Expected<void> RunLog::lead() {
  DYNMO_ASSIGN(events_,
               observe::EventLog::open(folder_.events(), observe::EventLog::Start::kAppend));
  return {};
}

void RunLog::write_events(const runtime::StepReport& report, const runtime::Pipeline& pipeline) {
  if (!events_) return;
  const bool announced = report.announced != cost::Announced::kNothing;
  if (report.frozen_layers != recorded_.frozen_layers || announced) {
    recorded_.frozen_layers = report.frozen_layers;
    event("sources", report.step,
          {{"frozen_layers", recorded_.frozen_layers},
           {"figures", dynamism::figures(pipeline.sources())}});
  }
  if (report.decision) {
    event("decision", report.step, observe::decision_event(*report.decision));
  }
  if (report.moved_layers > 0) {
    event("move", report.step,
          observe::move_event(report.moved_layers, report.moved_bytes, report.move_pause_s,
                              pipeline.plan()));
  }
  if (report.skipped) event("skipped", report.step, {{"gradient_norm", report.gradient_norm}});
}

void RunLog::write_record(const runtime::StepReport& report, const GroupRun& group) {
  observe::StepRecord record = record_of(report, group.pipeline());
  record.rank = rank_.value;
  record.tokens = series_.tokens_per_step;
  record.emulated = emulated_;
  const Bytes sent = group.transport().sent_bytes();
  record.sent_bytes = sent - recorded_.sent;
  recorded_.sent = sent;
  series_.sources = record.sources;
  if (const Checkpointer* checkpoints = group.checkpoints()) {
    const double pause_s = checkpoints->totals().pause_s;
    record.checkpoint_s = pause_s - recorded_.pause_s;
    recorded_.pause_s = pause_s;
  }
  records_->write(record);
}

std::vector<std::string> RunLog::add(const runtime::StepReport& report, const GroupRun& group,
                                     std::int64_t begin_ns) {
  const runtime::Pipeline& pipeline = group.pipeline();
  write_record(report, group);
  write_events(report, pipeline);
  series_.add(report, pipeline.plan());
  if (load_trace_) load_trace_->add(load_trace_step(report, pipeline));
  if (trace_steps_ > 0) {
    traces_.push_back(step_trace(report, begin_ns));
    if (std::ssize(traces_) > trace_steps_) traces_.pop_front();
  }
  std::vector<std::string> lines = moves_.add(name(), report, pipeline.plan());
  if (const auto failure = records_->take_failure()) {
    lines.push_back(fmt::format("records  {}; training goes on", failure->message));
  }
  if (events_) {
    if (const auto failure = events_->take_failure()) {
      lines.push_back(fmt::format("events   {}; training goes on", *failure));
    }
  }
  if (report.skipped) {
    lines.push_back(
        fmt::format("step {:5}  loss {}, gradient norm {}: no update (train.on_nan = skip)",
                    report.step, std::abs(report.loss), report.gradient_norm));
  }
  if (const auto slow = slow_.add(report.layers, pipeline.plan())) {
    // (Times are means over the replicas.)
    lines.push_back(fmt::format(
        "step {:5}  {}{} is slow: all its layers take {:.1f} x as long as before", report.step,
        series_.replicas > 1 ? "one of " : "", pipeline.grid().name_of(slow->rank), slow->factor));
  }
  return lines;
}

void RunLog::begin_group() {
  traces_.clear();
  slow_ = {};
  moves_ = {};
  recorded_.sent = {};
  recorded_.pause_s = 0;
}

Expected<void> RunLog::roll_back(std::int64_t step) {
  begin_group();
  load_trace_.reset();
  if (const RunSeries* known = kept_.roll_back(step)) {
    const RunSeries now = std::exchange(series_, *known);
    series_.members = now.members;
    series_.size_changes = now.size_changes;
    series_.changing_rank_s = now.changing_rank_s;
    series_.traffic = now.traffic;
    series_.losses = now.losses;
    series_.repeated_steps = now.repeated_steps;
    series_.checkpoints_failed = now.checkpoints_failed;
  } else {
    kept_.knows_all = false;
  }
  return closed_ ? open_records(observe::RecordWriterOptions::Start::kAppend) : Expected<void>();
}

void RunLog::add_span(SpanKind kind, std::int64_t begin_ns) {
  if (!traces_.empty()) traces_.back().spans.push_back({kind, begin_ns, now_ns()});
}

void RunLog::add_checkpoints(const CheckpointTotals& totals) {
  series_.checkpoints_written += totals.written;
  series_.checkpoints_failed += totals.failed;
  series_.sums.checkpoint_s += totals.pause_s;
}

RunLog::Closed RunLog::close() {
  Closed closed;
  closed_ = true;
  if (const auto done = records_->close(); !done) closed.records = done.error().message;
  if (!load_trace_) return closed;
  if (const auto done = load_trace_->close(); !done) closed.load_trace = done.error().message;
  return closed;
}

Expected<std::string> missing_records(transport::Transport& group, const RunLog& log,
                                      const std::string& why) {
  const auto missing = static_cast<double>(log.missing_records());
  DYNMO_ASSIGN(const auto all, transport::gather_numbers(
                                   group, transport::control_tag(transport::Control::kTraffic),
                                   std::span(&missing, 1)));
  double sum = 0;
  for (const auto& of_rank : all) sum += of_rank.front();
  if (sum == 0) return std::string();
  return fmt::format("records  {} are missing in '{}'{}",
                     observe::format_count(static_cast<std::int64_t>(sum), "line"),
                     log.folder().records().string(), why.empty() ? "" : ": " + why);
}

}  // namespace dynmo::train
