// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/regrouping.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "dynmo/core/fields.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/observe/table.h"
#include "dynmo/plan/pack.h"
#include "dynmo/train/setup/leader_options.h"
#include "dynmo/train/setup/start.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

using transport::Control;
using transport::control_tag;

std::string ranks_text(int ranks, std::int64_t replicas) {
  return replicas > 1 ? fmt::format("{} x {} ranks", replicas, ranks)
                      : observe::format_count(ranks, "rank");
}

// Returns the previous position of each position of the next group, or nullopt for a new one.
std::vector<std::optional<Rank>> ranks_before(const std::vector<Rank>& kept, int ranks) {
  std::vector<std::optional<Rank>> before(kept.begin(), kept.end());
  before.resize(static_cast<std::size_t>(ranks));
  return before;
}

}  // namespace

elastic::BoundaryEvent move_event(const runtime::StepReport& report, const std::string& cause,
                                  const plan::Plan& plan) {
  const control::Decision& decision = *report.decision;
  return {.kind = "move",
          .line = fmt::format("moved to {} in {}: a step is to take {}, it was {}",
                              plan::to_string(plan), format_seconds(report.migrate_s),
                              format_seconds(decision.planned_step_s),
                              format_seconds(decision.current_step_s)),
          .json = {{"cause", cause},
                   {"reason", decision.reason},
                   {"layers", report.moved_layers},
                   {"bytes", report.moved_bytes.value},
                   {"seconds", report.migrate_s},
                   {"current_step_s", decision.current_step_s},
                   {"planned_step_s", decision.planned_step_s},
                   {"plan", plan::to_json(plan)}}};
}

Expected<void> Regrouping::begin() {
  const std::string origin = "what a rank says of itself";
  DYNMO_ASSIGN(const auto all, transport::gather_json(groups_.group(), control_tag(Control::kSize),
                                                      elastic::to_json(groups_.self()), origin));
  for (const Json& json : all) {
    DYNMO_ASSIGN(auto member, parse_fields<elastic::Member>(json, origin));
    member.number = view_.size();
    view_.members.push_back(std::move(member));
  }
  groups_.watch(view_);
  return {};
}

Regrouping::Try Regrouping::begin_try(const elastic::SizeChange& change, const RunLane& lane,
                                      elastic::Leader* leader) {
  const auto replicas = static_cast<int>(run_.config().pipeline.replicas);
  Try attempt{.change = change,
              .lane = lane,
              .leader = leader,
              .begin = std::chrono::steady_clock::now(),
              .step = passage_.state.step,
              .before = passage_.state.plan,
              .plan = {},
              .view = elastic::view_after(change, view_, replicas),
              .next_leader = nullptr};
  attempt.plan = plan::with_more_ranks(plan::without_others(attempt.before, change.kept),
                                       attempt.view.size() / replicas);
  tried_ = std::max({attempt.before.generation, view_.generation, tried_}) + 1;
  attempt.plan.generation = attempt.view.generation = tried_;
  attempt.moves_lead = attempt.view.members.front().id != view_.members.front().id;
  return attempt;
}

Expected<Regrouped> Regrouping::change(const elastic::SizeChange& change,
                                       std::unique_ptr<GroupRun> group, const RunLane& lane,
                                       std::unique_ptr<elastic::Leader>& leader) {
  // Nothing of this group is in flight, and all its ranks are here. It is early: later a loss would
  // end the run (is_taking()), and the next group needs the memory.
  const Expected<void> closed = group->close_channels();
  passage_.leave(std::move(group));
  passage_.controller = passage_.state.controller;
  DYNMO_TRY(closed);
  Try attempt = begin_try(change, lane, leader.get());
  passage_.state.controller->ranks_changed(ranks_before(change.kept, attempt.plan.ranks));
  DYNMO_ASSIGN(const auto place, meet(attempt));
  const Expected<void> mine = place ? form(attempt, *place) : Expected<void>(place.error());
  if (!mine) {
    passage_.take_back();
    groups_.drop(mine.error());  // no rank waits for this one there
  }
  elastic::JobFile next;
  DYNMO_ASSIGN(const std::string fault, vote(attempt, mine, next));
  return fault.empty() ? commit(attempt, leader, next) : stay(attempt, fault);
}

