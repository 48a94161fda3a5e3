// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/size_changes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "dynmo/cost/cluster.h"
#include "dynmo/plan/pack.h"

namespace dynmo::train {
namespace {

using elastic::RequestKind;

elastic::Reply refused(std::string why) {
  return {.code = ErrorCode::kBadInput, .done = false, .text = std::move(why)};
}

std::string on_already(int ranks) {
  return fmt::format("the run is on {} {} already", ranks, ranks == 1 ? "rank" : "ranks");
}

std::vector<Rank> all_positions(const plan::Plan& plan) {
  std::vector<Rank> all;
  for (int i = 0; i < plan.ranks; ++i) all.emplace_back(i);
  return all;
}

}  // namespace

std::string to_text(const RankWord& word) {
  if (!word.leave && word.wishes.empty() && word.joiners.empty()) return "";
  Json wishes = Json::array();
  for (const Wish& wish : word.wishes) {
    wishes.push_back({{"kind", static_cast<int>(wish.kind)},
                      {"client", wish.client},
                      {"ranks", wish.ranks},
                      {"member", wish.member}});
  }
  Json joiners = Json::array();
  for (const Standby& standby : word.joiners) {
    joiners.push_back({{"client", standby.client}, {"member", elastic::to_json(standby.member)}});
  }
  return Json{{"leave", word.leave}, {"wishes", std::move(wishes)}, {"joiners", std::move(joiners)}}
      .dump();
}

Expected<RankWord> parse_word(std::string_view text) {
  RankWord word;
  if (text.empty()) return word;
  const std::string origin = "what a rank says between two steps";
  DYNMO_ASSIGN(const Json json, parse_json(text, origin));
  JsonObject object(json, origin);
  word.leave = object.boolean("leave");
  for (JsonObject& each : object.objects("wishes")) {
    word.wishes.push_back({.kind = static_cast<RequestKind>(each.integer("kind")),
                           .client = static_cast<process::ClientId>(each.integer("client")),
                           .ranks = static_cast<int>(each.integer("ranks")),
                           .member = static_cast<int>(each.integer("member"))});
    DYNMO_TRY(each.finish());
  }
  for (JsonObject& each : object.objects("joiners")) {
    Standby standby{.client = static_cast<process::ClientId>(each.integer("client")), .member = {}};
    auto member = each.object("member");
    if (!member) {
      each.fail("member", "is missing");
    } else {
      DYNMO_ASSIGN(standby.member, elastic::parse_member(*member));
    }
    DYNMO_TRY(each.finish());
    word.joiners.push_back(std::move(standby));
  }
  DYNMO_TRY(object.finish());
  return word;
}

Turn SizeChanges::next(const std::vector<RankWord>& words, const elastic::View& view,
                       const plan::Plan& plan, std::int64_t step, bool costs_known) {
  Turn turn;
  turn.change = std::exchange(deferred_, std::nullopt);
  if (turn.change && !turn.change->joiners.empty()) {  // some may have gone while it waited
    turn.change->joiners = words.empty() ? std::vector<Standby>() : words.front().joiners;
    if (turn.change->joiners.empty() && std::ssize(turn.change->kept) == plan.ranks) {
      turn.change.reset();
    }
  }
  if (!words.empty()) {
    for (const Wish& wish : words.front().wishes) take(wish, view, plan, turn);
  }
  const auto asked = [](const RankWord& word) { return word.leave; };
  if (!words.empty() && std::all_of(words.begin(), words.end(), asked)) {
    if (!turn.stop) turn.stop = "all ranks were asked to leave";
    return turn;
  }
  for (std::size_t place = 0; place < words.size(); ++place) {
    if (asked(words[place]) && tries_again(view.members[place].id, step)) {
      drain(static_cast<int>(place), view, plan, turn, 0);
    }
  }
  // Newcomers hear of their places from who leads now.
  if (turn.change && turn.change->kept.front() != Rank(0)) turn.change->joiners.clear();
  if (turn.stop || turn.change) return turn;
  if (!words.empty() && !words.front().joiners.empty()) {
    turn.change = SizeChange{
        .kept = all_positions(plan),
        .joiners = words.front().joiners,
        .why = fmt::format("{} joined",
                           words.front().joiners.size() == 1 ? "a rank has" : "ranks have")};
    return turn;
  }
  if (costs_known && !packed_ && config_.pack_ranks > 0) {
    packed_ = true;
    if (config_.pack_ranks < plan.ranks) {
      pack(static_cast<int>(config_.pack_ranks), plan, turn, 0);
      return turn;
    }
  }
  if (config_.pack == "auto") release_idle(plan, step, turn);
  return turn;
}

void SizeChanges::take(const Wish& wish, const elastic::View& view, const plan::Plan& plan,
                       Turn& turn) {
  switch (wish.kind) {
    case RequestKind::kStop:
      turn.stop = "dynmo ctl stop";
      turn.wait_for_stop.push_back(wish.client);
      return;
    case RequestKind::kCheckpoint:
      turn.checkpoint = true;
      turn.wait_for_checkpoint.push_back(wish.client);
      return;
    case RequestKind::kPack:
      return pack(wish.ranks, plan, turn, wish.client);
    case RequestKind::kDrain: {
      const auto found =
          std::find_if(view.members.begin(), view.members.end(),
                       [&](const elastic::Member& member) { return member.number == wish.member; });
      if (found == view.members.end()) {
        std::vector<int> numbers;
        for (const elastic::Member& member : view.members) numbers.push_back(member.number);
        turn.answers.push_back(
            {wish.client, refused(fmt::format("there is no rank {}: wanted one of {}", wish.member,
                                              fmt::join(numbers, ", ")))});
        return;
      }
      return drain(static_cast<int>(found - view.members.begin()), view, plan, turn, wish.client);
    }
    case RequestKind::kGrow:  // of the leader alone
    case RequestKind::kRelease:
    case RequestKind::kStatus:
    case RequestKind::kConfig:
    case RequestKind::kJoin:
      return;
  }
}

// A place is a rank of the group; its position leaves in all replicas.
void SizeChanges::drain(int place, const elastic::View& view, const plan::Plan& plan, Turn& turn,
                        process::ClientId client) {
  const int number = view.members[static_cast<std::size_t>(place)].number;
  const Rank position(place % plan.ranks);
  std::vector<Rank> kept = turn.change ? turn.change->kept : all_positions(plan);
  if (std::erase(kept, position) == 0) {
    if (client != 0)
      turn.answers.push_back({client, refused(fmt::format("rank {} leaves already", number))});
    return;
  }
  if (std::ssize(kept) < config_.ranks_min) {
    turn.answers.push_back(
        {client, refused(fmt::format("rank {} cannot leave: elastic.ranks_min is {}", number,
                                     config_.ranks_min))});
    return;
  }
  if (turn.change && turn.change->client != 0 && client != 0) {
    turn.answers.push_back({client, refused("another change is under way: ask again")});
    return;
  }
  SizeChange& change = turn.change ? *turn.change : turn.change.emplace();
  change.kept = std::move(kept);
  change.why += fmt::format("{}rank {} was drained", change.why.empty() ? "" : ", ", number);
  if (client != 0) change.client = client;
}

void SizeChanges::pack(int ranks, const plan::Plan& plan, Turn& turn, process::ClientId client) {
  const auto refuse = [&](std::string why) {
    turn.answers.push_back({client, refused(std::move(why))});
  };
  if (turn.change) return refuse("another change is under way: ask again");
  if (ranks == plan.ranks) {
    turn.answers.push_back({client, elastic::Reply{.done = true, .text = on_already(ranks)}});
    return;
  }
  if (ranks > plan.ranks) {
    return refuse(fmt::format("pack is {}, wanted at most {}: {}; `dynmo ctl RUN grow` starts more",
                              ranks, plan.ranks, on_already(plan.ranks)));
  }
  if (ranks < config_.ranks_min) {
    return refuse(
        fmt::format("pack is {}, wanted elastic.ranks_min = {} or more", ranks, config_.ranks_min));
  }
  turn.change = SizeChange{.kept = plan::ranks_to_keep(cost::equal_ranks(plan.ranks), ranks),
                           .why = fmt::format("packed onto {} ranks", ranks),
                           .client = client};
}

bool SizeChanges::tries_again(elastic::MemberId member, std::int64_t step) {
  const auto [found, first] = tried_.try_emplace(member, step);
  if (!first && step - found->second < config_.release_after) return false;
  found->second = step;
  return true;
}

void SizeChanges::release_idle(const plan::Plan& plan, std::int64_t step, Turn& turn) {
  std::vector<Rank> at_work = plan::ranks_at_work(plan);
  if (at_work != at_work_ || !idle_since_) idle_since_ = step;
  at_work_ = at_work;
  if (std::ssize(at_work) == plan.ranks || step - *idle_since_ < config_.release_after) return;
  if (at_work.front() != Rank(0)) at_work.insert(at_work.begin(), Rank(0));
  // As many stay as ranks_min asks for, the lowest ones.
  for (const Rank rank : all_positions(plan)) {
    if (std::ssize(at_work) >= config_.ranks_min) break;
    const auto place = std::lower_bound(at_work.begin(), at_work.end(), rank);
    if (place == at_work.end() || *place != rank) at_work.insert(place, rank);
  }
  if (std::ssize(at_work) == plan.ranks) return;
  const auto released = plan.ranks - std::ssize(at_work);
  turn.change = SizeChange{
      .kept = std::move(at_work),
      .why = fmt::format("{} without layers for {} steps",
                         released == 1 ? "a rank was" : fmt::format("{} ranks were", released),
                         step - *idle_since_)};
}

}  // namespace dynmo::train
