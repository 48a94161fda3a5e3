// SPDX-License-Identifier: Apache-2.0
// Metrics for TensorBoard and Prometheus. tests/peers/metrics_check.py reads them with the readers
// of those two.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <limits>
#include <map>
#include <protozero/pbf_reader.hpp>
#include <set>

#include "dynmo/core/files.h"
#include "dynmo/observe/metrics/event_file.h"
#include "dynmo/observe/metrics/metrics_log.h"
#include "tests/support/temp_folder.h"

namespace dynmo::observe {
namespace {

// Every number is known, and unlike the others.
StepRecord known_record(std::int64_t step) {
  StepRecord record;
  int next = 1;
  for (const StepFact& fact : kStepFacts) {
    std::visit(
        [&](auto member) {
          using Value = std::remove_reference_t<decltype(record.*member)>;
          record.*member = Value(next++);
        },
        fact.field);
  }
  record.step = step;
  record.tokens = 4096;
  record.layers = 3;
  record.emulated = true;
  record.sources = {{"pruning", {{"kept", 0.25}}}};
  return record;
}

std::map<std::string, double> by_tag(const std::vector<Metric>& metrics) {
  std::map<std::string, double> values;
  for (const Metric& metric : metrics) {
    EXPECT_TRUE(values.emplace(metric.tag, metric.value).second) << metric.tag << " is there twice";
  }
  return values;
}

TEST(Metrics, HaveEveryFieldOfARecordOnce) {
  const StepRecord record = known_record(9);
  std::vector<Metric> all = metrics_of(record, MetricOf::kRun, {.ranks = 2});
  const auto of_run = by_tag(all);
  for (Metric& metric : metrics_of(record, MetricOf::kRank, {.ranks = 2}))
    all.push_back(std::move(metric));
  const auto values = by_tag(all);
  std::set<std::string> names;
  for (const Metric& metric : all) {
    EXPECT_TRUE(names.insert(metric.name).second) << metric.name << " is there twice";
    EXPECT_EQ(metric.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_"), std::string::npos)
        << metric.name;
  }
  const Json json = record_json(record);
  for (const auto& [key, value] : json.items()) {
    if (key == "format" || key == "step" || key == "rank" || key == "sources") continue;
    std::string tag = "dynmo/" + key;
    for (const StepFact& fact : kStepFacts) {
      if (fact.name == key && !fact.tag.empty()) tag = fact.tag;
    }
    ASSERT_TRUE(values.contains(tag)) << tag;
    const double wanted = value.is_boolean() ? 1 : value.get<double>();
    EXPECT_EQ(values.at(tag), wanted) << tag;
  }
  EXPECT_EQ(values.at("dynmo/pruning/kept"), 0.25);
  EXPECT_EQ(values.at("loss_metrics/global_avg_loss"), record.loss);
  EXPECT_EQ(values.at("ntokens_seen"), 40960);
  EXPECT_EQ(values.at("throughput(tps)"), 4096 / record.step_s / 2);
  EXPECT_TRUE(of_run.contains("dynmo/imbalance"));
  EXPECT_FALSE(of_run.contains("dynmo/busy_s"));
}

TEST(Metrics, OmitWhatARankDoesNotKnow) {
  StepRecord record = known_record(0);
  record.loss = std::numeric_limits<double>::quiet_NaN();
  record.step_s = 0;
  const auto values = by_tag(metrics_of(record, MetricOf::kRun, {.ranks = 1}));
  EXPECT_FALSE(values.contains("loss_metrics/global_avg_loss"));
  EXPECT_FALSE(values.contains("throughput(tps)"));
}

TEST(Metrics, ModelFlopsAreThoseOfAllRanksInTheTimeOfAStep) {
  StepRecord record = known_record(0);
  record.step_s = 0.5;
  RunScale scale{.ranks = 4, .step_flops = 8e12, .peak_flops = 1e13};
  auto values = by_tag(metrics_of(record, MetricOf::kRun, scale));
  EXPECT_DOUBLE_EQ(values.at("tflops"), 4);
  EXPECT_DOUBLE_EQ(values.at("mfu(%)"), 40);
  scale.peak_flops = 0;  // not given
  values = by_tag(metrics_of(record, MetricOf::kRun, scale));
  EXPECT_DOUBLE_EQ(values.at("tflops"), 4);
  EXPECT_FALSE(values.contains("mfu(%)"));
  scale.step_flops = 0;  // of emulated layers
  EXPECT_FALSE(by_tag(metrics_of(record, MetricOf::kRun, scale)).contains("tflops"));
  EXPECT_FALSE(by_tag(metrics_of(record, MetricOf::kRank, scale)).contains("tflops"));
}

TEST(Metrics, ChecksumsAreThoseOfTheStandard) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43U);
}

std::uint32_t masked(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U;
}

struct ReadEvent {
  std::int64_t step = 0;
  std::string version;
  bool starts = false;
  std::map<std::string, float> scalars;
  std::map<std::string, std::string> texts;
};

void read_value(protozero::pbf_reader value, ReadEvent& event) {
  std::string tag;
  while (value.next()) {
    if (value.tag() == 1) {
      tag = value.get_string();
    } else if (value.tag() == 2) {
      event.scalars[tag] = value.get_float();
    } else if (value.tag() == 8) {
      protozero::pbf_reader tensor = value.get_message();
      while (tensor.next(8)) event.texts[tag] = tensor.get_string();
    } else {
      value.skip();
    }
  }
}

// Reads the events of the only file of a folder, and checks lengths and checksums.
std::vector<ReadEvent> events_of(const std::filesystem::path& folder) {
  std::vector<ReadEvent> events;
  std::string bytes;
  for (const auto& each : std::filesystem::directory_iterator(folder)) {
    if (each.is_regular_file()) bytes = read_file(each.path()).value();
  }
  const auto number = [&]<typename Number>(std::size_t at, Number value) {
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
  };
  for (std::size_t at = 0; at < bytes.size();) {
    const auto size = number(at, std::uint64_t{});
    EXPECT_EQ(number(at + 8, std::uint32_t{}), masked(std::string_view(bytes).substr(at, 8)));
    const std::string data = bytes.substr(at + 12, size);
    EXPECT_EQ(number(at + 12 + size, std::uint32_t{}), masked(data));
    at += 16 + size;
    ReadEvent& event = events.emplace_back();
    protozero::pbf_reader reader(data);
    while (reader.next()) {
      if (reader.tag() == 2) {
        event.step = reader.get_int64();
      } else if (reader.tag() == 3) {
        event.version = reader.get_string();
      } else if (reader.tag() == 5) {
        protozero::pbf_reader summary = reader.get_message();
        while (summary.next(1)) read_value(summary.get_message(), event);
      } else if (reader.tag() == 7) {
        event.starts = true;
        reader.skip();
      } else {
        reader.skip();
      }
    }
  }
  return events;
}

TEST(MetricsLog, StepsThatAreRepeatedReplaceTheOlderOnes) {
  const TempFolder temp;
  const RunFolder folder(temp.path());
  MetricsLog log(folder, WorldRank(0), {.tensorboard = true});
  log.set_scale({.ranks = 4});
  for (const int step : {3, 4, 5}) log.add(known_record(step));
  log.event("recovery", 4, {{"ranks", {0, 1}}});
  for (const int step : {4, 5}) log.add(known_record(step));
  log.event("validation", 6, {{"loss", 2.5}});

  const std::vector<ReadEvent> run = events_of(folder.tensorboard());
  std::vector<std::string> story;
  for (const ReadEvent& event : run) {
    story.push_back(fmt::format("{}{}{}{}{}", event.step, event.version.empty() ? "" : " version",
                                event.starts ? " starts" : "",
                                event.scalars.contains("dynmo/bubble") ? " step" : "",
                                event.texts.empty() ? "" : " text"));
  }
  EXPECT_EQ(story,
            (std::vector<std::string>{"0 version", "3 starts", "3 step", "4 step", "5 step",
                                      "4 starts", "4 text", "4 step", "5 step", "6", "6 text"}));
  EXPECT_EQ(run.front().version, "brain.Event:2");
  EXPECT_EQ(run[2].scalars.at("dynmo/ranks"), 4);
  EXPECT_EQ(run[9].scalars.at("validation_metrics/loss"), 2.5F);
  EXPECT_EQ(run[6].texts.at("dynmo/events"), R"(**recovery** `{"ranks":[0,1]}`)");

  int starts = 0;
  for (const ReadEvent& event : events_of(folder.tensorboard_of(WorldRank(0)))) {
    starts += event.starts ? 1 : 0;
    EXPECT_FALSE(event.scalars.contains("dynmo/bubble"));
  }
  EXPECT_EQ(starts, 2);
}

TEST(MetricsLog, OtherRanksThanTheLeaderWriteTheirOwnNumbersAlone) {
  const TempFolder temp;
  const RunFolder folder(temp.path());
  MetricsLog log(folder, WorldRank(2), {.tensorboard = true, .prometheus = true});
  log.add(known_record(0));
  log.event("validation", 1, {{"loss", 2.5}});
  log.flush();
  EXPECT_EQ(events_of(folder.tensorboard_of(WorldRank(2))).size(), 3U);
  int files = 0;
  for (const auto& each : std::filesystem::directory_iterator(folder.tensorboard())) {
    files += each.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 0);
  const std::string text = read_file(folder.prometheus_of(WorldRank(2))).value();
  EXPECT_EQ(text.find("dynmo_bubble"), std::string::npos);
  EXPECT_NE(text.find(fmt::format("dynmo_busy_seconds{{run=\"{}\",rank=\"2\"}} 4\n",
                                  temp.path().string())),
            std::string::npos)
      << text;
}

TEST(MetricsLog, TheFileForPrometheusHasTheNewestStepWhole) {
  const TempFolder temp;
  const RunFolder folder(temp.path());
  MetricsLog log(folder, WorldRank(0), {.prometheus = true});
  log.event("validation", 1, {{"loss", 2.5}});
  log.event("validation", 2, {{"loss", 2.25}});
  for (int step = 0; step < 3; ++step) log.add(known_record(step));
  log.flush();
  const std::string text = read_file(folder.prometheus_of(WorldRank(0))).value();
  const std::string labels = fmt::format("{{run=\"{}\"}}", temp.path().string());
  EXPECT_NE(text.find("dynmo_step" + labels + " 2\n"), std::string::npos) << text;
  EXPECT_NE(text.find("dynmo_validation_loss" + labels + " 2.25\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("2.5\n"), std::string::npos) << text;
  EXPECT_FALSE(log.take_failure());
}

TEST(MetricsLog, AnEventThatIsNotUtf8IsWritten) {
  const TempFolder temp;
  const RunFolder folder(temp.path());
  MetricsLog log(folder, WorldRank(0), {.tensorboard = true});
  log.event("loss", 3, {{"why", "\xFF"}});
  EXPECT_EQ(events_of(folder.tensorboard()).back().texts.at("dynmo/events"),
            "**loss** `{\"why\":\"\xEF\xBF\xBD\"}`");
}

TEST(MetricsLog, LabelsAreEscaped) {
  EXPECT_EQ(prometheus_labels(std::vector<PrometheusLabel>{{"run", "a\"b\\c\nd"}, {"rank", "1"}}),
            R"({run="a\"b\\c\nd",rank="1"})");
  EXPECT_EQ(prometheus_labels({}), "");
}

// A limit of the file's size stands for a disk that is full for a while.
TEST(MetricsLog, AFullDiskOmitsWholeStepsAndIsSaidOnce) {
  const TempFolder temp;
  const RunFolder folder(temp.path());
  MetricsLog log(folder, WorldRank(0), {.tensorboard = true});
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit unlimited{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  rlimit full = unlimited;
  full.rlim_cur = 2000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  for (int step = 0; step < 20; ++step) log.add(known_record(step));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &unlimited), 0);
  std::signal(SIGXFSZ, before);
  log.add(known_record(20));
  const auto failure = log.take_failure();
  ASSERT_TRUE(failure);
  EXPECT_NE(failure->find("File too large"), std::string::npos) << *failure;
  EXPECT_FALSE(log.take_failure());
  const std::vector<ReadEvent> events = events_of(folder.tensorboard_of(WorldRank(0)));
  EXPECT_LT(events.size(), 20U);
  EXPECT_EQ(events.back().step, 20);
}

TEST(MetricsLog, AFolderThatCannotBeMadeEndsNothing) {
  const TempFolder temp;
  const RunFolder folder(temp.path() / "file");
  ASSERT_TRUE(write_file_durably(temp.path() / "file", "x"));
  MetricsLog log(folder, WorldRank(0), {.tensorboard = true, .prometheus = true});
  log.add(known_record(0));
  log.event("validation", 1, {{"loss", 2.5}});
  log.flush();
  EXPECT_TRUE(log.take_failure());
}

}  // namespace
}  // namespace dynmo::observe
