// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/run_series.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "dynmo/plan/pack.h"

namespace dynmo::train {

RunSeries::RunSeries(std::string run_name, Kept kept) : name(std::move(run_name)), kept_(kept) {}

void RunSeries::add(const runtime::StepReport& report, const plan::Plan& plan) {
  StepEntry entry{report, report.step};
  newest_.push_back(entry);
  if (newest_.size() > kMaxNewest) newest_.pop_front();
  losses_ = digest_of(
      fmt::format("{} {:016x}", losses_.hex(), std::bit_cast<std::uint64_t>(report.loss)));
  const int ranks = plan.ranks * replicas;
  const int at_work = static_cast<int>(plan::ranks_at_work(plan).size()) * replicas;
  if (count_ == 0) first_ranks = ranks;
  working_rank_s += at_work * report.step_s;
  idle_rank_s += (ranks - at_work) * report.step_s;
  saved_rank_s += std::max(0, first_ranks - ranks) * report.step_s;
  seconds_ += report.step_s;
  observe::add_facts(sums, report, observe::OverSteps::kSum);
  if (report.moved_layers > 0) {
    ++moves_;
    if (first_move_ < 0) first_move_ = report.step;
  }
  if (kept_ == Kept::kCosts) {
    entry.layers = report.layers;
    entry.plan = plan;
  }
  if (count_ % stride_ == 0) add_to_sample(std::move(entry));
  ++count_;
}

void RunSeries::add_traffic(const transport::Traffic& group, const std::vector<int>& numbers) {
  const auto number = [&](int rank) {
    return numbers.empty() ? rank : numbers[static_cast<std::size_t>(rank)];
  };
  for (int from = 0; from < group.ranks(); ++from) {
    for (int to = 0; to < group.ranks(); ++to) {
      for (const Purpose purpose : kPurposes) {
        const MessageCount& count = group.at(WorldRank(from), WorldRank(to), purpose);
        if (count.messages == 0) continue;
        const observe::TrafficRow row{.from = number(from),
                                      .to = number(to),
                                      .purpose = std::string(dynmo::name(purpose)),
                                      .messages = count.messages,
                                      .bytes = count.bytes};
        const auto same = std::find_if(traffic.begin(), traffic.end(), [&](const auto& other) {
          return other.from == row.from && other.to == row.to && other.purpose == row.purpose;
        });
        if (same == traffic.end()) {
          traffic.push_back(row);
        } else {
          same->messages += row.messages;
          same->bytes += row.bytes;
        }
      }
    }
  }
}

void RunSeries::add_to_sample(StepEntry entry) {
  if (sample_.size() == kMaxSample) {
    for (std::size_t i = 0; 2 * i < sample_.size(); ++i) sample_[i] = std::move(sample_[2 * i]);
    sample_.resize(kMaxSample / 2);
    stride_ *= 2;
  }
  // (Where the stride has just doubled, this step is still a multiple of it.)
  sample_.push_back(std::move(entry));
}

namespace {

Json json_of(const StepEntry& entry) {
  return Json::array({entry.step, observe::fact_values(entry)});
}

StepEntry entry_of(const Json& json) {
  return {observe::parse_fact_values(json.at(1)), json.at(0).get<std::int64_t>()};
}

}  // namespace

Json RunSeries::to_json() const {
  Json json = {
      {"stride", stride_},
      {"count", count_},
      {"seconds", seconds_},
      {"moves", moves_},
      {"first_move", first_move_},
      {"losses", losses_.hex()},
      {"sums", observe::fact_values(sums)},
      {"times", {working_rank_s, idle_rank_s, saved_rank_s, changing_rank_s}},
      {"counts",
       {checkpoints_written, checkpoints_failed, size_changes, first_ranks, members, losses}},
      {"repeated_steps", repeated_steps},
      {"validation", validation},
      {"generation_loss", generation_loss ? Json(*generation_loss) : Json()},
      {"sources", sources},
      {"sample", Json::array()},
      {"newest", Json::array()},
      {"traffic", Json::array()}};
  for (const StepEntry& entry : sample_) json["sample"].push_back(json_of(entry));
  for (const StepEntry& entry : newest_) json["newest"].push_back(json_of(entry));
  for (const observe::TrafficRow& row : traffic) {
    json["traffic"].push_back({row.from, row.to, row.purpose, row.messages, row.bytes.value});
  }
  return json;
}

Expected<void> RunSeries::restore(const Json& json) {
  try {
    const auto digest = parse_digest(json.at("losses").get<std::string>());
    if (!digest) {
      return make_error(ErrorCode::kInternal, "the digest of the losses of another rank is none");
    }
    losses_ = *digest;
    json.at("stride").get_to(stride_);
    json.at("count").get_to(count_);
    json.at("seconds").get_to(seconds_);
    json.at("moves").get_to(moves_);
    json.at("first_move").get_to(first_move_);
    sums = observe::parse_fact_values(json.at("sums"));
    const Json& times = json.at("times");
    std::size_t at = 0;
    for (double* time : {&working_rank_s, &idle_rank_s, &saved_rank_s, &changing_rank_s}) {
      times.at(at++).get_to(*time);
    }
    const Json& counts = json.at("counts");
    at = 0;
    for (int* count : {&checkpoints_written, &checkpoints_failed, &size_changes, &first_ranks,
                       &members, &losses}) {
      counts.at(at++).get_to(*count);
    }
    json.at("repeated_steps").get_to(repeated_steps);
    validation.clear();
    for (const Json& one : json.at("validation")) {
      const Json& loss = one.at(1);  // JSON has no NaN
      validation.emplace_back(one.at(0).get<std::int64_t>(),
                              loss.is_null() ? std::nan("") : loss.get<double>());
    }
    generation_loss.reset();
    if (const Json& loss = json.at("generation_loss"); !loss.is_null()) {
      generation_loss = loss.get<double>();
    }
    sources = json.at("sources");
    sample_.clear();
    for (const Json& entry : json.at("sample")) sample_.push_back(entry_of(entry));
    newest_.clear();
    for (const Json& entry : json.at("newest")) newest_.push_back(entry_of(entry));
    traffic.clear();
    for (const Json& row : json.at("traffic")) {
      traffic.push_back({.from = row.at(0).get<int>(),
                         .to = row.at(1).get<int>(),
                         .purpose = row.at(2).get<std::string>(),
                         .messages = row.at(3).get<std::int64_t>(),
                         .bytes = Bytes(row.at(4).get<std::int64_t>())});
    }
  } catch (const Json::exception& fault) {
    return make_error(ErrorCode::kInternal, "what another rank knows of the run: {}", fault.what());
  }
  return {};
}

observe::StepFacts RunSeries::over_steps() const {
  observe::StepFacts facts = sums;
  for (const StepEntry& step : sample_) {
    observe::add_facts(facts, step, observe::OverSteps::kMean);
  }
  observe::make_means(facts, sample_.size());
  return facts;
}

double RunSeries::tokens_per_s() const {
  if (seconds_ <= 0) return 0;
  return static_cast<double>(tokens_per_step) * static_cast<double>(count_) / seconds_;
}

}  // namespace dynmo::train
