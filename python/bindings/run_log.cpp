// SPDX-License-Identifier: Apache-2.0
// The files that a run leaves in its folder, written by the same code as that of `dynmo train`.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/cost/files.h"
#include "dynmo/observe/cut_lines.h"
#include "dynmo/observe/event_log.h"
#include "dynmo/observe/load_trace_writer.h"
#include "dynmo/observe/metrics/metrics_log.h"
#include "dynmo/observe/record_writer.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/run_history.h"
#include "dynmo/observe/run_summary.h"
#include "dynmo/observe/summary.h"
#include "dynmo/observe/trace.h"
#include "dynmo/process/file_lock.h"
#include "dynmo/process/host_memory.h"
#include "dynmo/schedule/text.h"
#include "python/bindings/decisions.h"
#include "python/bindings/errors.h"
#include "python/bindings/json_python.h"
#include "python/bindings/parts.h"

namespace dynmo::python {
namespace nb = nanobind;
namespace {

// The files of one rank. The leader (rank 0 at first) also has the events and the load trace. One
// thread uses it.
class RunLog {
 public:
  // Makes the folder, which rank 0 locks for this run. Writes nothing about steps until begin().
  static Expected<std::unique_ptr<RunLog>> open(const std::string& path, int rank, int replicas,
                                                const observe::RunScale& scale,
                                                const std::vector<std::string>& metrics,
                                                std::int64_t port) {
    if (replicas < 1 || scale.ranks < replicas) {
      return make_error(
          ErrorCode::kBadInput,
          "ranks={}, replicas={}, wanted a rank or more for each of 1 replica or more", scale.ranks,
          replicas);
    }
    auto log = std::unique_ptr<RunLog>(
        new RunLog(path, WorldRank(rank), {.name = "dynmo.torch", .replicas = replicas}));
    log->ranks_ = scale.ranks / replicas;
    log->scale_ = scale;
    DYNMO_TRY(log->open_metrics(metrics, port));
    DYNMO_TRY(make_directories(log->folder_.records()));
    if (rank != 0) return log;
    auto lock = process::FileLock::take(log->folder_.lock());
    if (!lock) {
      return make_error(lock.error().code, "run='{}': {}; wanted another folder", path,
                        lock.error().message);
    }
    log->leader_.lock.emplace(*std::move(lock));
    return log;
  }

  // Opens the files before step `first_step`, which runs with `plan`. An earlier run's files keep
  // their content before that step. Returns kBadInput if there are such files and the step is 0.
  Expected<void> begin(std::int64_t first_step, const Json& plan, int accumulation) {
    DYNMO_ASSIGN(const plan::Plan first, plan::parse_plan(plan, "plan"));
    using Records = observe::RecordWriterOptions;
    const bool appends = first_step > 0;
    const bool leads = rank_ == WorldRank(0);
    if (appends) {
      DYNMO_TRY(observe::cut_lines(folder_.records_of(rank_), first_step));
      if (leads) DYNMO_TRY(cut_other_ranks(first_step));
    } else {
      DYNMO_TRY(check_empty(folder_.records_of(rank_)));
      if (leads) DYNMO_TRY(check_empty(folder_.events()));
    }
    first_step_ = first_step;
    whole_ = !appends;
    DYNMO_TRY(open_records(appends ? Records::Start::kAppend : Records::Start::kEmpty));
    if (!leads) return {};
    DYNMO_ASSIGN(leader_.events, Events::open(folder_.events(), appends ? Events::Start::kAppend
                                                                        : Events::Start::kEmpty));
    observe::remove_load_traces_after(folder_, first_step);
    DYNMO_ASSIGN(leader_.load_trace,
                 observe::LoadTraceWriter::open(folder_.load_trace(first_step), 1));
    // Nothing was measured earlier.
    leader_.load_trace->start(
        {.plan = first, .measured_under = first, .measured = {}, .accumulation = accumulation});
    return {};
  }

