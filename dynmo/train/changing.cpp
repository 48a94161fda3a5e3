// SPDX-License-Identifier: Apache-2.0
// How one group of an elastic run follows another.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/core/units.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/pack.h"
#include "dynmo/runtime/regroup.h"
#include "dynmo/train/resizing_impl.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

using transport::Control;
using transport::control_tag;

}  // namespace

elastic::View Resizing::next_view(const SizeChange& change, int positions) const {
  const auto replicas = static_cast<int>(config_.pipeline.replicas);
  elastic::View next{.generation = 0, .members = {}};
  auto joiner = change.joiners.begin();
  const auto joining = std::ssize(change.joiners) / replicas;
  for (int replica = 0; replica < replicas; ++replica) {
    for (const Rank position : change.kept) {
      next.members.push_back(
          view_.members[static_cast<std::size_t>(replica * positions + position.value)]);
    }
    for (std::ptrdiff_t i = 0; i < joining; ++i) next.members.push_back((joiner++)->member);
  }
  return next;
}

Expected<Expected<elastic::Place>> Resizing::meet(const elastic::View& next) {
  std::string mine;
  if (next.members.front().id == groups_.self().id) {
    const auto place = groups_.open(next);
    mine =
        (place ? Json{{"place", elastic::to_json(*place)}} : Json{{"fault", place.error().message}})
            .dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  DYNMO_ASSIGN(const auto texts,
               transport::gather_texts(group(), control_tag(Control::kSize), mine));
  const std::string origin = "where the next group meets";
  for (const std::string& text : texts) {
    if (text.empty()) continue;
    DYNMO_ASSIGN(const Json json, parse_json(text, origin));
    if (json.contains("fault")) {
      return Expected<elastic::Place>(
          make_error(ErrorCode::kInfeasible, "{}", json["fault"].get<std::string>()));
    }
    JsonObject object(json["place"], origin);
    return elastic::parse_place(object);
  }
  return make_error(ErrorCode::kInternal, "no rank says where the next group meets");
}

Expected<std::unique_ptr<GroupRun>> Resizing::form(const SizeChange& change, Next& next,
                                                   const elastic::Place& place, const RunLane& lane,
                                                   runtime::RankState& state,
                                                   const std::optional<cost::ModelCost>& costs) {
  if (leads()) {
    for (const Standby& standby : change.joiners) {
      elastic::Place theirs = place;
      theirs.rank = *next.view.rank_of(standby.member.id);
      theirs.member = standby.member.number;
      service_->admit(standby.client, theirs);
    }
  }
  if (!next.view.has(groups_.self().id)) return std::unique_ptr<GroupRun>();
  const Groups::GiveUp give_up =
      leads() ? Groups::GiveUp([this] { return service_->missing(); }) : Groups::GiveUp();
  DYNMO_ASSIGN(transport::Transport * transport, groups_.form(next.view, place, give_up));
  DYNMO_ASSIGN(auto opened, open_group(*transport, lane, next, state, costs));
  if (!next.newcomers) return opened;
  const auto done = spread(*opened);
  if (done) return opened;
  state = opened->close();
  return done.error();
}

Expected<std::string> Resizing::first_failure(const Expected<void>& mine) {
  DYNMO_ASSIGN(const auto texts, transport::gather_texts(group(), control_tag(Control::kSize),
                                                         mine ? "" : "! " + mine.error().message));
  for (const std::string& text : texts) {
    if (!text.empty()) return text.substr(2);
  }
  return std::string();
}

Expected<Resizing::Changed> Resizing::stay(const SizeChange& change, const std::string& why,
                                           const plan::Plan& plan, runtime::RankState state,
                                           const std::optional<cost::ModelCost>& costs,
                                           const RunLane& lane) {
  groups_.drop(make_error(ErrorCode::kPeerLost, "the run goes on without: {}", why));
  const transport::Grid grid(group(), static_cast<int>(config_.pipeline.replicas));
  runtime::move_back(inputs_.model.layers, state, plan, grid.position());
  const std::int64_t step = state.step;
  auto same = std::make_unique<GroupRun>(group(), config_, inputs_, lane, std::move(state));
  if (costs) DYNMO_TRY(same->pipeline().use(*costs));
  notes_.clear();
  changes_.done();
  const std::string line = fmt::format("no change ({}): {}", change.why, why);
  tell_.say(fmt::format("step {:5}  {}", step, line));
  tell_.event("refused", step, {{"change", change.why}, {"reason", why}});
  if (leads()) service_->dismiss_admitted();
  answer(change.client, elastic::refusal(make_error(ErrorCode::kPeerLost, "{}", line)));
  return Changed{.group = std::move(same), .done = false};
}

// One way, so that a newcomer has said its last word before all have agreed on it.
Expected<void> Resizing::confirm(const SizeChange& change) {
  const std::byte yes{1};
  for (const Standby& standby : change.joiners) {
    const transport::Member newcomer(view_.rank_of(standby.member.id)->value);
    DYNMO_TRY(group().send(newcomer, control_tag(Control::kSize), std::span(&yes, 1))->wait());
  }
  return {};
}

Expected<Resizing::Changed> Resizing::change(const SizeChange& change,
                                             std::unique_ptr<GroupRun> group, const RunLane& lane) {
  const auto begin = std::chrono::steady_clock::now();
  const plan::Plan before = group->pipeline().plan();
  const std::int64_t step = group->pipeline().next_step();
  const auto replicas = static_cast<int>(config_.pipeline.replicas);
  const int joining = static_cast<int>(std::ssize(change.joiners)) / replicas;
  Next next{.view = next_view(change, before.ranks),
            .plan = plan::with_more_ranks(plan::without_others(before, change.kept),
                                          static_cast<int>(change.kept.size()) + joining),
            .newcomers = joining > 0};
  tried_ = next.plan.generation = next.view.generation = std::max(before.generation, tried_) + 1;
  const std::optional<cost::ModelCost> costs = group->pipeline().costs();
  runtime::RankState state = group->close();
  group.reset();
  const Moves moved_before = moves_;

  const bool moves_lead = next.view.members.front().id != view_.members.front().id;
  std::string handed_over;
  if (moves_lead) {
    DYNMO_ASSIGN(const auto texts,
                 transport::gather_texts(this->group(), control_tag(Control::kSize),
                                         leads() ? handover() : std::string()));
    handed_over = texts.front();
  }
  DYNMO_ASSIGN(const auto place, meet(next.view));
  Expected<void> mine;
  if (!place) {
    mine = place.error();
  } else if (auto formed = form(change, next, *place, lane, state, costs)) {
    group = *std::move(formed);
  } else {
    mine = formed.error();
    groups_.drop(formed.error());  // nobody waits for this rank there
  }
  DYNMO_ASSIGN(const std::string failure, first_failure(mine));
  if (!failure.empty()) {
    if (group != nullptr) state = group->close();
    group.reset();
    moves_ = moved_before;
    return stay(change, failure, before, std::move(state), costs, lane);
  }
  elastic::JobFile next_door;
  if (moves_lead) {
    if (next.view.members.front().id == groups_.self().id) DYNMO_TRY(lead(handed_over));
    DYNMO_ASSIGN(next_door, hear_door(next.view));
  }
  DYNMO_ASSIGN(const bool stays, groups_.take());
  pause_s_ = seconds_since(begin) - (moves_.seconds - moved_before.seconds);  // told apart
  const std::string line =
      fmt::format("{} -> {}: {}, in {}", ranks_text(before.ranks, replicas),
                  ranks_text(next.plan.ranks, replicas), change.why, format_seconds(pause_s_));
  if (!stays) {
    if (leads()) retire(change, fmt::format("before step {}: {}", step, line), step, next_door);
    return Changed{.group = nullptr, .done = true};
  }
  const elastic::View old = std::exchange(view_, next.view);
  for (const elastic::Member& member : view_.members) {
    members_ = std::max(members_, member.number + 1);
  }
  if (leads()) DYNMO_TRY(confirm(change));
  if (leads()) service_->dismiss_admitted();
  changes_.done();
  tell_.say(fmt::format("step {:5}  {}", step, line));
  tell_.event("size", step,
              {{"why", change.why},
               {"ranks_before", numbers_of(old)},
               {"ranks", numbers_of(view_)},
               {"seconds", pause_s_},
               {"plan", plan::to_json(next.plan)}});
  for (const Note& note : std::exchange(notes_, {})) {
    tell_.say(fmt::format("step {:5}  {}", step, note.line));
    tell_.event(note.kind, step, note.more);
  }
  if (leads()) {
    std::vector<elastic::Member> ended;
    for (const elastic::Member& member : old.members) {
      if (!view_.has(member.id)) ended.push_back(member);
    }
    if (ended.empty()) releases_->set_running(view_.members);
    if (!ended.empty()) releases_->release(std::move(ended), view_.members);
    tell_ranks(group->pipeline().plan());
  }
  const std::string text = fmt::format("before step {}: {}", step, line);
  note_grown(static_cast<int>(std::ssize(change.joiners)), text);
  // (Of a leader that has left, that one answers.)
  if (!moves_lead) answer(change.client, done(text));
  return Changed{.group = std::move(group), .done = true};
}

Expected<std::unique_ptr<GroupRun>> Resizing::enter(const RunLane& lane) {
  Next known;
  runtime::RankState nothing;
  DYNMO_ASSIGN(auto opened, open_group(group(), lane, known, nothing, {}));
  DYNMO_TRY(spread(*opened));
  std::byte yes{};
  DYNMO_TRY(group()
                .receive(transport::Member(0), control_tag(Control::kSize), std::span(&yes, 1))
                ->wait());
  notes_.clear();
  view_ = known.view;
  for (const elastic::Member& member : view_.members) {
    members_ = std::max(members_, member.number + 1);
  }
  return opened;
}

// Those that were there tell the newcomers who and where all are.
Expected<std::unique_ptr<GroupRun>> Resizing::open_group(
    transport::Transport& group, const RunLane& lane, Next& known, runtime::RankState& state,
    const std::optional<cost::ModelCost>& costs) {
  const Json mine = known.plan.stages.empty() ? Json()
                                              : Json{{"view", elastic::to_json(known.view)},
                                                     {"plan", plan::to_json(known.plan)}};
  DYNMO_ASSIGN(const auto texts,
               transport::gather_texts(group, control_tag(Control::kSize), mine.dump()));
  const std::string origin = "what the leader says of the group";
  DYNMO_ASSIGN(const Json said, parse_json(texts.front(), origin));
  DYNMO_CHECK(said.contains("view") && said.contains("plan"), "a view and a plan, got {}",
              texts.front());
  DYNMO_ASSIGN(known.view, elastic::parse_view(said["view"], origin));
  DYNMO_ASSIGN(known.plan, plan::parse_plan(said["plan"], origin));
  const transport::Grid grid(group, static_cast<int>(config_.pipeline.replicas));
  DYNMO_TRY(runtime::regroup(grid, inputs_.model.layers, known.plan, state,
                             {.device = inputs_.model.device.device}));
  DYNMO_ASSIGN(const auto shared, runtime::share_costs(group, costs));
  auto opened = std::make_unique<GroupRun>(group, config_, inputs_, lane, std::move(state));
  if (!shared) return opened;
  const auto used = opened->pipeline().use(*shared);
  if (used) return opened;
  state = opened->close();
  return used.error();
}

Expected<void> Resizing::spread(GroupRun& group) {
  runtime::Pipeline& pipeline = group.pipeline();
  std::vector<Rank> all;
  for (int i = 0; i < pipeline.plan().ranks; ++i) all.emplace_back(i);
  const auto prospect = pipeline.prospect_on(all);
  const auto note = [&](const std::string& kind, const std::string& why) {
    notes_.push_back({kind, why, {{"reason", why}, {"plan", plan::to_json(pipeline.plan())}}});
  };
  if (!prospect) {
    note("refused", fmt::format("the new ranks wait: {}", prospect.error().message));
    return {};
  }
  if (prospect->then_s > (1 - config_.balance.minimum_gain) * prospect->now_s) {
    note("refused", fmt::format("the new ranks wait: with them a step would take {}, without {}",
                                format_seconds(prospect->then_s), format_seconds(prospect->now_s)));
    return {};
  }
  const auto begin = std::chrono::steady_clock::now();
  DYNMO_ASSIGN(const bool moved, move(pipeline, prospect->plan));
  note(moved ? "move" : "refused",
       moved ? fmt::format("moved to {} in {}: a step is to take {}, it was {}",
                           plan::to_string(pipeline.plan()), format_seconds(seconds_since(begin)),
                           format_seconds(prospect->then_s), format_seconds(prospect->now_s))
             : "the new ranks wait: a copy was not accepted");
  return {};
}

}  // namespace dynmo::train
