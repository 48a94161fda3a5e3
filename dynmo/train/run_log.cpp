// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/run_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/observe/event_log.h"
#include "dynmo/observe/step_record.h"
#include "dynmo/observe/table.h"
#include "dynmo/process/host_memory.h"
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

dynamism::TraceLines::Device device_of(bool emulated) {
  using Device = dynamism::TraceLines::Device;
  return emulated ? Device::kEmulated : Device::kReal;
}

// Returns a key by which events are compared. Two events with the same key are one event that two
// ranks have reported.
std::string key_of(std::string_view kind, std::int64_t step, const Json& more) {
  std::string key = fmt::format("{} {}", kind, step);
  for (const char* which : {"lost", "ranks", "cause"}) {
    if (more.is_object() && more.contains(which)) key += " " + more[which].dump();
  }
  return key;
}

config::LogLevel level_of(std::string_view kind, const Json& more) {
  if (kind == "loss" || kind == "skipped") return config::LogLevel::kWarning;
  if (kind == "saved") {
    return more.value("failed", 0) > 0 ? config::LogLevel::kWarning : config::LogLevel::kInfo;
  }
  const bool kept = kind == "decision" && !more.value("taken", true);
  return kept || kind == "sources" ? config::LogLevel::kDebug : config::LogLevel::kInfo;
}

