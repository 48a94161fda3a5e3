// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <optional>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/core/nearest.h"
#include "dynmo/cost/files.h"
#include "dynmo/model/llama.h"
#include "dynmo/observe/record_writer.h"
#include "dynmo/observe/resident_memory.h"
#include "dynmo/observe/step_record.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/propose.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/checkpoints.h"
#include "dynmo/train/comparison.h"
#include "dynmo/train/dry_run.h"
#include "dynmo/train/emulation.h"
#include "dynmo/train/report.h"
#include "dynmo/train/slow_rank.h"
#include "dynmo/train/token_batches.h"
#include "dynmo/train/traces.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

using runtime::Pipeline;
using transport::Transport;

// Control uses of the trainer; those of the pipelines follow (runtime/pipeline.h).
enum Use { kBarrier, kCheckpoint, kTraces };

const std::vector<std::string> kComparable = {"static", "balanced"};

// One training run of this rank: its pipeline and what it leaves behind.
struct Run {
  std::string name;
  std::filesystem::path directory;
  std::unique_ptr<Pipeline> pipeline;
  std::unique_ptr<observe::RecordWriter> records;
  RunSeries series;  // on every rank alike, but for the times of its own clock
  std::deque<StepTrace> traces;
  SlowRankDetector slow;
};

Expected<void> barrier(Transport& transport) {
  const std::byte nothing{};
  DYNMO_TRY(
      transport::all_gather(transport, transport::control_tag(kBarrier), std::span(&nothing, 1)));
  return {};
}

// The layers of a run and the shape of what passes between them.
struct MadeModel {
  model::Model layers;
  std::vector<std::int64_t> boundary_shape;
};

Expected<MadeModel> make_model(const TrainOptions& options, std::int64_t vocabulary) {
  const Config& c = options.config;
  if (emulates(c)) {
    DYNMO_ASSIGN(EmulatedModel emulated, emulated_model(c));
    return MadeModel{std::move(emulated.layers), std::move(emulated.boundary_shape)};
  }
  MadeModel made{.layers = {},
                 .boundary_shape = {c.batch.micro_batch_size, c.model.sequence, c.model.hidden}};
  if (options.make_model) {
    DYNMO_ASSIGN(made.layers, options.make_model(c, vocabulary));
    return made;
  }
  const model::LlamaConfig config = llama_config(c, vocabulary);
  DYNMO_TRY(model::validate(config));
  made.layers = model::make_llama(config);
  return made;
}

// Hugging Face's names for the decoder of the config, the layer's own for a model of the user's.
TensorName tensor_names(const TrainOptions& options, const model::Model& model,
                        std::int64_t vocabulary) {
  if (!options.make_model && !emulates(options.config)) {
    return [config = llama_config(options.config, vocabulary)](LayerId layer,
                                                               std::string_view parameter) {
      return model::checkpoint_name(config, layer, parameter);
    };
  }
  return [model](LayerId layer, std::string_view parameter) {
    return fmt::format("{}.{}", model[layer.index()]->name(), parameter);
  };
}

