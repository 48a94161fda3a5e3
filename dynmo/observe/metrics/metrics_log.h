// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes the metrics of one rank while it trains: RUN/tensorboard, RUN/metrics (docs/formats.md).
// Every rank writes its own numbers, the leader also those of the run and its events. The leader
// can serve them to Prometheus, too. A full or slow disk or a port in use does not end the run:
// what cannot be written or served is omitted.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/observe/metrics/endpoint.h"
#include "dynmo/observe/metrics/event_file.h"
#include "dynmo/observe/metrics/prometheus.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/step_record.h"

namespace dynmo::observe {

// Writes the metrics of a rank to its outputs. Any thread may call any function. One thread at a
// time waits for the disk.
class MetricsLog {
 public:
  struct Outputs {
    bool tensorboard = false;
    bool prometheus = false;
    std::uint16_t port = 0;  // of the leader's endpoint on 127.0.0.1; 0: none
  };
  // Rank 0 leads from the start.
  MetricsLog(RunFolder folder, WorldRank rank, Outputs outputs);
  // Makes this rank write the run's numbers and events from now on.
  void lead();
  void set_scale(const RunScale& scale);
  // Adds the record of a step.
  void add(const StepRecord& record);
  // Adds an event of the run, as the event log has it, if this rank leads.
  void event(std::string_view kind, std::int64_t step, const Json& more);
  // Writes the newest step to the file for Prometheus.
  void flush();
  // Returns why a metric could not be written, on the first call after the first failure, else
  // nullopt.
  [[nodiscard]] std::optional<std::string> take_failure();

 private:
  struct Points {
    std::optional<EventFile> file;
    std::int64_t newest = 0;  // step
  };
  // The newest numbers, as the file for Prometheus and the endpoint show them.
  struct Newest {
    std::vector<MetricGroup> groups;
    std::vector<Metric> of_events;  // the newest value of each metric
    std::chrono::steady_clock::time_point written;
    bool unwritten = false;  // the file is older
  };
  struct Failure {
    std::optional<std::string> first;
    bool told = false;
  };
  // Opens the endpoint if a port is given. This function and those below it require the lock.
  void serve();
  [[nodiscard]] std::vector<MetricGroup> newest_groups() const;
  void note(const Expected<void>& done);
  // Returns the points of TensorBoard to which a step is added next, or nullptr if there are none.
  [[nodiscard]] Points* points_of(MetricOf of, std::int64_t step);
  void write_prometheus();

  const RunFolder folder_;
  const WorldRank rank_;
  const Outputs outputs_;
  std::mutex mutex_;  // guards all below
  bool leads_;
  RunScale scale_;
  Points of_rank_;
  Points of_run_;
  Newest newest_;
  Failure failure_;
  std::unique_ptr<MetricsEndpoint> endpoint_;  // null: none
};

// Returns a log for these outputs, or nullptr if there are none.
[[nodiscard]] std::unique_ptr<MetricsLog> make_metrics_log(const RunFolder& folder, WorldRank rank,
                                                           MetricsLog::Outputs outputs);
// Returns a function that adds records to `log` (RecordWriterOptions::also), or an empty one.
[[nodiscard]] std::function<void(const StepRecord&)> record_sink(MetricsLog* log);

}  // namespace dynmo::observe