std::string event_text(std::string_view run, std::string_view kind, std::int64_t step,
                       const Json& more) {
  return fmt::format(
      "step {:5}  {}: {}{}", step, run, kind,
      more.is_null() ? "" : " " + more.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

RunLog::RunLog(const config::Config& config, observe::RunHistory::Run run,
               observe::RunFolder folder, WorldRank rank, Keeps keeps)
    : settings_{.emulated = emulates(config),
                .rank = rank,
                .keeps = keeps,
                .tokens_per_step = step_micro_batches(config) * config.batch.micro_batch_size *
                                   config.model.shape.sequence,
                .trace_steps = config.run.trace_steps,
                .load_trace_every = config.run.load_trace,
                .scale = {.peak_flops = config.run.peak_flops}},
      folder_(std::move(folder)),
      history_(std::move(run)),
      files_{.metrics = observe::make_metrics_log(
                 folder_, rank,
                 {.tensorboard = config.run.tensorboard,
                  .prometheus = config.run.prometheus,
                  .port = static_cast<std::uint16_t>(config.run.metrics_port)}),
             .records = nullptr,
             .load_trace = nullptr,
             .events = {}} {}

Expected<RunLog> RunLog::open(const config::Config& config, observe::RunHistory::Run run,
                              observe::RunFolder folder, WorldRank rank, std::int64_t first_step,
                              Keeps keeps) {
  RunLog log(config, std::move(run), std::move(folder), rank, keeps);
  DYNMO_TRY(make_directories(log.folder_.records()));
  using Records = observe::RecordWriterOptions;
  DYNMO_TRY(log.open_records(first_step > 0 ? Records::Start::kAppend : Records::Start::kEmpty));
  if (rank != WorldRank(0)) return log;
  log.settings_.leads = true;
  log.whole_ = first_step == 0;
  using Events = observe::EventLog;
  DYNMO_ASSIGN(log.files_.events,
               Events::open(log.folder_.events(),
                            first_step > 0 ? Events::Start::kAppend : Events::Start::kEmpty));
  observe::remove_load_traces_after(log.folder_, first_step);
  if (log.settings_.load_trace_every == 0) return log;
  DYNMO_ASSIGN(log.files_.load_trace,
               observe::LoadTraceWriter::open(log.folder_.load_trace(first_step),
                                              log.settings_.load_trace_every,
                                              device_of(log.settings_.emulated)));
  return log;
}

Expected<void> RunLog::open_records(observe::RecordWriterOptions::Start start) {
  DYNMO_ASSIGN(files_.records,
               observe::RecordWriter::open(
                   folder_.records_of(settings_.rank),
                   {.start = start, .also = observe::record_sink(files_.metrics.get())}));
  closed_ = false;
  return {};
}

Expected<void> RunLog::lead() {
  settings_.leads = true;
  history_ = observe::RunHistory(history_.run());
  whole_ = false;
  if (files_.metrics) files_.metrics->lead();
  return take_over_events();
}

Expected<void> RunLog::take_over_events() {
  const auto written = observe::read_events(folder_.events(), observe::EventsOf::kTakeOver);
  std::set<std::string> known;
  if (written) {
    for (const observe::Event& event : *written) {
      known.insert(key_of(event.kind, event.step, event.json));
      fold(event.kind, event.step, event.json);
    }
  }
  DYNMO_ASSIGN(files_.events,
               observe::EventLog::open(folder_.events(), observe::EventLog::Start::kAppend));
  for (const Noted& each : std::exchange(noted_, {})) {
    if (!known.contains(key_of(each.kind, each.step, each.more))) {
      write_event(each.kind, each.step, each.more);
    }
  }
  return written ? Expected<void>() : Expected<void>(written.error());
}

void RunLog::fold(std::string_view kind, std::int64_t step, const Json& more) {
  try {
    history_.add_event(kind, step, more);
  } catch (const Json::exception&) {
    // Another program has written the line; settle_history() names it.
  }
}

void RunLog::event(std::string_view kind, std::int64_t step, const Json& more) {
  if (messages_) messages_(level_of(kind, more), event_text(name(), kind, step, more));
  if (!files_.events) {
    noted_.push_back({std::string(kind), step, more});
    return;
  }
  write_event(kind, step, more);
}

void RunLog::write_event(std::string_view kind, std::int64_t step, const Json& more) {
  files_.events->add(kind, step, more);
  if (files_.metrics) files_.metrics->event(kind, step, more);
  fold(kind, step, more);
}

void RunLog::note_validation(const observe::RunHistory::Validation& outcome) {
  validation_ = outcome;
  Json more = {{"loss", outcome.loss}};
  if (outcome.generation_loss) more["generation_loss"] = *outcome.generation_loss;
  event("validation", outcome.step, more);
}

void RunLog::note_checkpoints(const CheckpointTotals& totals, std::int64_t step) {
  const CheckpointTotals before = recorded_.checkpoints;
  if (totals.written == before.written && totals.failed == before.failed) return;
  recorded_.checkpoints = totals;
  event("saved", step,
        {{"written", totals.written - before.written},
         {"failed", totals.failed - before.failed},
         {"pause_s", totals.pause_s - before.pause_s}});
}

void RunLog::write_events(const runtime::StepReport& report, const runtime::Pipeline& pipeline) {
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
  for (const control::SpeedChange& change : report.speeds) {
    event("speed", report.step,
          {{"rank", change.rank.value},
           {"factor", change.factor},
           {"since", report.step + 1 - change.steps}});
  }
  if (report.skipped) event("skipped", report.step, {{"gradient_norm", report.gradient_norm}});
}

void RunLog::write_record(const runtime::StepReport& report, const GroupRun& group) {
  observe::StepRecord record = record_of(report, group.pipeline());
  record.rank = settings_.rank.value;
  record.tokens = settings_.tokens_per_step;
  record.emulated = settings_.emulated;
  const Bytes sent = group.transport().sent_bytes();
  record.sent_bytes = sent - recorded_.sent;
  recorded_.sent = sent;
  recorded_.memory = record.memory_bytes;
  if (settings_.leads) history_.set_sources(record.sources);
  if (const Checkpointer* checkpoints = group.checkpoints()) {
    const double pause_s = checkpoints->totals().pause_s;
    record.checkpoint_s = pause_s - recorded_.pause_s;
    recorded_.pause_s = pause_s;
  }
  settings_.scale.ranks = group.pipeline().plan().ranks * history_.run().replicas;
  if (files_.metrics) files_.metrics->set_scale(settings_.scale);
  files_.records->write(record);
}

std::vector<Line> RunLog::add(const runtime::StepReport& report, const GroupRun& group,
                              std::int64_t begin_ns) {
  const runtime::Pipeline& pipeline = group.pipeline();
  // (A leader without the folder of the run looks for it before each step.)
  if (settings_.leads && !files_.events) static_cast<void>(take_over_events());
  // The leader has written these before it began this step.
  if (!settings_.leads || files_.events) noted_.clear();
  write_record(report, group);
  write_events(report, pipeline);
  if (settings_.leads) add_to_history(report, pipeline);
  const std::string load_fault = write_load(report, pipeline);
  if (settings_.trace_steps > 0) {
    traces_.push_back(step_trace(report, begin_ns));
    if (std::ssize(traces_) > settings_.trace_steps) traces_.pop_front();
  }
  std::vector<Line> lines;
  for (std::string& line : moves_.add(name(), report, pipeline.plan())) {
    lines.push_back({.text = std::move(line)});
  }
  const auto warn = [&](std::string text) {
    lines.push_back({.text = std::move(text), .level = config::LogLevel::kWarning});
  };
  if (!load_fault.empty()) warn(load_fault);
  if (const auto failure = files_.records->take_failure()) {
    warn(fmt::format("records  {}; training goes on", failure->message));
  }
  if (files_.metrics) {
    if (const auto failure = files_.metrics->take_failure()) {
      warn(fmt::format("metrics  {}; training goes on", *failure));
    }
  }
  if (files_.events) {
    if (const auto failure = files_.events->take_failure()) {
      warn(fmt::format("events   {}; training goes on", *failure));
    }
  }
  if (report.skipped) {
    warn(fmt::format("step {:5}  loss {}, gradient norm {}: no update (train.on_nan = skip)",
                     report.step, std::abs(report.loss), report.gradient_norm));
  }
  for (const control::SpeedChange& change : report.speeds) {
    // (Times are means over the replicas.)
    const bool slow = change.factor > 1;
    lines.push_back(
        {.text = fmt::format(
             "step {:5}  {}{} {} since step {}", report.step,
             history_.run().replicas > 1 ? "one of " : "", pipeline.grid().name_of(change.rank),
             slow ? fmt::format("is slow: its layers take {:.2f} x as long", change.factor)
                  : "is as fast as the others",
             report.step + 1 - change.steps),
         .level = slow ? config::LogLevel::kWarning : config::LogLevel::kInfo});
  }
  return lines;
}

void RunLog::add_to_history(const runtime::StepReport& report, const runtime::Pipeline& pipeline) {
  observe::StepEntry entry{report, report.step, settings_.tokens_per_step};
  if (settings_.keeps == Keeps::kCosts) {
    entry.layers = report.layers;
    entry.plan = pipeline.plan();
  }
  history_.add(std::move(entry),
               observe::RunHistory::ranks_of(pipeline.plan(), history_.run().replicas));
}

std::string RunLog::write_load(const runtime::StepReport& report,
                               const runtime::Pipeline& pipeline) {
  if (!files_.events || settings_.load_trace_every == 0) return "";
  if (!files_.load_trace) {
    const auto parts = observe::load_traces(folder_);
    auto writer = observe::LoadTraceWriter::go_on(
        parts.empty() ? folder_.load_trace(0) : parts.rbegin()->second, settings_.load_trace_every,
        report.step, device_of(settings_.emulated));
    if (!writer) {
      settings_.load_trace_every = 0;
      return fmt::format("load trace  {}; training goes on", writer.error().message);
    }
    files_.load_trace = *std::move(writer);
  }
  files_.load_trace->add(load_trace_step(report, pipeline));
  return "";
}

Expected<void> RunLog::begin_group() {
  traces_.clear();
  moves_ = {};
  recorded_.sent = {};
  recorded_.pause_s = 0;
  recorded_.checkpoints = {};
  if (!closed_) return {};
  files_.load_trace.reset();
  return open_records(observe::RecordWriterOptions::Start::kAppend);
}

Expected<void> RunLog::go_back() {
  files_.load_trace.reset();
  history_.forget_newest();
  whole_ = false;
  return begin_group();
}

std::string RunLog::settle_history(std::int64_t steps) {
  if (whole_) return "";
  auto read = observe::read_history(folder_, history_.run(), steps);
  if (!read) {
    return fmt::format("summary  is of the steps since this rank leads: {}", read.error().message);
  }
  history_ = *std::move(read);
  whole_ = true;
  if (history_.count() == steps) return "";
  return fmt::format("summary  is of {} of {} steps: the others have no record in '{}'",
                     history_.count(), steps, folder_.records().string());
}

void RunLog::add_span(SpanKind kind, std::int64_t begin_ns) {
  if (!traces_.empty()) traces_.back().spans.push_back({kind, begin_ns, now_ns()});
}

RunLog::Closed RunLog::close() {
  Closed closed;
  closed_ = true;
  if (const auto done = files_.records->close(); !done) closed.records = done.error().message;
  if (files_.metrics) files_.metrics->flush();
  if (!files_.load_trace) return closed;
  if (const auto done = files_.load_trace->close(); !done) closed.load_trace = done.error().message;
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
