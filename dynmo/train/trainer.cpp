// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <memory>
#include <optional>
#include <sstream>

#include "dynmo/core/files.h"
#include "dynmo/core/nearest.h"
#include "dynmo/cost/files.h"
#include "dynmo/model/memory.h"
#include "dynmo/observe/record_writer.h"
#include "dynmo/observe/resident_memory.h"
#include "dynmo/observe/step_record.h"
#include "dynmo/observe/table.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/checkpointer.h"
#include "dynmo/train/checkpoints.h"
#include "dynmo/train/comparison.h"
#include "dynmo/train/dry_run.h"
#include "dynmo/train/emulation.h"
#include "dynmo/train/first_plan.h"
#include "dynmo/train/load_trace_writer.h"
#include "dynmo/train/made_model.h"
#include "dynmo/train/pipeline_options.h"
#include "dynmo/train/report.h"
#include "dynmo/train/slow_rank.h"
#include "dynmo/train/token_batches.h"
#include "dynmo/train/traces.h"
#include "dynmo/train/weights.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"
#include "dynmo/transport/traffic.h"

namespace dynmo::train {
namespace {

using runtime::Pipeline;
using transport::Transport;

// Control uses of the trainer; those of the pipelines follow (runtime/pipeline.h).
enum Use { kBarrier, kCheckpoint, kTraces, kTraffic, kSettings };

const std::vector<std::string> kComparable = {"static", "balanced"};

// One training run of this rank: its pipeline and what it leaves behind.
struct Run {
  std::string name;
  std::filesystem::path directory;
  std::unique_ptr<transport::CountingTransport> transport;  // the group's; outlives what uses it
  std::unique_ptr<Pipeline> pipeline;
  std::unique_ptr<observe::RecordWriter> records;
  RunSeries series;  // on every rank alike, but for the times of its own clock
  std::deque<StepTrace> traces;
  SlowRankDetector slow;
  std::unique_ptr<Checkpointer> checkpointer;   // null: no checkpoints
  std::unique_ptr<LoadTraceWriter> load_trace;  // null: none, or not rank 0
  Bytes recorded_bytes;                         // sent, in step records so far
  double recorded_pause_s = 0;                  // of the checkpoints'
};

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// What it takes to say who sent what.
std::vector<observe::TrafficRow> rows_of(const transport::Traffic& traffic) {
  std::vector<observe::TrafficRow> rows;
  for (int from = 0; from < traffic.ranks(); ++from) {
    for (int to = 0; to < traffic.ranks(); ++to) {
      for (const transport::Purpose purpose : transport::kPurposes) {
        const transport::MessageCount& count = traffic.at(Rank(from), Rank(to), purpose);
        if (count.messages == 0) continue;
        rows.push_back({.from = from,
                        .to = to,
                        .purpose = std::string(transport::name(purpose)),
                        .messages = count.messages,
                        .bytes = count.bytes});
      }
    }
  }
  return rows;
}

Expected<void> barrier(Transport& transport) {
  const std::byte nothing{};
  DYNMO_TRY(
      transport::all_gather(transport, transport::control_tag(kBarrier), std::span(&nothing, 1)));
  return {};
}

observe::StepRecord record_of(const Run& run, const runtime::StepReport& report,
                              Transport& transport) {
  observe::StepRecord record;
  record.step = report.step;
  record.rank = transport.rank().value;
  record.generation = run.pipeline->plan().generation;
  for (const plan::PlanStage& stage : run.pipeline->plan().stages) {
    if (stage.rank != run.pipeline->grid().pipeline().rank()) continue;
    if (record.layers == 0) record.first_layer = stage.layers.first.value;
    record.layers += stage.layers.count;
  }
  record.frozen_layers = report.frozen_layers;
  record.loss = report.loss;
  record.gradient_norm = report.gradient_norm;
  record.learning_rate = report.learning_rate;
  record.tokens = run.series.tokens_per_step;
  record.step_s = report.step_s;
  record.predicted_s = report.predicted_s;
  record.busy_s = report.busy_s[transport.rank().index()];
  record.idle_s = std::max(0.0, report.step_s - record.busy_s);
  record.imbalance = report.imbalance;
  record.bubble = report.bubble;
  record.memory_bytes = observe::resident_memory();
  record.reduction_s = report.reduction_s;
  record.profile_s = report.profile_s;
  record.plan_s = report.plan_s;
  record.migrate_s = report.migrate_s;
  record.moved_layers = report.moved_layers;
  record.moved_bytes = report.moved_bytes;
  return record;
}

class Trainer {
 public:
  Trainer(Transport& transport, const TrainOptions& options, const Reporter& reporter,
          TokenBatches batches, MadeModel model)
      : transport_(transport),
        options_(options),
        config_(options.config),
        reporter_(reporter),
        batches_(std::move(batches)),
        grid_(transport, static_cast<int>(config_.pipeline.replicas)),
        model_(std::move(model)),
        tensor_name_(tensor_names(model_)) {}

