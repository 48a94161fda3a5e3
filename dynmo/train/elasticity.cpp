// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/elasticity.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/seconds_since.h"
#include "dynmo/core/units.h"
#include "dynmo/plan/pack.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

constexpr std::chrono::milliseconds kHookRound{100};
constexpr std::chrono::milliseconds kAskedHooks{3000};  // where the run was asked to end

}  // namespace

elastic::Member Elasticity::self() const {
  const elastic::Member* found = view().find(groups_.self().id);
  return found != nullptr ? *found : groups_.self();
}

bool Elasticity::asks() const {
  return groups_.asked_to_leave() || (leads() && leader_->has_requests());
}

void Elasticity::add(elastic::BoundaryEvents events) {
  std::ranges::move(events, std::back_inserter(events_));
}

void Elasticity::tell_events(const std::function<void(const elastic::BoundaryEvent&)>& write) {
  for (const elastic::BoundaryEvent& event : std::exchange(events_, {})) {
    write(event);
    if (leads() && event.client != 0) leader_->answer(event.client, event.reply);
  }
}

Expected<void> Elasticity::begin_again(const elastic::View& survivors,
                                       std::unique_ptr<elastic::Leader> led, int next_member) {
  regrouping_.begin(survivors);
  if (group().rank() != transport::Member(0)) return {};
  Json handover;
  if (led != nullptr) {
    handover = led->handover();
  } else {
    const auto secret = elastic::read_secret(elastic::secret_path(config().run.directory));
    // No release of the leader before has a number above its generation.
    handover = {{"secret", secret ? *secret : elastic::make_secret()},
                {"next_member", next_member},
                {"last_release", survivors.generation},
                {"releases", Json::array()}};
  }
  DYNMO_ASSIGN(leader_, elastic::Leader::open(leader_options(groups_, self(), run_), handover));
  // If the files cannot be written, poll() tries again.
  static_cast<void>(leader_->publish());
  if (led != nullptr) {
    leader_->take_releases(*led);
    led->retire(leader_->endpoint());
  }
  leader_->note_change(survivors, survivors, /*joined=*/0, "");  // hooks learn who runs now
  return {};
}

Expected<void> Elasticity::begin() {
  DYNMO_TRY(regrouping_.begin());
  if (group().rank() != transport::Member(0)) return {};
  elastic::Leader::Options options = leader_options(groups_, self(), run_);
  options.service.first_member = view().size();
  DYNMO_ASSIGN(leader_, elastic::Leader::open(std::move(options), /*handover=*/nullptr));
  DYNMO_TRY(leader_->publish());
  if (config().elastic.release_command.empty()) return {};
  return process::check_program(config().elastic.release_command);
}

Expected<std::unique_ptr<GroupRun>> Elasticity::enter(const RunLane& lane) {
  return regrouping_.enter(lane);
}

Expected<void> Elasticity::join(GroupRun& group) { return regrouping_.join(group); }

void Elasticity::observe(const runtime::StepReport& report, const GroupRun& group,
                         const observe::RunHistory& run) {
  if (!leads()) return;
  const double tokens =
      static_cast<double>(step_micro_batches(config()) * config().batch.micro_batch_size *
                          config().model.shape.sequence);
  leader_->set_step({{"step", report.step + 1},
                     {"steps", config().train.steps},
                     {"loss", report.loss},
                     {"tokens_per_s", tokens / report.step_s},
                     {"imbalance", report.imbalance},
                     {"bubble", report.bubble},
                     {"frozen_layers", report.frozen_layers},
                     {"lost_ranks", run.lost().size()},
                     {"steps_again", run.totals().repeated_steps},
                     {"replicas", config().pipeline.replicas}});
  leader_->set_group(view(), group.pipeline().plan());
}

void Elasticity::answer_checkpoints(const GroupRun& group) {
  if (!leads() || !leader_->awaits_checkpoint() || group.checkpoints()->active()) return;
  const auto& failure = group.checkpoints()->failure();
  leader_->answer_checkpoints(failure ? Expected<void>(*failure) : Expected<void>());
}

Expected<elastic::BoundaryDecision> Elasticity::next(GroupRun& group, bool asked) {
  answer_checkpoints(group);
  // (A change that waits may wait for the hook that runs.)
  if (leads()) {
    add(leader_->poll(changes_.defers() ? elastic::Hooks::kHold : elastic::Hooks::kCall));
  }
  std::vector<elastic::RankRequest> requests;
  if (asked) {
    elastic::RankRequest mine{.leave = groups_.asked_to_leave()};
    if (leads()) leader_->take_requests(mine);
    DYNMO_ASSIGN(
        const auto all,
        transport::gather_json(groups_.group(), transport::control_tag(transport::Control::kSize),
                               elastic::to_json(mine), "what a rank asks for between two steps"));
    for (const Json& json : all) {
      DYNMO_ASSIGN(elastic::RankRequest request, elastic::parse_rank_request(json));
      requests.push_back(std::move(request));
    }
  }
  runtime::Pipeline& pipeline = group.pipeline();
  elastic::BoundaryDecision decision = changes_.next(
      requests, view(), pipeline.plan(), pipeline.next_step(), pipeline.costs().has_value());
  if (config().elastic.pack == "auto" && !decision.stop && !decision.change) {
    if (const auto released = pipeline.release()) {
      decision.change = elastic::change_of(*released, pipeline.plan());
    }
  }
  for (const elastic::BoundaryDecision::Answer& each : decision.answers) {
    events_.push_back({.line = each.client == 0 ? each.reply.text : "",
                       .client = each.client,
                       .reply = each.reply});
  }
  if (leads()) leader_->wait_for_checkpoint(decision.wait_for_checkpoint);
  return decision;
}