Expected<Expected<elastic::Place>> Regrouping::meet(Try& attempt) {
  Json mine = Json::object();
  if (const auto may = groups_.may_change(attempt.view); !may) {
    mine["fault"] = may.error().message;
  } else if (attempt.view.members.front().id == groups_.self().id) {
    const auto place = groups_.open(attempt.view);
    mine[place ? "place" : "fault"] =
        place ? elastic::to_json(*place) : Json(place.error().message);
  }
  if (attempt.moves_lead && attempt.leader != nullptr) {
    mine["handover"] = attempt.leader->handover();
  }
  const std::string origin = "where the next group meets";
  DYNMO_ASSIGN(const auto all, transport::gather_json(groups_.group(), control_tag(Control::kSize),
                                                      mine.empty() ? Json() : mine, origin));
  std::optional<elastic::Place> met;
  for (const Json& json : all) {
    if (json.is_null()) continue;
    if (json.contains("handover")) attempt.handover = json["handover"];
    if (json.contains("fault")) {
      return Expected<elastic::Place>(
          make_error(ErrorCode::kInfeasible, "{}", json["fault"].get<std::string>()));
    }
    if (json.contains("place")) {
      DYNMO_ASSIGN(met, parse_fields<elastic::Place>(json["place"], origin));
    }
  }
  if (met) return Expected<elastic::Place>(*met);
  return make_error(ErrorCode::kInternal, "no rank says where the next group meets");
}

Expected<void> Regrouping::form(Try& attempt, const elastic::Place& place) {
  elastic::Leader* const leader = attempt.leader;
  if (leader != nullptr) leader->admit(attempt.change, attempt.view, place);
  const elastic::MemberId self = groups_.self().id;
  if (!attempt.view.has(self)) return {};
  elastic::Groups::GiveUp give_up;
  if (leader != nullptr) give_up = [leader] { return leader->missing(); };
  DYNMO_ASSIGN(transport::Transport * transport, groups_.form(attempt.view, place, give_up));
  DYNMO_ASSIGN(const std::string note,
               open_group(*transport, attempt.lane, attempt.view, attempt.plan));
  if (!note.empty()) attempt.result.events.push_back({.line = note});
  if (!attempt.change.newcomers.empty()) DYNMO_TRY(spread(*passage_.next, attempt.result));
  const elastic::Member& first = attempt.view.members.front();
  if (!attempt.moves_lead || first.id != self) return {};
  // If it cannot listen, the present leader stays.
  if (!attempt.handover.is_object()) {
    return make_error(ErrorCode::kInternal, "the leader has handed nothing over");
  }
  DYNMO_ASSIGN(attempt.next_leader,
               elastic::Leader::open(leader_options(groups_, first, run_), attempt.handover));
  return {};
}

Expected<std::string> Regrouping::vote(const Try& attempt, const Expected<void>& mine,
                                       elastic::JobFile& next) {
  Json said;
  if (!mine) {
    said = {{"fault", mine.error().message}};
  } else if (attempt.next_leader != nullptr) {
    said = {{"endpoint", elastic::to_json(attempt.next_leader->endpoint())}};
  }
  const std::string origin = "whether the next group works";
  DYNMO_ASSIGN(const auto all,
               transport::gather_json(groups_.group(), control_tag(Control::kSize), said, origin));
  for (const Json& json : all) {
    if (json.is_null()) continue;
    if (json.contains("fault")) return json["fault"].get<std::string>();
    DYNMO_ASSIGN(next, parse_fields<elastic::JobFile>(json["endpoint"], origin));
  }
  return std::string();
}