  Expected<void> run() {
    DYNMO_TRY(start());
    for (std::int64_t step = first_step_; step < config_.train.steps; ++step) {
      for (Run& run : runs_) DYNMO_TRY(advance(run));
      report_progress(step);
    }
    return finish();
  }

 private:
  bool first_rank() const { return transport_.rank() == Rank(0); }
  void say(std::string_view text) const {
    if (first_rank()) reporter_.line(text);
  }

  Pipeline::Batches training() const {
    return [this](std::int64_t step, MicroBatchId id) { return batches_.training(step, id); };
  }

  Expected<void> start() {
    std::vector<std::string> names = options_.compare;
    if (names.empty()) names = {""};
    std::optional<Restored> restored;
    if (options_.resume) {
      DYNMO_ASSIGN(restored, restore(config_));
      for (const std::string& note : restored->notes) say(note);
      say(fmt::format("resume   step {} of {}, from {}", restored->step, config_.train.steps,
                      restored->checkpoint.path.string()));
    }
    // A checkpoint of as many ranks continues with its plan; otherwise layers are measured and cut
    // anew.
    std::optional<FirstPlan> first;
    // (An adaptive order and the layers to recompute are chosen by costs, which a checkpoint does
    // not hold.)
    if (restored && config_.pipeline.recompute != "auto" && restored->plan.ranks == grid_.ranks() &&
        restored->plan.schedule != schedule::ScheduleKind::kAdaptive) {
      first = FirstPlan{.plan = restored->plan, .profiler = {}};
    } else {
      DYNMO_ASSIGN(first, first_plan(transport_, model_, config_, training()));
    }
    first_step_ = restored ? restored->step : 0;
    if (model_.weights && !restored) {
      const std::string& left_out = model_.weights->left_out;
      say(fmt::format("weights  of {}{}{}", model_.weights->origin.string(),
                      left_out.empty() ? "" : "; ", left_out));
      for (const std::string& note : model_.weights->notes) say(note);
    }
    for (std::size_t i = 0; i < names.size(); ++i)
      DYNMO_TRY(add_run(names[i], static_cast<int>(i), *first, restored));
    // A run that cannot be continued with other settings keeps those it had.
    DYNMO_TRY(barrier(transport_));
    if (first_rank()) {
      DYNMO_TRY(write_file_durably(std::filesystem::path(config_.run.directory) / "config.toml",
                                   to_toml(config_)));
    }
    if (emulates(config_)) {
      say(fmt::format(
          "device   EMULATED: layers sleep for the times of {}, hold {:g} of their bytes; "
          "losses are 0",
          config_.emulated.profile.empty() ? config_.emulated.trace : config_.emulated.profile,
          config_.emulated.memory_scale));
    }
    if (uses_cuda(config_)) say(fmt::format("device   {}", model_.device.text));
    if (const auto& again = runs_.front().pipeline->recomputed(); !again.empty()) {
      say(
          fmt::format("memory   {} of {} layers run forward again instead of keeping activations "
                      "(pipeline.recompute = {})",
                      again.size(), model_.layers.size(), config_.pipeline.recompute));
    }
    const std::string ranks =
        grid_.replicas() > 1 ? fmt::format("each of {} x {} ranks", grid_.replicas(), grid_.ranks())
                             : observe::format_count(grid_.ranks(), "rank");
    say(fmt::format("plan     {} on {}, {}: {}",
                    observe::format_count(std::ssize(model_.layers), "layer"), ranks,
                    schedule::name(first->plan.schedule), plan::to_string(first->plan)));
    return {};
  }

