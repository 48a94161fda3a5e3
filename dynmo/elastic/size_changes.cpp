// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/size_changes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/fields.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/plan/pack.h"
#include "dynmo/transport/hosts.h"

namespace dynmo::elastic {
namespace {

Reply refused(std::string why) {
  return {.code = ErrorCode::kBadInput, .done = false, .text = std::move(why)};
}

std::string on_already(int ranks) {
  return fmt::format("the run is on {} {} already", ranks, ranks == 1 ? "rank" : "ranks");
}

// Returns a replica's positions as a cluster. Positions whose ranks share their hosts are on one
// node.
cost::Cluster hosts_of(const View& view, int positions) {
  std::vector<std::string> hosts;
  for (const Member& member : view.members) hosts.push_back(member.host);
  cost::Cluster cluster = cost::equal_ranks(positions);
  const std::vector<int> nodes = transport::nodes_of(hosts, positions);
  for (std::size_t p = 0; p < nodes.size(); ++p) cluster.ranks[p].node = nodes[p];
  return cluster;
}

std::vector<Rank> all_positions(const plan::Plan& plan) {
  std::vector<Rank> all;
  for (int i = 0; i < plan.ranks; ++i) all.emplace_back(i);
  return all;
}

int number_of(RequestKind kind) { return static_cast<int>(kind); }
Expected<RequestKind> kind_of(int number) { return static_cast<RequestKind>(number); }

}  // namespace

void list_fields(IsA<ClientRequest> auto& request, auto& visit) {
  visit.mapped("kind", request.kind, number_of, kind_of);
  visit("client", request.client);
  visit("ranks", request.ranks);
  visit("member", request.member);
}

void list_fields(IsA<Newcomer> auto& newcomer, auto& visit) {
  visit("client", newcomer.client);
  visit("member", newcomer.member);
}

void list_fields(IsA<RankRequest> auto& request, auto& visit) {
  visit("leave", request.leave);
  visit("requests", request.requests);
  visit("newcomers", request.newcomers);
}

Json to_json(const RankRequest& request) {
  if (!request.leave && request.requests.empty() && request.newcomers.empty()) return nullptr;
  return write_list(request);
}

Expected<RankRequest> parse_rank_request(const Json& json) {
  if (json.is_null()) return RankRequest();
  return parse_fields<RankRequest>(json, "what a rank asks for between two steps");
}

View view_after(const SizeChange& change, const View& view, int replicas) {
  const auto positions = view.members.size() / static_cast<std::size_t>(replicas);
  const auto joining = std::ssize(change.newcomers) / replicas;
  View next;
  auto newcomer = change.newcomers.begin();
  for (int replica = 0; replica < replicas; ++replica) {
    for (const Rank position : change.kept) {
      next.members.push_back(
          view.members[static_cast<std::size_t>(replica) * positions + position.index()]);
    }
    for (std::ptrdiff_t i = 0; i < joining; ++i) next.members.push_back((newcomer++)->member);
  }
  return next;
}

BoundaryDecision SizeChanges::next(const std::vector<RankRequest>& requests, const View& view,
                                   const plan::Plan& plan, std::int64_t step, bool costs_known) {
  BoundaryDecision decision;
  if (packed_ && plan.ranks <= options_.pack_ranks) has_been_packed_ = true;
  decision.change = std::exchange(deferred_, std::nullopt);
  if (decision.change &&
      !decision.change->newcomers.empty()) {  // some may have left while it waited
    decision.change->newcomers =
        requests.empty() ? std::vector<Newcomer>() : requests.front().newcomers;
    if (decision.change->newcomers.empty() && std::ssize(decision.change->kept) == plan.ranks) {
      decision.change.reset();
    }
  }
  if (!requests.empty()) {
    for (const ClientRequest& request : requests.front().requests)
      add(request, view, plan, decision);
  }
  const auto asked = [](const RankRequest& request) { return request.leave; };
  if (!requests.empty() && std::all_of(requests.begin(), requests.end(), asked)) {
    if (!decision.stop) decision.stop = "all ranks were asked to leave";
    return decision;
  }
  for (std::size_t place = 0; place < requests.size(); ++place) {
    if (asked(requests[place]) && tries_again(view.members[place].id, step)) {
      drain(static_cast<int>(place), view, plan, decision, 0);
    }
  }
  // Newcomers learn their places from the rank that leads now.
  if (decision.change && decision.change->kept.front() != Rank(0))
    decision.change->newcomers.clear();
  if (decision.stop || decision.change) return decision;
  if (!requests.empty() && !requests.front().newcomers.empty()) {
    decision.change = SizeChange{
        .kept = all_positions(plan),
        .newcomers = requests.front().newcomers,
        .why = fmt::format("{} joined",
                           requests.front().newcomers.size() == 1 ? "a rank has" : "ranks have")};
    return decision;
  }
  if (costs_known && !packed_ && options_.pack_ranks > 0) {
    packed_ = true;
    if (options_.pack_ranks < plan.ranks) {
      pack(static_cast<int>(options_.pack_ranks), view, plan, decision, 0);
      return decision;
    }
  }
  return decision;
}

void SizeChanges::add(const ClientRequest& request, const View& view, const plan::Plan& plan,
                      BoundaryDecision& decision) {
  switch (request.kind) {
    case RequestKind::kStop:
      decision.stop = "dynmo ctl stop";
      decision.wait_for_stop.push_back(request.client);
      return;
    case RequestKind::kCheckpoint:
      decision.checkpoint = true;
      decision.wait_for_checkpoint.push_back(request.client);
      return;
    case RequestKind::kPack:
      return pack(request.ranks, view, plan, decision, request.client);
    case RequestKind::kDrain: {
      const auto found =
          std::find_if(view.members.begin(), view.members.end(),
                       [&](const Member& member) { return member.number == request.member; });
      if (found == view.members.end()) {
        std::vector<int> numbers;
        for (const Member& member : view.members) numbers.push_back(member.number);
        decision.answers.push_back(
            {request.client, refused(fmt::format("there is no rank {}: wanted one of {}",
                                                 request.member, fmt::join(numbers, ", ")))});
        return;
      }
      return drain(static_cast<int>(found - view.members.begin()), view, plan, decision,
                   request.client);
    }
    case RequestKind::kGrow:  // for the leader only
    case RequestKind::kRelease:
    case RequestKind::kStatus:
    case RequestKind::kConfig:
    case RequestKind::kJoin:
      return;
  }
}

// Removes a rank of the group, and so its position in all replicas.
void SizeChanges::drain(int place, const View& view, const plan::Plan& plan,
                        BoundaryDecision& decision, process::ClientId client) {
  const int number = view.members[static_cast<std::size_t>(place)].number;
  const Rank position(place % plan.ranks);
  std::vector<Rank> kept = decision.change ? decision.change->kept : all_positions(plan);
  if (std::erase(kept, position) == 0) {
    if (client != 0)
      decision.answers.push_back({client, refused(fmt::format("rank {} leaves already", number))});
    return;
  }
  if (std::ssize(kept) < options_.ranks_min) {
    decision.answers.push_back(
        {client, refused(fmt::format("rank {} cannot leave: elastic.ranks_min is {}", number,
                                     options_.ranks_min))});
    return;
  }
  if (decision.change && decision.change->client != 0 && client != 0) {
    decision.answers.push_back({client, refused("another change is under way: ask again")});
    return;
  }
  SizeChange& change = decision.change ? *decision.change : decision.change.emplace();
  change.kept = std::move(kept);
  change.why += fmt::format("{}rank {} was drained", change.why.empty() ? "" : ", ", number);
  if (client != 0) change.client = client;
}

void SizeChanges::pack(int ranks, const View& view, const plan::Plan& plan,
                       BoundaryDecision& decision, process::ClientId client) {
  const auto refuse = [&](std::string why) {
    decision.answers.push_back({client, refused(std::move(why))});
  };
  if (decision.change) return refuse("another change is under way: ask again");
  if (ranks == plan.ranks) {
    decision.answers.push_back({client, {.done = true, .text = on_already(ranks)}});
    return;
  }
  if (ranks > plan.ranks) {
    return refuse(fmt::format("pack is {}, wanted at most {}: {}; `dynmo ctl RUN grow` starts more",
                              ranks, plan.ranks, on_already(plan.ranks)));
  }
  if (ranks < options_.ranks_min) {
    return refuse(fmt::format("pack is {}, wanted elastic.ranks_min = {} or more", ranks,
                              options_.ranks_min));
  }
  decision.change = SizeChange{.kept = plan::ranks_to_keep(hosts_of(view, plan.ranks), ranks),
                               .why = fmt::format("packed onto {} ranks", ranks),
                               .client = client};
}

bool SizeChanges::tries_again(MemberId member, std::int64_t step) {
  const auto [found, first] = tried_.try_emplace(member, step);
  if (!first && step - found->second < options_.release_after) return false;
  found->second = step;
  return true;
}

SizeChange change_of(const control::Release& release, const plan::Plan& plan) {
  const auto released = plan.ranks - std::ssize(release.kept);
  return {.kept = release.kept,
          .why = fmt::format("{} without layers for {} steps",
                             released == 1 ? "a rank was" : fmt::format("{} ranks were", released),
                             release.idle_steps)};
}

Json SizeChanges::state() const {
  DYNMO_CHECK(!deferred_, "no change that waits, got '{}'", deferred_->why);
  Json tried = Json::array();
  for (const auto& [member, step] : tried_) tried.push_back({{"id", member.value}, {"step", step}});
  Json state = {{"tried", std::move(tried)}, {"packed", packed_}};
  if (has_been_packed_) state["has_been_packed"] = true;
  return state;
}

Expected<void> SizeChanges::restore(const Json& state) {
  try {
    SizeChanges read(options_);
    for (const Json& each : state.at("tried")) {
      read.tried_.emplace(MemberId{each.at("id").get<std::uint64_t>()},
                          each.at("step").get<std::int64_t>());
    }
    read.packed_ = state.at("packed").get<bool>();
    read.has_been_packed_ = state.value("has_been_packed", false);
    *this = std::move(read);
    return {};
  } catch (const Json::exception& fault) {
    return make_error(ErrorCode::kInternal, "what decides changes of size cannot be read: {}",
                      fault.what());
  }
}

}  // namespace dynmo::elastic