Expected<Regrouped> Regrouping::stay(Try& attempt, const std::string& why) {
  passage_.take_back();
  groups_.drop(make_error(ErrorCode::kPeerLost, "the run goes on without: {}", why));
  const transport::Grid grid(groups_.group(), static_cast<int>(run_.config().pipeline.replicas));
  runtime::move_back(run_.model().layers, passage_.state, attempt.before, grid.position());
  // Some ranks may have asked their sources in the group that is not to be: all ask again.
  passage_.state.asked = true;
  passage_.next = std::make_unique<GroupRun>(groups_.group(), run_, attempt.lane, passage_.cluster,
                                             std::exchange(passage_.state, {}));
  DYNMO_TRY(passage_.next->go_on());
  if (attempt.leader != nullptr) attempt.leader->dismiss_admitted();
  Regrouped result{.group = std::move(passage_.next)};
  const std::string line = fmt::format("no change ({}): {}", attempt.change.why, why);
  result.events.push_back(
      {.kind = "refused",
       .line = line,
       .json = {{"change", attempt.change.why}, {"reason", why}},
       .client = attempt.change.client,
       .reply = elastic::refusal(make_error(ErrorCode::kPeerLost, "{}", line))});
  return result;
}

Expected<Regrouped> Regrouping::commit(Try& attempt, std::unique_ptr<elastic::Leader>& leader,
                                       const elastic::JobFile& next) {
  Regrouped& result = attempt.result;
  // The files name the next leader, and it reports the next group, before the leaving one stops
  // listening.
  if (attempt.next_leader) attempt.next_leader->set_group(attempt.view, attempt.plan);
  const Expected<void> published =
      attempt.next_leader ? attempt.next_leader->publish() : Expected<void>();
  taking_ = true;
  DYNMO_ASSIGN(const bool stays, groups_.take());
  taking_ = false;
  passage_.controller.reset();  // the next group is in force
  result.pause_s = seconds_since(attempt.begin) - result.moving_s;
  const auto replicas = run_.config().pipeline.replicas;
  const std::string line = fmt::format(
      "{} -> {}: {}, in {}", ranks_text(attempt.before.ranks, replicas),
      ranks_text(attempt.plan.ranks, replicas), attempt.change.why, format_seconds(result.pause_s));
  if (!stays) {
    leave(attempt, leader, next, line);
    return std::move(result);
  }
  const elastic::View before = std::exchange(view_, attempt.view);
  const std::string text = fmt::format("before step {}: {}", attempt.step, line);
  const bool leads_now = attempt.next_leader != nullptr;
  if (leads_now) leader = std::move(attempt.next_leader);
  if (leader != nullptr) {
    // Before the rest, which a loss may interrupt: the ranks that left are released all the same.
    const int joined = static_cast<int>(std::ssize(attempt.change.newcomers));
    leader->note_change(before, view_, joined, text);
  }
  if (attempt.leader != nullptr) {
    DYNMO_TRY(confirm(attempt.change));
    attempt.leader->dismiss_admitted();
  }
  elastic::BoundaryEvents events = {{.kind = "size",
                                     .line = line,
                                     .json = {{"why", attempt.change.why},
                                              {"ranks_before", elastic::numbers_of(before)},
                                              {"ranks", elastic::numbers_of(view_)},
                                              {"seconds", result.pause_s},
                                              {"plan", plan::to_json(attempt.plan)}}}};
  if (!leads_now) {  // the client of a leader that has left was answered by it
    events.front().client = attempt.change.client;
    events.front().reply = elastic::done(text);
  } else if (!published) {
    const elastic::JobFile& at = leader->endpoint();
    events.push_back({.line = fmt::format("{}: this rank leads all the same, at {}:{}, and tries "
                                          "again before each step",
                                          published.error().message, at.address, at.port)});
  }
  events.insert(events.end(), result.events.begin(), result.events.end());
  result.events = std::move(events);
  result.group = std::move(passage_.next);
  if (leader != nullptr) leader->set_group(view_, result.group->pipeline().plan());
  return std::move(result);
}