  Expected<void> add_run(const std::string& name, int lane, const FirstPlan& first,
                         const std::optional<Restored>& restored) {
    const bool balanced = name.empty() ? config_.balance.enabled : name == "balanced";
    Run run;
    run.name = name.empty() ? "run" : name;
    run.directory = config_.run.directory;
    if (!name.empty()) run.directory /= name;
    runtime::LayerStates states;
    if (restored) {
      DYNMO_ASSIGN(states, load_states(*restored, model_.layers, first.plan,
                                       grid_.pipeline().rank(), tensor_name_));
    } else {
      states = runtime::initial_states(model_.layers, first.plan, grid_.pipeline().rank(),
                                       static_cast<std::uint64_t>(config_.train.seed), model_.ties);
      if (model_.weights) {
        for (auto& [id, state] : states) {
          load_values(*model_.weights, *model_.decoder, state);
          model::round_values(*model_.layers[id.index()], state);
        }
      }
    }
    run.transport = std::make_unique<transport::CountingTransport>(transport_);
    run.pipeline = std::make_unique<Pipeline>(
        *run.transport, model_.layers,
        pipeline_options(config_, model_, lane,
                         balanced ? runtime::Balancing::kAutomatic : runtime::Balancing::kNever),
        first.plan, std::move(states), first_step_);
    if (first.profiler) DYNMO_TRY(run.pipeline->use(*first.profiler));
    run.series.name = run.name;
    run.series.replicas = grid_.replicas();
    run.series.tokens_per_step =
        step_micro_batches(config_) * config_.batch.micro_batch_size * config_.model.sequence;
    DYNMO_TRY(make_directories(run.directory / "records"));
    const auto records =
        run.directory / "records" / fmt::format("rank-{}.jsonl", transport_.rank());
    const auto from = first_step_ > 0 ? observe::RecordWriterOptions::Start::kAppend
                                      : observe::RecordWriterOptions::Start::kEmpty;
    DYNMO_ASSIGN(run.records, observe::RecordWriter::open(records, {.start = from}));
    if (config_.checkpoint.every > 0) {
      // Of two runs in turn, neither is to be disturbed by what the other leaves to a thread.
      const Waiting waiting = options_.compare.empty() ? Waiting::kNever : Waiting::kAlways;
      run.checkpointer =
          std::make_unique<Checkpointer>(*run.transport, transport::control_tag(kCheckpoint),
                                         run.directory, config_, tensor_name_, waiting);
    }
    if (first_rank() && config_.run.load_trace > 0) {
      // A resumed run goes on in a file of its own.
      const std::string file =
          first_step_ > 0 ? fmt::format("load-trace-{:08}.jsonl", first_step_) : "load-trace.jsonl";
      using Device = dynamism::TraceLines::Device;
      DYNMO_ASSIGN(run.load_trace,
                   LoadTraceWriter::open(run.directory / file, config_.run.load_trace,
                                         emulates(config_) ? Device::kEmulated : Device::kReal));
    }
    runs_.push_back(std::move(run));
    return {};
  }