runtime::PipelineOptions pipeline_options(const Config& c,
                                          const std::vector<std::int64_t>& boundary_shape, int lane,
                                          runtime::Balancing balancing) {
  runtime::PipelineOptions options;
  options.seed = static_cast<std::uint64_t>(c.train.seed);
  options.steps = c.train.steps;
  options.micro_batches = static_cast<int>(c.batch.micro_batches);
  options.boundary_shape = boundary_shape;
  options.optimizer.beta1 = c.optimizer.beta1;
  options.optimizer.beta2 = c.optimizer.beta2;
  options.optimizer.epsilon = c.optimizer.epsilon;
  options.optimizer.weight_decay = c.optimizer.weight_decay;
  options.learning_rate.peak = c.optimizer.learning_rate;
  options.learning_rate.minimum = c.optimizer.minimum_learning_rate;
  options.learning_rate.warmup_steps = c.optimizer.warmup_steps;
  options.learning_rate.total_steps = c.train.steps;
  options.learning_rate.decay = model::parse_decay(c.optimizer.decay).value();
  options.learning_rate.decay_share = c.optimizer.decay_share;
  options.clip_norm = c.optimizer.clip_norm;
  options.on_nan = c.train.on_nan == "skip" ? runtime::OnNan::kSkip : runtime::OnNan::kStop;
  if (c.freezing.enabled) {
    options.freezing = dynamism::FreezingSchedule{.start = c.freezing.start,
                                                  .end = c.freezing.end,
                                                  .fraction = c.freezing.fraction,
                                                  .every = c.freezing.every};
  }
  options.balancing = balancing;
  options.policy.balancer = plan::parse_balancer(c.balance.balancer).value();
  options.policy.minimum_gain = c.balance.minimum_gain;
  options.policy.noise_factor = c.balance.noise_factor;
  // A search finds the schedule, too.
  if (options.policy.balancer == plan::Balancer::kSearch || c.pipeline.schedule == "auto") {
    options.policy.propose.schedules = plan::ScheduleChoice::kBest;
  }
  options.profile_window = static_cast<int>(c.balance.window);
  options.lane = lane;
  return options;
}

Expected<void> check_cut(const Config& config, int ranks, int layers) {
  if (ranks > layers) {
    return make_error(
        ErrorCode::kBadInput,
        "{} ranks for {} layers: wanted at least one layer a rank; use -n {} or more model.blocks",
        ranks, layers, layers);
  }
  const auto& cut = config.pipeline.cut;
  if (cut.empty()) return {};
  std::int64_t sum = 0;
  bool positive = true;
  for (const std::int64_t count : cut) {
    positive = positive && count >= 1;
    sum += count;
  }
  if (static_cast<int>(cut.size()) != ranks || !positive || sum != layers) {
    return make_error(
        ErrorCode::kBadInput,
        "pipeline.cut has {} parts of {} layers in all, wanted {} parts of at least one "
        "layer, {} in all",
        cut.size(), sum, ranks, layers);
  }
  return {};
}

// The first plan and, unless it was given, the costs it follows from: measured with an even cut and
// no update.
struct FirstPlan {
  plan::Plan plan;
  std::optional<runtime::Profiler> profiler;
};

Expected<FirstPlan> first_plan(Transport& transport, const MadeModel& made, const Config& config,
                               const Pipeline::Batches& batches) {
  const int layers = static_cast<int>(made.layers.size());
  DYNMO_TRY(check_cut(config, transport.size(), layers));
  // Costs are measured under 1F1B: they do not depend on the schedule, which may want more stages.
  const bool given = !config.pipeline.cut.empty();
  std::vector<int> cut(config.pipeline.cut.begin(), config.pipeline.cut.end());
  const cost::Cluster cluster = cost::equal_ranks(transport.size());
  const int micro_batches = static_cast<int>(config.batch.micro_batches);
  if (!given) {
    const cost::ModelCost even{std::vector<cost::LayerCost>(made.layers.size())};
    DYNMO_ASSIGN(
        cut, plan::balance(plan::Balancer::kUniform,
                           {.model = even, .cluster = cluster, .micro_batches = micro_batches}));
  }
  FirstPlan first{.plan = plan::make_plan(cut, schedule::ScheduleKind::k1F1B), .profiler = {}};
  runtime::PipelineOptions options =
      pipeline_options(config, made.boundary_shape, 0, runtime::Balancing::kNever);
  options.freezing.reset();
  const auto seed = static_cast<std::uint64_t>(config.train.seed);
  Pipeline measuring(transport, made.layers, options, first.plan,
                     runtime::initial_states(made.layers, first.plan, transport.rank(), seed));
  DYNMO_TRY(measuring.measure(batches, static_cast<int>(config.pipeline.measure_steps)));
  first.profiler = measuring.profiler();
  DYNMO_ASSIGN(first.plan, first_plan_of(config, *measuring.costs(), transport.size()));
  return first;
}