// Ends the leader object of this rank, if there is one, after another rank has become the leader.
void Regrouping::leave(Try& attempt, std::unique_ptr<elastic::Leader>& leader,
                       const elastic::JobFile& next, const std::string& line) {
  if (leader == nullptr) return;
  leader->retire(next, attempt.change.client,
                 elastic::done(fmt::format("before step {}: {}", attempt.step, line)));
  attempt.result.events = leader->finish(elastic::kLastHooks);
  leader.reset();
}

// Sends messages without an answer. So the newcomers need not do anything more for the change once
// all have agreed on it.
Expected<void> Regrouping::confirm(const elastic::SizeChange& change) {
  const std::byte yes{1};
  for (const elastic::Newcomer& newcomer : change.newcomers) {
    const transport::Member to(view_.rank_of(newcomer.member.id)->value);
    DYNMO_TRY(groups_.group().send(to, control_tag(Control::kSize), std::span(&yes, 1))->wait());
  }
  return {};
}

Expected<std::unique_ptr<GroupRun>> Regrouping::enter(const RunLane& lane) {
  plan::Plan plan;
  DYNMO_TRY(open_group(groups_.group(), lane, view_, plan));
  return std::move(passage_.next);
}

Expected<void> Regrouping::join(GroupRun& group) {
  Regrouped result;  // for those that were there before
  DYNMO_TRY(spread(group, result));
  std::byte yes{};
  return groups_.group()
      .receive(transport::Member(0), control_tag(Control::kSize), std::span(&yes, 1))
      ->wait();
}

// Opens a group. The first rank, an old one, sends the newcomers the members, their addresses, and
// the state that they need to make the same decisions.
Expected<std::string> Regrouping::open_group(transport::Transport& group, const RunLane& lane,
                                             elastic::View& view, plan::Plan& plan) {
  const bool is_new = plan.stages.empty();
  Json mine;
  if (group.rank() == transport::Member(0)) {
    mine = {{"view", elastic::to_json(view)},
            {"plan", plan::to_json(plan)},
            {"decides", changes_.state()},
            {"standing", groups_.standing(view)}};
  }
  const std::string origin = "what the leader says of the group";
  DYNMO_ASSIGN(const Json said,
               transport::first_json(group, control_tag(Control::kSize), mine, origin));
  if (!said.contains("view") || !said.contains("plan") || !said.contains("decides") ||
      !said.contains("standing")) {
    return make_error(ErrorCode::kInternal, "{}: wanted members and a plan", origin);
  }
  DYNMO_ASSIGN(view, parse_fields<elastic::View>(said["view"], origin));
  groups_.watch(view);
  DYNMO_ASSIGN(plan, plan::parse_plan(said["plan"], origin));
  if (is_new) DYNMO_TRY(changes_.restore(said["decides"]));
  DYNMO_TRY(groups_.know(said["standing"]));
  DYNMO_ASSIGN(transport::MeasuredCluster measured,
               measure_group(group, run_, groups_.self().host, passage_.cluster));
  DYNMO_TRY(passage_.form(group, run_, lane, std::move(measured.cluster), plan));
  DYNMO_TRY(passage_.next->go_on());
  return std::move(measured.note);
}

Expected<void> Regrouping::spread(GroupRun& group, Regrouped& result) {
  runtime::Pipeline& pipeline = group.pipeline();
  DYNMO_ASSIGN(const runtime::StepReport report, pipeline.rebalance());
  if (report.moved_layers > 0) {
    result.events.push_back(move_event(report, "ranks have joined", pipeline.plan()));
    result.moving_s += report.migrate_s;
    return {};
  }
  std::string why = "steps have to be measured first";
  if (report.decision) {
    why = report.decision->migrate ? "a copy was not accepted" : report.decision->reason;
  }
  result.events.push_back({.kind = "refused",
                           .line = fmt::format("the new ranks wait: {}", why),
                           .json = {{"reason", why}, {"plan", plan::to_json(pipeline.plan())}}});
  return {};
}

}  // namespace dynmo::train