  // One step of one run, with what hangs on it. The barrier charges every run its own time only.
  Expected<void> advance(Run& run) {
    if (runs_.size() > 1) DYNMO_TRY(barrier(transport_));
    const std::int64_t begin_ns = now_ns();
    DYNMO_ASSIGN(const runtime::StepReport report, run.pipeline->step(training()));
    write_record(run, report);
    run.series.add(report, run.pipeline->plan());
    if (run.load_trace) {
      run.load_trace->add(report.step, report.frozen_layers, run.pipeline->profiler());
    }
    if (config_.run.trace_steps > 0) {
      run.traces.push_back(step_trace(report, begin_ns));
      if (std::ssize(run.traces) > config_.run.trace_steps) run.traces.pop_front();
    }
    if (report.skipped) {
      say(fmt::format("step {:5}  loss {}, gradient norm {}: no update (train.on_nan = skip)",
                      report.step, std::abs(report.loss), report.gradient_norm));
    }
    if (report.moved_layers > 0 && runs_.size() == 1) {
      say(fmt::format("step {:5}  moved {} layers, {} in {}: {}  ({})", report.step,
                      report.moved_layers, format_bytes(report.moved_bytes),
                      format_seconds(report.migrate_s), plan::to_string(run.pipeline->plan()),
                      report.decision->reason));
    }
    if (const auto slow = run.slow.add(report.layers, run.pipeline->plan())) {
      // (Times are means over the replicas.)
      say(fmt::format("step {:5}  {}{} is slow: all its layers take {:.1f} x as long as before",
                      report.step, grid_.replicas() > 1 ? "one of " : "", grid_.name_of(slow->rank),
                      slow->factor));
    }
    const std::int64_t done = report.step + 1;
    const bool last = done == config_.train.steps;
    if (config_.train.validation_every > 0 && (done % config_.train.validation_every == 0 || last))
      DYNMO_TRY(traced(run, SpanKind::kValidation, [&] { return validate(run); }));
    if (run.checkpointer) {
      const bool due = done % config_.checkpoint.every == 0 || last;
      if (due || run.checkpointer->active())
        DYNMO_TRY(traced(run, SpanKind::kCheckpoint, [&] { return checkpoint(run, due); }));
    }
    return {};
  }

  // Where in the trace it was.
  template <typename Work>
  Expected<void> traced(Run& run, SpanKind kind, Work work) {
    const std::int64_t begin_ns = now_ns();
    DYNMO_TRY(work());
    if (!run.traces.empty()) run.traces.back().spans.push_back({kind, begin_ns, now_ns()});
    return {};
  }

  Expected<void> checkpoint(Run& run, bool due) {
    DYNMO_TRY(run.checkpointer->poll());
    if (due) DYNMO_TRY(run.checkpointer->start(*run.pipeline));
    for (const std::string& note : run.checkpointer->take_notes()) say(note);
    return {};
  }

  void write_record(Run& run, const runtime::StepReport& report) {
    observe::StepRecord record = record_of(run, report, transport_);
    record.emulated = emulates(config_);
    const Bytes sent = run.transport->sent_bytes();
    record.sent_bytes = sent - run.recorded_bytes;
    run.recorded_bytes = sent;
    if (run.checkpointer) {
      const double pause_s = run.checkpointer->totals().pause_s;
      record.checkpoint_s = pause_s - run.recorded_pause_s;
      run.recorded_pause_s = pause_s;
    }
    run.records->write(record);
  }

  Expected<void> validate(Run& run) {
    double sum = 0;
    for (std::int64_t i = 0; i < config_.train.validation_steps; ++i) {
      DYNMO_ASSIGN(const double loss, run.pipeline->validate([&](std::int64_t, MicroBatchId id) {
        return batches_.validation(i, id);
      }));
      sum += loss;
    }
    run.series.validation.emplace_back(run.pipeline->next_step(),
                                       sum / static_cast<double>(config_.train.validation_steps));
    return {};
  }

  void report_progress(std::int64_t step) const {
    if (!first_rank()) return;
    std::vector<const RunSeries*> series;
    for (const Run& run : runs_) series.push_back(&run.series);
    const Run& newest = runs_.back();
    reporter_.progress(progress_line(step, config_.train.steps, series, newest.pipeline->plan()) +
                       (emulates(config_) ? "  EMULATED" : ""));
  }

  Expected<void> finish() {
    for (Run& run : runs_) {
      DYNMO_TRY(finish_checkpoints(run));
      DYNMO_TRY(run.records->close());
      DYNMO_ASSIGN(const transport::Traffic traffic,
                   transport::gather_traffic(transport_, transport::control_tag(kTraffic),
                                             run.transport->sent()));
      run.series.traffic = rows_of(traffic);
      if (run.load_trace) {
        if (const auto closed = run.load_trace->close(); !closed) say(closed.error().message);
      }
      DYNMO_TRY(write_trace(transport_, transport::control_tag(kTraces), run.traces,
                            grid_.replicas(), emulates(config_) ? "emulated" : "measured",
                            run.directory / "trace.json"));
      if (!first_rank()) continue;
      const auto costs = run.pipeline->costs();
      if (!costs) continue;
      Json profile = cost::profile_json(*costs);
      if (emulates(config_)) profile["emulated"] = true;
      DYNMO_TRY(write_file_durably(run.directory / "profile.json", profile.dump(2) + "\n"));
    }
    if (first_rank()) DYNMO_TRY(report());
    for (const Run& run : runs_) {
      if (!run.checkpointer || !run.checkpointer->failure()) continue;
      return make_error(ErrorCode::kNoCheckpoint,
                        "the run is done, but its last checkpoint could not be written: {}",
                        run.checkpointer->failure()->message);
    }
    return {};
  }

