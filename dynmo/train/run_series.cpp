// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/run_series.h"

#include <algorithm>
#include <span>

#include "dynmo/plan/pack.h"

namespace dynmo::train {

RunSeries::RunSeries(std::string run_name, Kept kept)
    : name(std::move(run_name)), kept_(kept), losses_(std::make_unique<Digester>()) {}

void RunSeries::add(const runtime::StepReport& report, const plan::Plan& plan) {
  StepEntry entry{.step = report.step,
                  .loss = report.loss,
                  .step_s = report.step_s,
                  .balancing_s = report.profile_s + report.plan_s + report.migrate_s,
                  .predicted_s = report.predicted_s,
                  .imbalance = report.imbalance,
                  .bubble = report.bubble,
                  .frozen_layers = report.frozen_layers};
  newest_.push_back(entry);
  if (newest_.size() > kMaxNewest) newest_.pop_front();
  losses_->update(std::as_bytes(std::span(&report.loss, 1)));
  const int ranks = plan.ranks * replicas;
  const int at_work = static_cast<int>(plan::ranks_at_work(plan).size()) * replicas;
  if (count_ == 0) first_ranks = ranks;
  working_rank_s += at_work * report.step_s;
  idle_rank_s += (ranks - at_work) * report.step_s;
  saved_rank_s += std::max(0, first_ranks - ranks) * report.step_s;
  seconds_ += report.step_s;
  profile_s += report.profile_s;
  plan_s += report.plan_s;
  migrate_s += report.migrate_s;
  reduction_s += report.reduction_s;
  moved_layers += report.moved_layers;
  moved_bytes += report.moved_bytes;
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
      for (const transport::Purpose purpose : transport::kPurposes) {
        const transport::MessageCount& count = group.at(WorldRank(from), WorldRank(to), purpose);
        if (count.messages == 0) continue;
        const observe::TrafficRow row{.from = number(from),
                                      .to = number(to),
                                      .purpose = std::string(transport::name(purpose)),
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

double RunSeries::tokens_per_s() const {
  if (seconds_ <= 0) return 0;
  return static_cast<double>(tokens_per_step) * static_cast<double>(count_) / seconds_;
}

}  // namespace dynmo::train