  // Goes back to `step`, for example after a loss. Removes this rank's records from there on. The
  // leader, which may have changed, also cuts the records of lost ranks and the load trace.
  Expected<void> go_on(std::int64_t step, bool leads, const std::vector<int>& lost, int ranks) {
    static_cast<void>(records_->close());  // what it lacks is in failures()
    if (const auto failure = records_->take_failure()) omitted_.push_back(failure->message);
    DYNMO_TRY(observe::cut_lines(folder_.records_of(rank_), step));
    DYNMO_TRY(open_records(observe::RecordWriterOptions::Start::kAppend));
    whole_ = false;
    moved_ = {};
    scale_.ranks = ranks;
    if (metrics_) metrics_->set_scale(scale_);
    if (!leads && !leader_.events) return {};
    for (const int rank : lost) {
      DYNMO_TRY(observe::cut_lines(folder_.records_of(WorldRank(rank)), step));
    }
    if (!leader_.events) {
      if (metrics_) metrics_->lead();
      DYNMO_ASSIGN(leader_.events, Events::open(folder_.events(), Events::Start::kAppend));
    }
    leader_.load_trace.reset();
    DYNMO_ASSIGN(leader_.load_trace,
                 observe::LoadTraceWriter::go_on(folder_.load_trace(first_step_), 1, step));
    return {};
  }
  void event(const std::string& kind, std::int64_t step, const Json& more) {
    if (leader_.events) leader_.events->add(kind, step, more);
    if (metrics_) metrics_->event(kind, step, more);
  }
  void decision(std::int64_t step, const Decisions& decisions) {
    event("decision", step, decisions.newest());
  }
  Expected<void> moved(std::int64_t step, int layers, std::int64_t bytes, double seconds,
                       const Json& plan) {
    DYNMO_ASSIGN(const plan::Plan next, plan::parse_plan(plan, "plan"));
    event("move", step, observe::move_event(layers, Bytes{bytes}, seconds, next));
    moved_.moved_layers += layers;
    moved_.moved_bytes += Bytes{bytes};
    return {};
  }
  Expected<void> record(const Json& json) {
    DYNMO_ASSIGN(observe::StepRecord record, observe::parse_record(json, "record"));
    if (record.memory_bytes == Bytes{0}) record.memory_bytes = process::resident_memory();
    observe::add_facts(record, std::exchange(moved_, {}), observe::OverSteps::kSum);
    if (leader_.events && whole_ && record.rank == rank_.value) {
      history_.add({static_cast<const observe::StepFacts&>(record), record.step, record.tokens},
                   {});
    }
    records_->write(record);
    return {};
  }
  // Sets the FLOPs of a step's products, summed over the replicas.
  void set_step_flops(double flops) {
    scale_.step_flops = flops;
    if (metrics_) metrics_->set_scale(scale_);
  }
  void load(std::int64_t step, int frozen_layers, const Decisions& decisions) {
    if (!leader_.load_trace) return;
    const control::Decisions& told = decisions.decisions();
    leader_.load_trace->add({.step = step,
                             .frozen_layers = frozen_layers,
                             .announced = told.announced(),
                             .profiler = told.profiler(),
                             .observed = told.observed()});
  }
  // Writes the summary of the first `steps` steps and the costs of the layers. Writes nothing if no
  // step was measured. No record may follow.
  Expected<void> finish(std::int64_t steps, const Json& profile) {
    if (!leader_.events) return {};
    DYNMO_ASSIGN(const cost::ModelCost costs, cost::parse_profile(profile, "profile"));
    if (!whole_) {
      static_cast<void>(records_->close());  // what it lacks is in failures()
      auto read = observe::read_history(folder_, history_.run(), steps);
      if (!read) {
        omitted_.push_back(fmt::format("no summary of the run: {}", read.error().message));
        return {};
      }
      history_ = *std::move(read);
    }
    if (history_.seconds() <= 0) return {};
    Json summary = observe::summary_json(observe::summarize({&history_}, ranks_));
    for (const char* unknown : kUnknown) summary["runs"][0].erase(unknown);
    DYNMO_TRY(write_file_durably(folder_.profile(), cost::profile_json(costs).dump(2) + "\n"));
    return write_file_durably(folder_.summary(), summary.dump(2) + "\n");
  }
  // Returns what could not be written, once for each file. Training goes on.
  std::vector<std::string> failures() {
    std::vector<std::string> lines = std::exchange(omitted_, {});
    if (records_) {
      if (const auto failure = records_->take_failure()) lines.push_back(failure->message);
    }
    if (metrics_) {
      if (const auto failure = metrics_->take_failure()) lines.push_back(*failure);
    }
    if (!leader_.events) return lines;
    if (const auto failure = leader_.events->take_failure()) lines.push_back(*failure);
    return lines;
  }
  Expected<void> close() {
    const auto records = records_ ? records_->close() : Expected<void>();
    if (metrics_) metrics_->flush();
    if (leader_.load_trace) DYNMO_TRY(leader_.load_trace->close());
    leader_.events.reset();
    leader_.lock.reset();
    return records;
  }