Expected<bool> Elasticity::waits_for_hook(const elastic::SizeChange& change) {
  if (change.kept.front() == Rank(0)) return false;
  if (leads() && groups_.asked_to_leave()) leader_->hurry_hook();
  DYNMO_ASSIGN(const Json runs,
               transport::first_json(
                   groups_.group(), transport::control_tag(transport::Control::kSize),
                   Json(leads() && leader_->runs_hook()), "whether a hook of the leader runs"));
  if (runs != Json(true)) return false;
  if (change.waited == 0) {
    events_.push_back({.line = fmt::format("waits for the hook under way: {}", change.why)});
  }
  changes_.defer(change);
  return true;
}

Expected<bool> Elasticity::prepare(const elastic::SizeChange& change, GroupRun& group) {
  runtime::Pipeline& pipeline = group.pipeline();
  const std::vector<Rank> at_work = plan::ranks_at_work(pipeline.plan());
  if (std::ranges::includes(change.kept, at_work)) return true;
  const auto refuse = [&](const std::string& why) {
    const std::string line = fmt::format("{} is not possible: {}", change.why, why);
    events_.push_back({.kind = "refused",
                       .line = line,
                       .json = {{"change", change.why}, {"reason", why}},
                       .client = change.client,
                       .reply = elastic::refusal(make_error(ErrorCode::kInfeasible, "{}", line))});
    return false;
  };
  const auto report = pipeline.vacate(change.kept);
  if (!report) {
    const ErrorCode code = report.error().code;
    if (code != ErrorCode::kInfeasible && code != ErrorCode::kBadInput) return report.error();
    return refuse(report.error().message);
  }
  if (report->moved_layers == 0) {
    return refuse(report->decision->migrate ? "a copy was not accepted" : report->decision->reason);
  }
  events_.push_back(move_event(*report, change.why, pipeline.plan()));
  return true;
}

Expected<Regrouped> Elasticity::change(const elastic::SizeChange& change,
                                       std::unique_ptr<GroupRun> group, const RunLane& lane) {
  DYNMO_ASSIGN(Regrouped result, regrouping_.change(change, std::move(group), lane, leader_));
  add(std::exchange(result.events, {}));
  return result;
}

Error Elasticity::stop(const elastic::BoundaryDecision& decision, const GroupRun& group,
                       const Expected<void>& finished) {
  const std::int64_t step = group.pipeline().next_step();
  if (finished) events_.push_back({.kind = "stop", .json = {{"why", *decision.stop}}});
  const elastic::Reply reply =
      finished ? elastic::done(fmt::format("stopped before step {} of {}, after a checkpoint", step,
                                           config().train.steps))
               : elastic::refusal(finished.error());
  for (const process::ClientId client : decision.wait_for_stop) {
    events_.push_back({.client = client, .reply = reply});
  }
  if (!finished) return finished.error();
  return make_error(ErrorCode::kInterrupted, "stopped before step {} of {}: {}", step,
                    config().train.steps, *decision.stop);
}

// Lets the other ranks wait for the leader's hooks in short rounds. The wait for one message is
// limited by pipeline.timeout_s, which may be shorter than a hook.
Expected<void> Elasticity::finish() {
  std::atomic<bool> lost{false};
  // The program that asks a process to leave kills it some time later.
  const bool asked = groups_.asked_to_leave();
  const auto hurry = [&] { return lost || (!asked && groups_.asked_to_leave()); };
  std::future<elastic::BoundaryEvents> hooks;
  if (leads()) {
    hooks = std::async(std::launch::async, [&] {
      return leader_->finish(asked ? kAskedHooks : elastic::kLastHooks, hurry);
    });
  }
  while (true) {
    const bool runs = hooks.valid() && hooks.wait_for(kHookRound) != std::future_status::ready;
    const double mine = runs ? 1 : 0;
    const auto all = transport::gather_numbers(
        group(), transport::control_tag(transport::Control::kSize), std::span(&mine, 1));
    lost = !all;
    if (!all) return all.error();
    if (std::ranges::all_of(*all, [](const auto& one) { return one.front() == 0; })) break;
  }
  if (hooks.valid()) add(hooks.get());
  return {};
}

}  // namespace dynmo::train