observe::StepRecord record_of(const Run& run, const runtime::StepReport& report,
                              Transport& transport) {
  observe::StepRecord record;
  record.step = report.step;
  record.rank = transport.rank().value;
  record.generation = run.pipeline->plan().generation;
  for (const plan::PlanStage& stage : run.pipeline->plan().stages) {
    if (stage.rank != transport.rank()) continue;
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
        model_(std::move(model)),
        tensor_name_(tensor_names(options, model_.layers, batches_.vocabulary())) {}

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
    // (An adaptive order is made for costs, which a checkpoint does not hold.)
    if (restored && restored->plan.ranks == transport_.size() &&
        restored->plan.schedule != schedule::ScheduleKind::kAdaptive) {
      first = FirstPlan{.plan = restored->plan, .profiler = {}};
    } else {
      DYNMO_ASSIGN(first, first_plan(transport_, model_, config_, training()));
    }
    first_step_ = restored ? restored->step : 0;
    for (std::size_t i = 0; i < names.size(); ++i)
      DYNMO_TRY(add_run(names[i], static_cast<int>(i), *first, restored));
    if (emulates(config_)) {
      say(fmt::format(
          "device   EMULATED: layers sleep for the times of {}, hold {:g} of their bytes; "
          "losses are 0",
          config_.emulated.profile.empty() ? config_.emulated.trace : config_.emulated.profile,
          config_.emulated.memory_scale));
    }
    say(fmt::format("plan     {} layers on {} ranks, {}: {}", model_.layers.size(),
                    transport_.size(), schedule::name(first->plan.schedule),
                    plan::to_string(first->plan)));
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
      DYNMO_ASSIGN(states, load_states(*restored, model_.layers, first.plan, transport_.rank(),
                                       tensor_name_));
    } else {
      states = runtime::initial_states(model_.layers, first.plan, transport_.rank(),
                                       static_cast<std::uint64_t>(config_.train.seed));
    }
    run.pipeline = std::make_unique<Pipeline>(
        transport_, model_.layers,
        pipeline_options(config_, model_.boundary_shape, lane,
                         balanced ? runtime::Balancing::kAutomatic : runtime::Balancing::kNever),
        first.plan, std::move(states), first_step_);
    if (first.profiler) run.pipeline->use(*first.profiler);
    run.series.name = run.name;
    run.series.tokens_per_step =
        config_.batch.micro_batches * config_.batch.micro_batch_size * config_.model.sequence;
    DYNMO_TRY(make_directories(run.directory / "records"));
    const auto records =
        run.directory / "records" / fmt::format("rank-{}.jsonl", transport_.rank());
    const auto from = first_step_ > 0 ? observe::RecordWriterOptions::Start::kAppend
                                      : observe::RecordWriterOptions::Start::kEmpty;
    DYNMO_ASSIGN(run.records, observe::RecordWriter::open(records, {.start = from}));
    runs_.push_back(std::move(run));
    return {};
  }

  // One step of one run, with what hangs on it. The barrier charges every run its own time only.
  Expected<void> advance(Run& run) {
    if (runs_.size() > 1) DYNMO_TRY(barrier(transport_));
    DYNMO_ASSIGN(runtime::StepReport report, run.pipeline->step(training()));
    run.records->write(record_of(run, report, transport_));
    run.series.add(report, run.pipeline->plan());
    if (config_.run.trace_steps > 0) {
      run.traces.push_back({report.step, report.start_ns, std::move(report.actions)});
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
      say(fmt::format("step {:5}  rank {} is slow: all its layers take {:.1f} x as long as before",
                      report.step, slow->rank, slow->factor));
    }
    const std::int64_t done = report.step + 1;
    const bool last = done == config_.train.steps;
    if (config_.train.validation_every > 0 && (done % config_.train.validation_every == 0 || last))
      DYNMO_TRY(validate(run));
    if (config_.checkpoint.every > 0 && (done % config_.checkpoint.every == 0 || last)) {
      DYNMO_TRY(save(transport_, transport::control_tag(kCheckpoint), *run.pipeline, run.directory,
                     config_, tensor_name_));
    }
    return {};
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
    reporter_.progress(progress_line(step, config_.train.steps, series, newest.pipeline->plan()));
  }

  Expected<void> finish() {
    for (Run& run : runs_) {
      DYNMO_TRY(run.records->close());
      DYNMO_TRY(write_trace(transport_, transport::control_tag(kTraces), run.traces,
                            run.directory / "trace.json"));
      if (!first_rank()) continue;
      const auto costs = run.pipeline->costs();
      if (costs)
        DYNMO_TRY(write_file_durably(run.directory / "profile.json",
                                     cost::profile_json(*costs).dump(2) + "\n"));
    }
    if (!first_rank()) return {};
    std::vector<const RunSeries*> series;
    for (const Run& run : runs_) series.push_back(&run.series);
    DYNMO_ASSIGN(const Report report, make_report(series, runs_.back().pipeline->profiler().known(),
                                                  config_, transport_.size()));
    DYNMO_TRY(write_file_durably(std::filesystem::path(config_.run.directory) / "summary.json",
                                 report.summary.dump(2) + "\n"));
    for (const std::string& line : report.lines) reporter_.line(line);
    return {};
  }

  Transport& transport_;
  const TrainOptions& options_;
  const Config& config_;
  const Reporter& reporter_;
  TokenBatches batches_;
  MadeModel model_;
  TensorName tensor_name_;
  std::int64_t first_step_ = 0;
  std::vector<Run> runs_;
};