 private:
  using Events = observe::EventLog;

  // Fields of a summary that only `dynmo train` knows.
  static constexpr std::array kUnknown = {"validation_step", "validation_loss",
                                          "checkpoints_written", "checkpoints_failed",
                                          "checkpoint_s"};

  // The files that the leader alone has.
  struct Leader {
    std::optional<process::FileLock> lock;
    std::optional<observe::EventLog> events;
    std::unique_ptr<observe::LoadTraceWriter> load_trace;
  };

  RunLog(const std::string& path, WorldRank rank, observe::RunHistory::Run run)
      : folder_(path), rank_(rank), history_(std::move(run)) {}

  [[nodiscard]] Expected<void> check_empty(const std::filesystem::path& file) const {
    std::error_code none;
    const auto size = std::filesystem::file_size(file, none);
    if (none || size == 0) return {};
    return make_error(ErrorCode::kBadInput,
                      "run='{}' holds an earlier run ('{}'): wanted another folder, or load() of a "
                      "checkpoint before the first step, which continues it",
                      folder_.root().string(), file.string());
  }
  // Removes the records of an earlier run's ranks that are not in this one.
  [[nodiscard]] Expected<void> cut_other_ranks(std::int64_t step) const {
    for (WorldRank rank(scale_.ranks); std::filesystem::exists(folder_.records_of(rank));
         rank = WorldRank(rank.value + 1)) {
      DYNMO_TRY(observe::cut_lines(folder_.records_of(rank), step));
    }
    return {};
  }

  Expected<void> open_records(observe::RecordWriterOptions::Start start) {
    DYNMO_ASSIGN(records_, observe::RecordWriter::open(
                               folder_.records_of(rank_),
                               {.start = start, .also = observe::record_sink(metrics_.get())}));
    return {};
  }
  Expected<void> open_metrics(const std::vector<std::string>& names, std::int64_t port) {
    if (port < 0 || port > 65535) {
      return make_error(ErrorCode::kBadInput, "metrics_port={}, wanted 1 to 65535, or 0", port);
    }
    if (!(scale_.peak_flops >= 0 && scale_.peak_flops <= 1e18)) {
      return make_error(ErrorCode::kBadInput, "peak_flops={}, wanted 0 to 1e18 FLOP/s",
                        scale_.peak_flops);
    }
    observe::MetricsLog::Outputs outputs;
    outputs.port = static_cast<std::uint16_t>(port);
    for (const std::string& name : names) {
      bool* output = name == "tensorboard"  ? &outputs.tensorboard
                     : name == "prometheus" ? &outputs.prometheus
                                            : nullptr;
      if (output == nullptr) {
        return make_error(ErrorCode::kBadInput,
                          "metrics has '{}', wanted \"tensorboard\" or \"prometheus\"", name);
      }
      *output = true;
    }
    metrics_ = observe::make_metrics_log(folder_, rank_, outputs);
    if (metrics_) metrics_->set_scale(scale_);
    return {};
  }