  Expected<void> finish_checkpoints(Run& run) {
    if (!run.checkpointer) return {};
    DYNMO_TRY(traced(run, SpanKind::kCheckpoint, [&] { return run.checkpointer->finish(); }));
    for (const std::string& note : run.checkpointer->take_notes()) say(note);
    const CheckpointTotals& totals = run.checkpointer->totals();
    run.series.checkpoints_written = totals.written;
    run.series.checkpoints_failed = totals.failed;
    run.series.checkpoint_s = totals.pause_s;
    return {};
  }

  Expected<void> report() const {
    std::vector<const RunSeries*> series;
    for (const Run& run : runs_) series.push_back(&run.series);
    DYNMO_ASSIGN(const Report report, make_report(series, runs_.back().pipeline->profiler().known(),
                                                  config_, grid_.ranks()));
    // A finished run that is resumed has no steps to tell: what it said at its end stays.
    const std::filesystem::path path =
        std::filesystem::path(config_.run.directory) / "summary.json";
    std::error_code fault;
    if (!runs_.back().series.steps.empty() || !std::filesystem::exists(path, fault)) {
      DYNMO_TRY(write_file_durably(path, report.summary.dump(2) + "\n"));
    }
    for (const std::string& line : report.lines) reporter_.line(line);
    return {};
  }

  Transport& transport_;
  const TrainOptions& options_;
  const Config& config_;
  const Reporter& reporter_;
  TokenBatches batches_;
  runtime::Grid grid_;
  MadeModel model_;
  TensorName tensor_name_;
  std::int64_t first_step_ = 0;
  std::vector<Run> runs_;
};

Expected<void> check_names(const std::vector<std::string>& names) {
  for (auto name = names.begin(); name != names.end(); ++name) {
    if (std::find(kComparable.begin(), kComparable.end(), *name) == kComparable.end()) {
      return make_error(ErrorCode::kBadInput, "--compare '{}' is not a known run{}", *name,
                        suggestion(*name, kComparable));
    }
    // Each has a folder of its name.
    if (std::find(names.begin(), name, *name) == name) continue;
    return make_error(ErrorCode::kBadInput, "--compare names '{}' twice: wanted each run once",
                      *name);
  }
  return {};
}

// Its checkpoints would be taken for the new run's: the newest to keep, to resume and to generate
// with.
Expected<void> check_folder_is_free(const TrainOptions& options) {
  if (options.resume || options.config.checkpoint.every == 0) return {};
  std::vector<std::string> runs = options.compare;
  if (runs.empty()) runs = {""};
  for (const std::string& run : runs) {
    const std::filesystem::path folder =
        std::filesystem::path(options.config.run.directory) / run / kCheckpointFolder;
    DYNMO_ASSIGN(const auto found, checkpoint::list_checkpoints(folder));
    if (found.empty()) continue;
    return make_error(
        ErrorCode::kBadInput,
        "'{}' holds {} checkpoints of an earlier run: wanted --resume to continue it, "
        "another --out, or that folder removed",
        folder.string(), found.size());
  }
  return {};
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Ranks that a launcher or a person started may have been given different commands: they would wait
// for each other, or train different models together. Where data and run lie may differ by host.
Expected<void> check_same_settings(Transport& transport, const TrainOptions& options,
                                   std::int64_t vocabulary) {
  Config config = options.config;
  config.data.path = config.run.directory = "";
  std::string mine = to_toml(config);
  mine += fmt::format("--resume = {}\n--compare = {}\nvocabulary of the data = {}\n",
                      options.resume, fmt::join(options.compare, ","), vocabulary);
  DYNMO_ASSIGN(const auto all,
               transport::gather_texts(transport, transport::control_tag(kSettings), mine));
  const std::vector<std::string> wanted = lines_of(all.front());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    const std::vector<std::string> given = lines_of(all[rank]);
    const auto [there, here] =
        std::mismatch(wanted.begin(), wanted.end(), given.begin(), given.end());
    return make_error(ErrorCode::kBadInput,
                      "rank {} was started with '{}', rank 0 with '{}': start all ranks with the "
                      "same command",
                      rank, here == given.end() ? "" : *here, there == wanted.end() ? "" : *there);
  }
  return {};
}

}  // namespace

Expected<void> check_inputs(const TrainOptions& options, int ranks) {
  DYNMO_TRY(validate(options.config));
  DYNMO_TRY(check_names(options.compare));
  if (options.resume && !options.compare.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "--resume with --compare: wanted one of them; a comparison starts at step 0");
  }
  const auto batches = TokenBatches::open(options.config);
  if (!batches && options.resume) {
    return make_error(
        batches.error().code,
        "{}; --resume goes on with the data of the run, whose settings are in '{}'",
        batches.error().message,
        (std::filesystem::path(options.config.run.directory) / "config.toml").string());
  }
  if (!batches) return batches.error();
  DYNMO_ASSIGN(const MadeModel model, make_model(options, batches->vocabulary()));
  DYNMO_TRY(check_cut(options.config, ranks, static_cast<int>(model.layers.size())));
  if (options.resume) DYNMO_TRY(restore(options.config));
  return check_folder_is_free(options);
}