Expected<void> check_names(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (std::find(kComparable.begin(), kComparable.end(), name) != kComparable.end()) continue;
    return make_error(ErrorCode::kBadInput, "--compare '{}' is not a known run{}", name,
                      suggestion(name, kComparable));
  }
  return {};
}

}  // namespace

model::LlamaConfig llama_config(const Config& config, std::int64_t vocabulary) {
  const Config::Model& m = config.model;
  model::LlamaConfig llama;
  llama.vocabulary = vocabulary;
  llama.hidden = m.hidden;
  llama.blocks = m.blocks;
  llama.heads = m.heads;
  llama.kv_heads = m.kv_heads;
  llama.intermediate = m.intermediate;
  llama.sequence = m.sequence;
  llama.dropout = m.dropout;
  llama.rope_theta = m.rope_theta;
  return llama;
}

Expected<void> check_inputs(const TrainOptions& options, int ranks) {
  DYNMO_TRY(validate(options.config));
  DYNMO_TRY(check_names(options.compare));
  if (options.resume && !options.compare.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "--resume with --compare: wanted one of them; a comparison starts at step 0");
  }
  DYNMO_ASSIGN(const TokenBatches batches, TokenBatches::open(options.config));
  DYNMO_ASSIGN(const MadeModel model, make_model(options, batches.vocabulary()));
  DYNMO_TRY(check_cut(options.config, ranks, static_cast<int>(model.layers.size())));
  if (options.resume) DYNMO_TRY(restore(options.config));
  return {};
}

Expected<void> train(Transport& transport, const TrainOptions& options, const Reporter& reporter) {
  DYNMO_TRY(validate(options.config));
  DYNMO_ASSIGN(TokenBatches batches, TokenBatches::open(options.config));
  DYNMO_ASSIGN(MadeModel model, make_model(options, batches.vocabulary()));
  const std::filesystem::path directory = options.config.run.directory;
  DYNMO_TRY(make_directories(directory));
  if (transport.rank() == Rank(0))
    DYNMO_TRY(write_file_durably(directory / "config.toml", to_toml(options.config)));
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
       .pipeline =
           pipeline_options(options.config, model.boundary_shape, 0, runtime::Balancing::kNever),
       .batches = [&](std::int64_t step, MicroBatchId id) { return batches.training(step, id); },
       .vocabulary = batches.vocabulary(),
       .ranks = ranks});
}

}  // namespace dynmo::train