  observe::RunFolder folder_;
  WorldRank rank_;
  std::int64_t first_step_ = 0;
  int ranks_ = 1;      // of a replica, at the start
  bool whole_ = true;  // The history has all steps. Else finish() reads them.
  observe::RunHistory history_;
  observe::StepFacts moved_;          // moved_layers and moved_bytes since the newest record
  std::vector<std::string> omitted_;  // why records are missing, of before the newest loss
  observe::RunScale scale_;
  std::unique_ptr<observe::MetricsLog> metrics_;  // outlives records_, which fills it; null: none
  std::unique_ptr<observe::RecordWriter> records_;
  Leader leader_;
};

// An action in the notation of Schedule.rows, and its start and end in nanoseconds since the start
// of the step.
using Row = std::tuple<std::string, std::int64_t, std::int64_t>;

// Returns a trace of one process. `steps` has each step's number and the rows of every rank.
std::string trace(
    const std::string& name,
    const std::vector<std::tuple<std::int64_t, std::vector<std::vector<Row>>>>& steps) {
  observe::TraceProcess process{.name = name, .steps = {}};
  for (const auto& [number, ranks] : steps) {
    observe::TracedStep& step = process.steps.emplace_back();
    step.step = number;
    for (const std::vector<Row>& rows : ranks) {
      auto& timed = step.timeline.ranks.emplace_back();
      for (const auto& [action, start, end] : rows) {
        timed.push_back({.action = value_or_raise(schedule::parse_action(action)),
                         .start = Nanoseconds{start},
                         .end = Nanoseconds{end}});
      }
    }
  }
  const nb::gil_scoped_release release;
  return observe::trace_json({&process, 1});
}

}  // namespace

void bind_run_log(nb::module_& module) {
  nb::class_<RunLog>(module, "RunLog", "The files of a rank in the folder of a run.")
      .def(nb::new_([](const std::string& folder, int rank, int ranks, int replicas,
                       const std::vector<std::string>& metrics, std::int64_t metrics_port,
                       double peak_flops) {
             return value_or_raise(RunLog::open(folder, rank, replicas,
                                                {.ranks = ranks, .peak_flops = peak_flops}, metrics,
                                                metrics_port));
           }),
           nb::arg("folder"), nb::arg("rank"), nb::arg("ranks") = 1, nb::arg("replicas") = 1,
           nb::arg("metrics") = std::vector<std::string>(), nb::arg("metrics_port") = 0,
           nb::arg("peak_flops") = 0.0)
      .def("set_step_flops", &RunLog::set_step_flops, nb::arg("flops"))
      .def(
          "begin",
          [](RunLog& self, std::int64_t first_step, const nb::dict& plan, int accumulation) {
            raise_if_error(self.begin(first_step, to_json(plan), accumulation));
          },
          nb::arg("first_step"), nb::arg("plan"), nb::arg("accumulation") = 1,
          nb::sig("def begin(self, first_step: int, plan: dict[str, typing.Any], accumulation: int "
                  "= 1) -> None"))
      .def(
          "event",
          [](RunLog& self, const std::string& kind, std::int64_t step, const nb::object& more) {
            self.event(kind, step, to_json(more));
          },
          nb::arg("kind"), nb::arg("step"), nb::arg("more") = nb::none(),
          nb::sig(
              "def event(self, kind: str, step: int, more: dict[str, typing.Any] | None = None) "
              "-> None"))
      .def(
          "record",
          [](RunLog& self, const nb::dict& record) {
            raise_if_error(self.record(to_json(record)));
          },
          nb::arg("record"), nb::sig("def record(self, record: dict[str, typing.Any]) -> None"))
      .def("decision", &RunLog::decision, nb::arg("step"), nb::arg("decisions"))
      .def(
          "moved",
          [](RunLog& self, std::int64_t step, int layers, std::int64_t bytes, double seconds,
             const nb::dict& plan) {
            raise_if_error(self.moved(step, layers, bytes, seconds, to_json(plan)));
          },
          nb::arg("step"), nb::arg("layers"), nb::arg("bytes"), nb::arg("seconds"), nb::arg("plan"),
          nb::sig("def moved(self, step: int, layers: int, bytes: int, seconds: float, plan: "
                  "dict[str, typing.Any]) -> None"))
      .def(
          "finish",
          [](RunLog& self, std::int64_t steps, const nb::dict& profile) {
            raise_if_error(self.finish(steps, to_json(profile)));
          },
          nb::arg("steps"), nb::arg("profile"),
          nb::sig("def finish(self, steps: int, profile: dict[str, typing.Any]) -> None"))
      .def("load", &RunLog::load, nb::arg("step"), nb::arg("frozen_layers"), nb::arg("decisions"))
      .def(
          "go_on",
          [](RunLog& self, std::int64_t step, bool leads, const std::vector<int>& lost, int ranks) {
            raise_if_error(self.go_on(step, leads, lost, ranks));
          },
          nb::arg("step"), nb::arg("leads"), nb::arg("lost"), nb::arg("ranks"))
      .def("failures", &RunLog::failures)
      .def("close", [](RunLog& self) { raise_if_error(self.close()); });
  module.def("trace", trace, nb::arg("name"), nb::arg("steps"));
}

}  // namespace dynmo::python