Expected<void> check_host_memory(const TrainOptions& options) {
  DYNMO_ASSIGN(const TokenBatches batches, TokenBatches::open(options.config));
  DYNMO_ASSIGN(const MadeModel model, make_model(options, batches.vocabulary()));
  Bytes states;
  for (const auto& layer : model.layers) {
    // Values, gradients, two moments, and copies where it computes in bf16.
    states += model::parameter_bytes(*layer) * 4 + model::copy_bytes(*layer);
  }
  const std::int64_t replicas = options.config.pipeline.replicas;
  const Bytes host = observe::host_memory();
  if (host == Bytes{0} || states <= Bytes{host.value / replicas}) return {};
  return make_error(ErrorCode::kBadInput,
                    "the model's parameters with gradients and moments take {}{}, this host has "
                    "{}: wanted a smaller model (model.hidden, model.blocks), or ranks on more "
                    "hosts (docs/clusters.md)",
                    format_bytes(states),
                    replicas > 1 ? fmt::format(" in each of {} replicas", replicas) : "",
                    format_bytes(host));
}

Expected<void> train(Transport& transport, const TrainOptions& options, const Reporter& reporter) {
  DYNMO_TRY(validate(options.config));
  DYNMO_TRY(pipeline_ranks(options.config, transport.size()));
  DYNMO_ASSIGN(TokenBatches batches, TokenBatches::open(options.config));
  DYNMO_ASSIGN(MadeModel model, make_model(options, batches.vocabulary()));
  const std::filesystem::path directory = options.config.run.directory;
  DYNMO_TRY(check_same_settings(transport, options, batches.vocabulary()));
  DYNMO_TRY(check_folder_is_free(options));
  DYNMO_TRY(make_directories(directory));
  return Trainer(transport, options, reporter, std::move(batches), std::move(model)).run();
}

Expected<std::string> dry_run(const TrainOptions& options, int ranks) {
  if (options.resume) {
    return make_error(ErrorCode::kBadInput,
                      "--resume with --dry-run: wanted one of them; a dry run starts at step 0");
  }
  DYNMO_TRY(check_inputs(options, ranks));
  DYNMO_ASSIGN(const TokenBatches batches, TokenBatches::open(options.config));
  DYNMO_ASSIGN(const MadeModel model, make_model(options, batches.vocabulary()));
  return describe(
      {.config = options.config,
       .layers = model.layers,
       .pipeline = pipeline_options(options.config, model, 0, runtime::Balancing::kNever),
       .batches = [&](std::int64_t step, MicroBatchId id) { return batches.training(step, id); },
       .vocabulary = batches.vocabulary(),
       .ranks = ranks});
}

}  // namespace dynmo::train
