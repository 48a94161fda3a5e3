// SPDX-License-Identifier: Apache-2.0
// What the leader of an elastic run alone does, and how another rank becomes it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/process/late_ranks.h"
#include "dynmo/train/resizing_impl.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

constexpr std::chrono::seconds kGrowTime{120};  // for ranks that were started to join

}  // namespace

void Resizing::give_up_growing() {
  if (!growing_) return;
  if (const std::vector<int> ended = process::take_ended_ranks(); !ended.empty()) {
    answer(growing_->client,
           elastic::refusal(make_error(
               ErrorCode::kPeerLost,
               "{} of {} ranks that were started ended before they had joined, with exit code {}; "
               "`dynmo train` has printed why",
               ended.size(), growing_->wanted, ended.front())));
    growing_.reset();
    return;
  }
  if (std::chrono::steady_clock::now() < growing_->until) return;
  answer(growing_->client,
         elastic::refusal(make_error(
             ErrorCode::kPeerLost, "{} of {} ranks that were started did not join within {} s",
             growing_->wanted - growing_->joined, growing_->wanted, kGrowTime.count())));
  growing_.reset();
}

// An address in the settings is one of the host where the run began, and the one that its ranks
// meet at: so it need not be known here.
Expected<void> Resizing::open_service(int first_member, const std::string& secret) {
  const std::string meets_at = groups_.address();
  ControlService::Options options{.run = config_.run.directory,
                                  .group_address = meets_at,
                                  .leader = self(),
                                  .config = to_toml(config_),
                                  .build = [this] { return this_build(config_, inputs_); },
                                  .first_member = first_member,
                                  .secret = secret,
                                  .replicas = static_cast<int>(config_.pipeline.replicas)};
  if (config_.elastic.listen != "loopback") options.address = meets_at;
  DYNMO_ASSIGN(service_, ControlService::open(std::move(options)));
  return {};
}

void Resizing::open_releases() {
  const Config::Elastic& elastic = config_.elastic;
  releases_.emplace(elastic::ReleaseOptions{
      .command = elastic.release_command,
      .timeout = std::chrono::milliseconds(std::llround(1e3 * elastic.release_timeout_s)),
      .run = config_.run.directory});
}

void Resizing::take_own(std::vector<Wish>& wishes) {
  for (const Wish& wish : wishes) {
    if (wish.kind == elastic::RequestKind::kGrow) grow(wish);
    if (wish.kind != elastic::RequestKind::kRelease) continue;
    const int again = releases_->try_again();
    answer(wish.client,
           again > 0 ? done(fmt::format("{} tried again",
                                        again == 1 ? std::string("a release is")
                                                   : fmt::format("{} releases are", again)))
                     : elastic::refusal(make_error(ErrorCode::kBadInput, "no release is parked")));
  }
  std::erase_if(wishes, [](const Wish& wish) {
    return wish.kind == elastic::RequestKind::kGrow || wish.kind == elastic::RequestKind::kRelease;
  });
}

void Resizing::grow(const Wish& wish) {
  const int ranks = wish.ranks * static_cast<int>(config_.pipeline.replicas);
  Expected<void> asked;
  if (growing_) {
    asked = make_error(ErrorCode::kBadInput,
                       "{} of {} ranks that were started have not joined yet: ask again",
                       growing_->wanted - growing_->joined, growing_->wanted);
  } else {
    static_cast<void>(process::take_ended_ranks());  // of an earlier request that was given up
    asked = process::ask_for_ranks(ranks);
  }
  if (!asked) return answer(wish.client, elastic::refusal(asked.error()));
  growing_ = Growing{.client = wish.client,
                     .wanted = ranks,
                     .until = std::chrono::steady_clock::now() + kGrowTime};
}

void Resizing::note_grown(int joined, const std::string& line) {
  if (!growing_) return;
  growing_->joined += joined;
  if (growing_->joined < growing_->wanted) return;
  answer(growing_->client, done(line));
  growing_.reset();
}

std::string Resizing::handover() {
  const elastic::Releases::Open open = releases_->open();
  Json releases = Json::array();
  for (const auto* some : {&open.waiting, &open.parked}) {
    for (const elastic::Release& release : *some) {
      Json released = Json::array();
      for (const elastic::Member& member : release.released) {
        released.push_back(elastic::to_json(member));
      }
      releases.push_back({{"number", release.number},
                          {"calls", release.calls},
                          {"calls_before", release.calls_before},
                          {"parked", some == &open.parked},
                          {"released", std::move(released)}});
    }
  }
  return Json{{"secret", service_->secret()},
              {"next_member", service_->next_member()},
              {"last_release", open.last_number},
              {"releases", std::move(releases)},
              {"status", status_},
              {"known", tell_.known()}}
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

Expected<void> Resizing::lead(const std::string& handover) {
  const std::string origin = "what the leader before hands over";
  DYNMO_ASSIGN(const Json json, parse_json(handover, origin));
  JsonObject object(json, origin);
  elastic::Releases::Open open{.last_number = object.integer("last_release")};
  for (JsonObject& each : object.objects("releases")) {
    elastic::Release release{.number = each.integer("number"),
                             .calls = static_cast<int>(each.integer("calls")),
                             .calls_before = static_cast<int>(each.integer("calls_before"))};
    const bool parked = each.boolean("parked");
    for (JsonObject& one : each.objects("released")) {
      DYNMO_ASSIGN(elastic::Member member, elastic::parse_member(one));
      release.released.push_back(std::move(member));
    }
    DYNMO_TRY(each.finish());
    (parked ? open.parked : open.waiting).push_back(std::move(release));
  }
  const std::string secret = object.string("secret");
  const auto next_member = static_cast<int>(object.integer("next_member"));
  for (const char* key : {"status", "known"}) object.ignore(key);
  DYNMO_TRY(object.finish());
  DYNMO_CHECK(json.contains("status") && json.contains("known"), "all of a handover, got {}",
              handover);
  status_ = json["status"];
  DYNMO_TRY(tell_.lead(json["known"]));
  open_releases();
  releases_->take_over(std::move(open));
  DYNMO_TRY(open_service(next_member, secret));
  service_->set_status(status_);
  return {};
}

Expected<elastic::JobFile> Resizing::hear_door(const elastic::View& next) {
  const bool is_mine = next.members.front().id == groups_.self().id;
  DYNMO_ASSIGN(const auto texts,
               transport::gather_texts(group(), transport::control_tag(transport::Control::kSize),
                                       is_mine ? elastic::to_json(service_->door()).dump() : ""));
  for (const std::string& text : texts) {
    if (!text.empty()) return elastic::parse_job(text, "where the next leader listens");
  }
  return make_error(ErrorCode::kInternal, "no rank says where the next leader listens");
}

// Of a leader that has left; another one has opened the door already.
void Resizing::retire(const SizeChange& change, const std::string& line, std::int64_t step,
                      const elastic::JobFile& next_door) {
  answer(change.client, done(line));
  if (growing_) answer(growing_->client, done("the ranks were started: they join another leader"));
  service_->hand_over(next_door);
  service_.reset();
  releases_->forget_open();
  tell_releases(releases_->finish(kLastHooks), step);
}

}  // namespace dynmo::train
