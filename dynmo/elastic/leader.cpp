// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/leader.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "dynmo/core/fields.h"
#include "dynmo/process/late_ranks.h"

namespace dynmo::elastic {
namespace {

constexpr std::chrono::seconds kGrowTime{120};  // for ranks that were started to join

const char* text_of(ReleaseOutcome outcome) {
  switch (outcome) {
    case ReleaseOutcome::kDone:
      return "done";
    case ReleaseOutcome::kNotNow:
      return "not now";
    case ReleaseOutcome::kParked:
      break;
  }
  return "parked";
}

// Returns whether another process may succeed where one ended with this code: it was killed, or has
// lost the others.
bool may_start_again(int code) {
  return code == exit_code(ErrorCode::kPeerLost) || code == 128 + SIGKILL;
}

void append(const std::vector<ReleaseNews>& news, BoundaryEvents& events) {
  for (const ReleaseNews& each : news) {
    std::vector<int> released;
    for (const Member& member : each.release.released) released.push_back(member.number);
    events.push_back({.kind = "release",
                      .line = each.line,
                      .json = {{"number", each.release.number},
                               {"ranks", released},
                               {"outcome", text_of(each.outcome)},
                               {"text", each.line}}});
  }
}

// The state that the next leader takes over.
struct Handover {
  std::string secret;
  int next_member = 0;
  std::int64_t last_release = 0;
  struct OpenRelease {
    Release release;
    bool parked = false;
  };
  std::vector<OpenRelease> releases = {};
  Json status = nullptr;
};

void list_handover(auto& handover, auto& visit) {
  visit("secret", handover.secret);
  visit("next_member", handover.next_member);
  visit("last_release", handover.last_release);
  visit.each("releases", handover.releases, [](auto& open, auto& inner) {
    inner("number", open.release.number);
    inner("calls", open.release.calls);
    inner("calls_before", open.release.calls_before);
    inner("parked", open.parked);
    inner("released", open.release.released);
  });
  visit.any("status", handover.status);
}

}  // namespace

std::vector<int> numbers_of(const View& view) {
  std::vector<int> numbers;
  for (const Member& member : view.members) numbers.push_back(member.number);
  return numbers;
}

Expected<std::unique_ptr<Leader>> Leader::open(Options options, const Json& handover) {
  std::unique_ptr<Leader> leader(new Leader(std::move(options.releases), options.service.replicas));
  if (!handover.is_null()) {
    JsonObject object(handover, "what the leader before hands over");
    Handover read;
    FieldReader reader(object);
    list_handover(read, reader);
    DYNMO_TRY(object.finish());
    options.service.secret = read.secret;
    options.service.first_member = read.next_member;
    Releases::Open open{.last_number = read.last_release};
    for (Handover::OpenRelease& each : read.releases) {
      (each.parked ? open.parked : open.waiting).push_back(std::move(each.release));
    }
    leader->releases_->take_over(std::move(open));
    if (!read.status.is_null()) leader->status_ = std::move(read.status);
  }
  DYNMO_ASSIGN(leader->service_, ControlService::open(std::move(options.service)));
  leader->service_->set_status(leader->status_);
  return leader;
}

Expected<void> Leader::publish() {
  const Expected<void> published = service_->publish();
  unpublished_ = !published;
  return published;
}

void Leader::take_requests(RankRequest& mine) {
  mine.requests = service_->take();
  for (const ClientRequest& request : mine.requests) {
    if (request.kind == RequestKind::kGrow) grow(request);
    if (request.kind == RequestKind::kRelease) try_releases_again(request);
  }
  std::erase_if(mine.requests, [](const ClientRequest& request) {
    return request.kind == RequestKind::kGrow || request.kind == RequestKind::kRelease;
  });
  mine.newcomers = service_->newcomers();
}

void Leader::try_releases_again(const ClientRequest& request) {
  const int again = releases_->try_again();
  if (again == 0) {
    return answer(request.client,
                  refusal(make_error(ErrorCode::kBadInput, "no release is parked")));
  }
  answer(request.client, done(again == 1 ? std::string("a release is tried again")
                                         : fmt::format("{} releases are tried again", again)));
}

void Leader::grow(const ClientRequest& request) {
  const int ranks = request.ranks * replicas_;
  Expected<void> asked;
  if (growing_) {
    asked = make_error(ErrorCode::kBadInput,
                       "{} of {} ranks that were started have not joined yet: ask again",
                       growing_->wanted - growing_->joined, growing_->wanted);
  } else {
    // Forgets the ranks of an earlier request that was given up.
    static_cast<void>(process::take_ended_ranks());
    asked = process::ask_for_ranks(ranks);
  }
  if (!asked) return answer(request.client, refusal(asked.error()));
  growing_ = Growing{.client = request.client,
                     .wanted = ranks,
                     .until = std::chrono::steady_clock::now() + kGrowTime};
}

BoundaryEvents Leader::poll(Hooks next) {
  BoundaryEvents events;
  append(releases_->poll(next), events);
  if (unpublished_ && publish()) {
    events.push_back({.line = "job.json and secret are written: clients find the leader again"});
  }
  if (const auto why = service_->take_failure()) {
    events.push_back({.line = fmt::format("dynmo ctl and joins: {}", *why)});
  }
  give_up_growing();
  return events;
}

void Leader::give_up_growing() {
  const std::vector<int> ended = process::take_ended_ranks();
  if (!growing_) {
    failed_starts_ += static_cast<int>(std::ranges::count_if(ended, may_start_again));
    return;
  }
  if (!ended.empty()) {
    answer(growing_->client,
           refusal(make_error(ErrorCode::kPeerLost,
                              "{} of {} ranks that were started ended before they had joined, with "
                              "exit code {}; `dynmo train` has printed why",
                              ended.size(), growing_->wanted, ended.front())));
  } else if (std::chrono::steady_clock::now() >= growing_->until) {
    answer(growing_->client,
           refusal(make_error(
               ErrorCode::kPeerLost, "{} of {} ranks that were started did not join within {} s",
               growing_->wanted - growing_->joined, growing_->wanted, kGrowTime.count())));
  } else {
    return;
  }
  growing_.reset();
}

void Leader::wait_for_checkpoint(const std::vector<process::ClientId>& clients) {
  wait_for_checkpoint_.insert(wait_for_checkpoint_.end(), clients.begin(), clients.end());
}

void Leader::answer_checkpoints(const Expected<void>& written) {
  for (const process::ClientId client : wait_for_checkpoint_) {
    answer(client, written ? done("the checkpoint is written") : refusal(written.error()));
  }
  wait_for_checkpoint_.clear();
}

void Leader::set_step(const Json& figures) { status_.update(figures); }

void Leader::set_group(const View& view, const plan::Plan& plan) {
  Json members = Json::array();
  for (const Member& member : view.members) {
    const Rank position(static_cast<int>(members.size()) % plan.ranks);
    int layers = 0;
    for (const int stage : plan.stages_of(position)) {
      layers += plan.stages[static_cast<std::size_t>(stage)].layers.count;
    }
    members.push_back(
        {{"rank", member.number}, {"host", member.host}, {"pid", member.pid}, {"layers", layers}});
  }
  status_["generation"] = plan.generation;
  status_["plan"] = plan::to_string(plan);
  status_["ranks"] = std::move(members);
  status_["standbys"] = service_->newcomers().size();
  service_->set_status(status_);
}

void Leader::admit(const SizeChange& change, const View& next, const Place& place) {
  for (const Newcomer& newcomer : change.newcomers) {
    Place theirs = place;
    theirs.rank = *next.rank_of(newcomer.member.id);
    theirs.member = newcomer.member.number;
    theirs.numbers = numbers_of(next);
    service_->admit(newcomer.client, theirs);
  }
}

void Leader::note_change(const View& before, const View& now, int joined, const std::string& line) {
  std::vector<Member> ended;
  for (const Member& member : before.members) {
    if (!now.has(member.id)) ended.push_back(member);
  }
  if (ended.empty()) {
    releases_->set_running(now.members);
  } else {
    releases_->release(std::move(ended), now.members);
  }
  if (!growing_) return;
  growing_->joined += joined;
  if (growing_->joined < growing_->wanted) return;
  answer(growing_->client, done(line));
  growing_.reset();
}

Json Leader::handover() const {
  const Releases::Open open = releases_->open();
  Handover handover{.secret = service_->secret(),
                    .next_member = service_->next_member(),
                    .last_release = open.last_number,
                    .status = status_};
  for (const Release& release : open.waiting) handover.releases.push_back({release, false});
  for (const Release& release : open.parked) handover.releases.push_back({release, true});
  Json json = Json::object();
  FieldWriter writer(json);
  list_handover(handover, writer);
  return json;
}

void Leader::retire(const JobFile& next, process::ClientId client, const Reply& reply) {
  if (growing_) answer(growing_->client, done("the ranks were started: they join another leader"));
  growing_.reset();
  service_->hand_over(next);  // before the reply, so that its client finds the new leader
  answer(client, reply);
  service_.reset();
  releases_->forget_open();
}

BoundaryEvents Leader::finish(std::chrono::milliseconds at_most,
                              const std::function<bool()>& hurry) {
  BoundaryEvents events;
  append(releases_->finish(at_most, hurry), events);
  return events;
}

}  // namespace dynmo::elastic
