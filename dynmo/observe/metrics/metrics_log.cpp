// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/metrics/metrics_log.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

#include "dynmo/core/files.h"

namespace dynmo::observe {
namespace {

// Readers of the file for Prometheus ask every few seconds.
constexpr std::chrono::seconds kPrometheusInterval(1);

// Returns the metrics of an event. Most events have none.
std::vector<Metric> metrics_of_event(std::string_view kind, const Json& more) {
  if (kind == "validation" && more.is_object() && more.contains("loss") &&
      more["loss"].is_number()) {
    return {{"validation_metrics/loss", "dynmo_validation_loss", more["loss"].get<double>()}};
  }
  return {};
}

// Replaces a file at once, so that no reader sees half of it. (It need not outlive a crash.)
Expected<void> replace_file(const std::filesystem::path& path, const std::string& text) {
  const std::filesystem::path partial = path.string() + ".partial";
  std::ofstream file(partial, std::ios::trunc);
  file << text << std::flush;
  std::error_code fault;
  if (file) std::filesystem::rename(partial, path, fault);
  if (file && !fault) return {};
  return make_error(ErrorCode::kBadInput, "cannot write '{}': {}", path.string(),
                    fault ? fault.message() : std::strerror(errno));
}

}  // namespace

MetricsLog::MetricsLog(RunFolder folder, WorldRank rank, Outputs outputs)
    : folder_(std::move(folder)), rank_(rank), outputs_(outputs), leads_(rank == WorldRank(0)) {
  if (leads_) serve();
}

void MetricsLog::lead() {
  const std::scoped_lock lock(mutex_);
  if (std::exchange(leads_, true)) return;
  serve();
}

void MetricsLog::serve() {
  if (outputs_.port == 0) return;
  auto opened = MetricsEndpoint::open(outputs_.port);
  if (opened) {
    endpoint_ = *std::move(opened);
  } else {
    note(opened.error());
  }
}

void MetricsLog::set_scale(const RunScale& scale) {
  const std::scoped_lock lock(mutex_);
  scale_ = scale;
}

void MetricsLog::add(const StepRecord& record) {
  const std::scoped_lock lock(mutex_);
  newest_.groups.clear();
  for (const MetricOf of : {MetricOf::kRun, MetricOf::kRank}) {
    if (of == MetricOf::kRun && !leads_) continue;
    std::vector<PrometheusLabel> labels{{"run", folder_.root().string()}};
    if (of == MetricOf::kRank) labels.push_back({"rank", fmt::format("{}", rank_)});
    newest_.groups.push_back({prometheus_labels(labels), metrics_of(record, of, scale_)});
    Points* points = points_of(of, record.step);
    if (points == nullptr) continue;
    if (record.step <= points->newest) note(points->file->drop_from(record.step));
    points->newest = record.step;
    note(points->file->add(record.step, newest_.groups.back().metrics));
  }
  MetricGroup& group = newest_.groups.front();
  group.metrics.push_back(
      {"", leads_ ? "dynmo_step" : "dynmo_rank_step", static_cast<double>(record.step)});
  newest_.unwritten = true;
  if (endpoint_) {
    endpoint_->set(newest_groups());
    if (const auto why = endpoint_->take_failure()) note(Error{ErrorCode::kBadInput, *why});
  }
  if (std::chrono::steady_clock::now() - newest_.written >= kPrometheusInterval) write_prometheus();
}

void MetricsLog::event(std::string_view kind, std::int64_t step, const Json& more) {
  const std::scoped_lock lock(mutex_);
  if (!leads_) return;
  const std::vector<Metric> metrics = metrics_of_event(kind, more);
  for (const Metric& metric : metrics) {
    std::erase_if(newest_.of_events, [&](const Metric& old) { return old.name == metric.name; });
    newest_.of_events.push_back(metric);
  }
  Points* points = points_of(MetricOf::kRun, step);
  if (points == nullptr) return;
  if (kind == "recovery" && step <= points->newest) {
    note(points->file->drop_from(step));
    points->newest = step - 1;
  }
  if (!metrics.empty()) note(points->file->add(step, metrics));
  // A reason may name a path that is not UTF-8.
  const std::string text =
      more.is_object() ? more.dump(-1, ' ', false, Json::error_handler_t::replace) : "{}";
  note(points->file->add_text(step, "dynmo/events", fmt::format("**{}** `{}`", kind, text)));
}

void MetricsLog::flush() {
  const std::scoped_lock lock(mutex_);
  if (newest_.unwritten) write_prometheus();
}

std::optional<std::string> MetricsLog::take_failure() {
  const std::scoped_lock lock(mutex_);
  if (!failure_.first || std::exchange(failure_.told, true)) return std::nullopt;
  return failure_.first;
}

void MetricsLog::note(const Expected<void>& done) {
  if (!done && !failure_.first) failure_.first = done.error().message;
}

MetricsLog::Points* MetricsLog::points_of(MetricOf of, std::int64_t step) {
  if (!outputs_.tensorboard) return nullptr;
  Points& points = of == MetricOf::kRun ? of_run_ : of_rank_;
  if (points.file) return &points;
  const auto folder = of == MetricOf::kRun ? folder_.tensorboard() : folder_.tensorboard_of(rank_);
  if (const auto made = make_directories(folder); !made) {
    note(made);
    return nullptr;
  }
  auto opened = EventFile::create(folder);
  if (!opened) {
    note(opened.error());
    return nullptr;
  }
  points = {.file = *std::move(opened), .newest = step - 1};
  note(points.file->drop_from(step));
  return &points;
}

std::vector<MetricGroup> MetricsLog::newest_groups() const {
  std::vector<MetricGroup> groups = newest_.groups;
  if (leads_ && !groups.empty()) {
    auto& of_run = groups.front().metrics;
    of_run.insert(of_run.end(), newest_.of_events.begin(), newest_.of_events.end());
  }
  return groups;
}

void MetricsLog::write_prometheus() {
  newest_.unwritten = false;
  newest_.written = std::chrono::steady_clock::now();
  if (!outputs_.prometheus) return;
  const auto path = folder_.prometheus_of(rank_);
  if (const auto made = make_directories(path.parent_path()); !made) return note(made);
  note(replace_file(path, prometheus_text(newest_groups())));
}

std::unique_ptr<MetricsLog> make_metrics_log(const RunFolder& folder, WorldRank rank,
                                             MetricsLog::Outputs outputs) {
  if (!outputs.tensorboard && !outputs.prometheus && outputs.port == 0) return nullptr;
  return std::make_unique<MetricsLog>(folder, rank, outputs);
}

std::function<void(const StepRecord&)> record_sink(MetricsLog* log) {
  if (log == nullptr) return {};
  return [log](const StepRecord& record) { log->add(record); };
}

}  // namespace dynmo::observe
