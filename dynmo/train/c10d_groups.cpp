// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/c10d_groups.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <future>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/expected.h"
#include "dynmo/data/sampler.h"
#include "dynmo/process/kernel_ids.h"
#include "dynmo/process/sockets.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

// Time for a change between groups whose ranks are all running. The first group waits longer.
constexpr std::chrono::milliseconds kChangeTime{20000};
constexpr std::chrono::minutes kLongWork{30};        // of a rank for which the others wait
constexpr std::chrono::milliseconds kLookTime{2};    // between two checks of the survivors
constexpr std::chrono::milliseconds kAskTime{1000};  // for one process to answer
constexpr std::chrono::milliseconds kAskAgain{200};  // while the next group forms

std::atomic<bool> sigterm{false};

class WatchedOperation final : public transport::Operation {
 public:
  explicit WatchedOperation(std::unique_ptr<transport::Operation> inner)
      : inner_(std::move(inner)) {}
  Expected<void> wait() override {
    const WaitMark waits;
    return inner_->wait();
  }

 private:
  std::unique_ptr<transport::Operation> inner_;
};

// The transport of a group that another object owns and ends. If it is watched, reports all
// messages to the watch of the thread.
class Borrowed final : public transport::Transport {
 public:
  Borrowed(transport::Transport& group, bool is_watched) : group_(group), is_watched_(is_watched) {
    if (group.size() == 1) alone_.emplace();
  }
  transport::Member rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  int number_of(transport::Member rank) const override { return group_.number_of(rank); }
  std::unique_ptr<transport::Operation> send(transport::Member to, transport::Tag tag,
                                             std::span<const std::byte> bytes) override {
    return watched(group_.send(to, tag, bytes));
  }
  std::unique_ptr<transport::Operation> receive(transport::Member from, transport::Tag tag,
                                                std::span<std::byte> bytes) override {
    return watched(group_.receive(from, tag, bytes));
  }
  void abort(const Error& why) override { group_.abort(why); }

 private:
  std::unique_ptr<transport::Operation> watched(std::unique_ptr<transport::Operation> operation) {
    if (!is_watched_) return operation;
    note_progress();
    return std::make_unique<WatchedOperation>(std::move(operation));
  }

  transport::Transport& group_;
  bool is_watched_;
  std::optional<WaitMark> alone_;  // no peer waits for a rank that is alone
};

// Ends the process. The training thread may hold anything, so nothing is closed or flushed.
[[noreturn]] void end_hanging(std::chrono::milliseconds limit) {
  const std::string text = fmt::format(
      "dynmo: this rank hangs: it has neither sent nor received anything for {:g} s "
      "(pipeline.timeout_s), and ends so that the others can go on\n",
      std::chrono::duration<double>(limit).count());
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  ::_exit(exit_code(ErrorCode::kPeerLost));
}

Expected<void> guarded(const C10dGroups& groups, const std::function<Expected<void>()>& work) {
  try {
    return work();
  } catch (const CheckFailure& failure) {
    return make_error(ErrorCode::kInternal, "{}", failure.what());
  } catch (const data::ForeignShard& fault) {
    return make_error(ErrorCode::kBadInput, "{}", fault.what());
  } catch (const std::exception& fault) {
    Error error = error_of(fault);
    // Only this rank has thrown it, so the fault of its machine is no bad input of the others.
    if (groups.others_go_on()) error.code = ErrorCode::kInternal;
    return error;
  }
}

}  // namespace

elastic::Member this_member() {
  std::random_device random;
  elastic::Member member;
  member.id.value = (std::uint64_t{random()} << 32 | random()) | 1;  // 0 is no process
  member.host = process::host_name();
  member.pid = ::getpid();
  member.processes = process::process_space();
  return member;
}

MessageLimits message_limits(const config::Config& config) {
  const std::chrono::milliseconds limit(std::llround(1e3 * config.pipeline.timeout_s));
  const std::chrono::milliseconds silence(std::llround(1e3 * config.elastic.silence_s));
  if (!config.elastic.enabled) return {.message = limit, .silence = silence};
  // A dead rank is noticed by its silence, and a rank that hangs ends itself.
  const std::chrono::milliseconds message = limit + limit / 10 + std::chrono::seconds(1);
  return {.message = std::max<std::chrono::milliseconds>(message, kLongWork),
          .silence = silence,
          .hang = limit};
}

Expected<std::unique_ptr<C10dGroups>> C10dGroups::join(
    const c10d::GroupOptions& options, const elastic::Member& self, Decorate decorate,
    std::optional<std::chrono::milliseconds> hang_limit, Connect connect) {
  std::unique_ptr<C10dGroups> groups(
      new C10dGroups(options, self, std::move(decorate), std::move(connect)));
  if (hang_limit) {
    groups->hangs_ =
        std::make_unique<HangWatch>(*hang_limit, [limit = *hang_limit] { end_hanging(limit); });
  }
  DYNMO_ASSIGN(groups->now_, groups->join(options));
  groups->address_ = groups->now_.group->address();
  groups->watch_devices();
  return groups;
}

Expected<C10dGroups::Joined> C10dGroups::join(const c10d::GroupOptions& options) {
  const WaitMark waits;
  c10d::GroupOptions here = options;
  here.plane = plane_for(options.size);
  Joined joined;
  DYNMO_ASSIGN(joined.group, c10d::join_group(here));
  joined.transport = std::make_unique<Borrowed>(*joined.group, hangs_ != nullptr);
  if (decorate_) joined.transport = decorate_(std::move(joined.transport));
  if (plane_ != nullptr && options.size > 1) {
    DYNMO_ASSIGN(joined.planes, planes_of(*joined.group));
  }
  if (connect_) {
    DYNMO_ASSIGN(joined.devices, connect_(*joined.group, here));
  }
  return joined;
}

Expected<std::vector<elastic::PlanePlace>> C10dGroups::planes_of(c10d::Group& group) {
  DYNMO_TRY(plane_->listen(group.address()));
  const elastic::PlanePlace own = plane_->place();
  const Json mine = {{"address", group.address()}, {"port", own.port}};
  const std::string origin = "where a rank's control plane listens";
  DYNMO_ASSIGN(const std::vector<Json> all,
               transport::gather_json(group, transport::control_tag(transport::Control::kBarrier),
                                      mine, origin));
  std::vector<elastic::PlanePlace> places;
  for (const Json& json : all) {
    JsonObject object(json, origin);
    places.push_back({.address = object.string("address"),
                      .port = static_cast<std::uint16_t>(object.integer("port")),
                      .secret = own.secret});
    DYNMO_TRY(object.finish());
  }
  return places;
}

// Returns the control plane, which all groups of this process share. Makes it for the first group
// with other ranks.
std::shared_ptr<elastic::ControlPlane> C10dGroups::plane_for(int size) {
  if (plane_ == nullptr && size > 1) {
    plane_ = elastic::ControlPlane::start({.id = self_.id, .silence = options_.silence});
  }
  return plane_;
}

void C10dGroups::Joined::abort(const Error& why) {
  if (group == nullptr) return;
  group->abort(why);
  if (devices.channels != nullptr) devices.channels->abort(why);
}

void C10dGroups::Joined::reset() {
  devices = {};
  transport.reset();
  group.reset();
}

const c10d::NcclTransport& C10dGroups::devices_of(const transport::Transport& group) const {
  static const c10d::NcclTransport kNone;
  for (const Joined* joined : {&now_, &next_.joined}) {
    if (joined->transport.get() == &group) return joined->devices;
  }
  return kNone;
}

Expected<void> C10dGroups::close_channels() {
  return now_.devices.channels == nullptr ? Expected<void>() : now_.devices.channels->close();
}

void C10dGroups::watch_devices() {
  if (hangs_ == nullptr) return;
  const auto& channels = now_.devices.channels;
  hangs_->set_device(channels ? channels->in_flight() : nullptr);
}

bool C10dGroups::asked_to_leave() const { return sigterm.load(std::memory_order_relaxed); }

std::string C10dGroups::address() const {
  return address_.empty() ? options_.address : address_;  // this rank was alone from the start
}

// Returns the options of the next group. Requires that this rank is in it.
c10d::GroupOptions C10dGroups::options_for(const elastic::View& next) const {
  c10d::GroupOptions options;
  options.rank = *next.rank_of(self_.id);
  options.size = next.size();
  options.generation = next.generation;
  for (const elastic::Member& member : next.members) options.names.push_back(member.number);
  options.address = options_.address;
  options.own_address = address_;
  options.beside = now_.group == nullptr ? 0 : now_.group->size();
  options.join_timeout = kChangeTime;
  options.message_timeout = options_.message_timeout;
  options.silence = options_.silence;
  return options;
}

Expected<elastic::Place> C10dGroups::open(const elastic::View& next) {
  c10d::GroupOptions options = options_for(next);
  options.plane = plane_for(next.size());
  DYNMO_ASSIGN(next_.meeting, c10d::open_meeting(options));
  const c10d::MeetingPlace& place = c10d::place_of(*next_.meeting);
  return elastic::Place{.generation = next.generation,
                        .size = next.size(),
                        .address = place.address,
                        .port = place.port,
                        .secret = place.secret};
}

Expected<transport::Transport*> C10dGroups::form(const elastic::View& next,
                                                 const elastic::Place& place,
                                                 const GiveUp& give_up) {
  c10d::GroupOptions options = options_for(next);
  options.meeting_place = meeting_place(place);
  options.meeting = std::exchange(next_.meeting, nullptr);
  // Gives up if a rank of the current group is lost, because it never joins the next one.
  options.give_up = [&]() -> std::optional<Error> {
    if (auto lost = failure()) return lost;
    return give_up ? give_up() : std::nullopt;
  };
  DYNMO_ASSIGN(next_.joined, join(options));
  return next_.joined.transport.get();
}

void C10dGroups::drop(const Error& why) {
  next_.meeting.reset();
  next_.joined.abort(why);
  next_.joined.reset();
  next_.standing.reset();
}

Expected<bool> C10dGroups::take() {
  const WaitMark waits;
  DYNMO_TRY(now_.group->leave());
  // Transports end before their group. Closing Gloo's connections takes 10 ms or more.
  now_.devices = {};
  now_.transport.reset();
  closing_ =
      std::async(std::launch::async, [left = std::move(now_.group)]() mutable { left.reset(); });
  now_ = std::exchange(next_.joined, Joined());
  watch_devices();
  if (next_.standing) standing_ = *std::exchange(next_.standing, std::nullopt);
  if (now_.group != nullptr && !now_.group->address().empty()) address_ = now_.group->address();
  return now_.group != nullptr;
}

void C10dGroups::watch(const elastic::View& view) {
  if (plane_ == nullptr) return;
  std::vector<elastic::Member> beside;
  std::ranges::copy_if(view.members, std::back_inserter(beside),
                       [&](const auto& member) { return elastic::sees_process(self_, member); });
  plane_->watch(beside);
}

std::optional<Error> C10dGroups::failure() const {
  return now_.group == nullptr ? std::nullopt : now_.group->failure();
}

std::optional<std::chrono::steady_clock::time_point> C10dGroups::failed_at() const {
  if (!failure()) return std::nullopt;
  return now_.group->failed_at();
}

Expected<void> C10dGroups::meet_again(elastic::Survivors& survivors,
                                      const elastic::MeetingCall& call,
                                      const elastic::View& before) {
  auto asked = std::chrono::steady_clock::now();
  const GiveUp give_up = [&]() -> std::optional<Error> {
    end_stopped(call.next, self_);
    const auto now = std::chrono::steady_clock::now();
    if (now - asked > kAskAgain) {
      survivors.look(now);
      asked = now;
    }
    return survivors.misses(call.next);
  };
  // (No rank has joined before all are present.)
  DYNMO_TRY(form(call.next, call.place, give_up));
  elastic::Standing mine = standing_;
  mine.open.push_back(before);  // ranks may have had different current views
  const std::string origin = "the views that count for a rank";
  DYNMO_ASSIGN(const std::vector<Json> all,
               transport::gather_json(*next_.joined.transport,
                                      transport::control_tag(transport::Control::kBarrier),
                                      elastic::to_json(mine), origin));
  for (const Json& json : all) {
    DYNMO_ASSIGN(const elastic::Standing theirs, elastic::parse_standing(json, origin));
    elastic::merge(standing_, theirs);
  }
  elastic::note_formed(standing_, call.next, before);
  now_ = std::exchange(next_.joined, Joined());
  watch_devices();
  return {};
}

elastic::Answer C10dGroups::ask(const elastic::Member& member) const {
  const auto place = places_.find(member.id);
  return place == places_.end() ? elastic::Answer()
                                : plane_->ask(place->second, member.id, kAskTime);
}

Expected<elastic::Survival> C10dGroups::survive(const elastic::Loss& loss) {
  const WaitMark waits;
  drop(loss.why);
  now_.abort(loss.why);
  now_.reset();
  const std::vector<elastic::PlanePlace> planes = std::exchange(now_.planes, {});
  std::erase_if(places_, [&](const auto& one) {
    return std::ranges::none_of(standing_.open,
                                [&](const elastic::View& view) { return view.has(one.first); });
  });
  for (std::size_t rank = 0; rank < planes.size(); ++rank) {
    places_[loss.before.members[rank].id] = planes[rank];
  }
  elastic::Survivors survivors(
      loss, self_, [this](const elastic::Member& member) { return ask(member); }, standing_,
      options_.silence);
  const auto start = std::chrono::steady_clock::now();
  const auto searched = [&] { return std::chrono::steady_clock::now() - start; };
  // A rank that answers notices the loss after its work, or hangs.
  const auto longest = kSurviveTime + (hangs_ ? hangs_->limit() : std::chrono::milliseconds(0));
  while (searched() < (survivors.unknown().empty() ? longest : kSurviveTime)) {
    if (loss.needs_nobody()) return loss.why;
    end_stopped(loss.before, self_);
    survivors.look(std::chrono::steady_clock::now());
    std::optional<elastic::MeetingCall> call = survivors.heard();
    if (!call && (call = survivors.call())) {
      if (call->next.members.empty()) return loss.why;
      if (!call->waits) {
        DYNMO_ASSIGN(call->place, open(call->next));
      }
      plane_->post(text_of(*call));
    }
    if (!call || (call->waits && call->next.has(self_.id))) {
      std::this_thread::sleep_for(kLookTime);
      continue;
    }
    if (call->spares_member(self_.id)) return elastic::Survival{call->next, call->spares};
    if (!call->next.has(self_.id)) {
      return make_error(ErrorCode::kPeerLost,
                        "{}; this rank did not answer the others, which go on without it",
                        loss.why.message);
    }
    const Expected<void> met = meet_again(survivors, *call, loss.before);
    if (met) {
      plane_->post(text_of(*call));  // for ranks that were left out
      return elastic::Survival{call->next, call->spares};
    }
    drop(met.error());
  }
  const std::string unknown = survivors.unknown();
  if (unknown.empty()) {
    return make_error(ErrorCode::kPeerLost, "{}; the others did not meet again within {:.0f} s",
                      loss.why.message, std::chrono::duration<double>(searched()).count());
  }
  return make_error(
      ErrorCode::kPeerLost,
      "{}; {} did not answer for {} s, and may still live: those that do are not more than half",
      loss.why.message, unknown, kSurviveTime.count());
}

Expected<void> C10dGroups::may_change(const elastic::View& next) {
  for (const elastic::View& view : standing_.open) {
    for (const elastic::Member& member : view.members) {
      if (next.has(member.id) || elastic::is_dead(standing_, member.id)) continue;
      if (ask(member).fate == elastic::Fate::kDead) elastic::note_dead(standing_, member.id);
    }
    if (elastic::has_quorum(view, next, standing_)) continue;
    return make_error(ErrorCode::kInfeasible,
                      "ranks that were left out may still live: more than half of the {} ranks "
                      "that there were before have to stay",
                      view.size());
  }
  return {};
}

Json C10dGroups::standing(const elastic::View& next) const {
  elastic::Standing theirs = standing_;
  theirs.open = elastic::open_ends(standing_.open, next, standing_);
  return elastic::to_json(theirs);
}

Expected<void> C10dGroups::know(const Json& standing) {
  DYNMO_ASSIGN(elastic::Standing theirs, elastic::parse_standing(standing, "the views that count"));
  (next_.joined.group == nullptr ? standing_ : next_.standing.emplace()) = std::move(theirs);
  return {};
}

c10d::MeetingPlace meeting_place(const elastic::Place& place) {
  return {.address = place.address, .port = place.port, .secret = place.secret};
}

Expected<void> in_groups(C10dGroups& groups, const std::function<Expected<void>()>& work) {
  const Expected<void> done = guarded(groups, work);
  const WaitMark waits;
  if (groups.in_force() == nullptr) return done;  // has left already
  if (done.has_value()) {
    Expected<void> left = groups.close_channels();
    if (left.has_value()) left = groups.in_force()->leave();
    // The run is complete. If leaving fails, a rank was lost at the end, or failed and reports its
    // own error.
    if (left.has_value() || left.error().code == ErrorCode::kPeerLost ||
        left.error().code == ErrorCode::kInternal) {
      return {};
    }
    return left;
  }
  if (done.error().code == ErrorCode::kInterrupted) {  // all ranks stop alike between two steps
    DYNMO_TRY(groups.close_channels());
    DYNMO_TRY(groups.in_force()->leave());
    return done.error();
  }
  groups.drop(done.error());
  groups.end_for_all(done.error());
  return done.error();
}

void leave_on_sigterm() {
  struct sigaction action {};
  action.sa_handler = [](int) { sigterm.store(true, std::memory_order_relaxed); };
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGUSR1, &action, nullptr);  // Slurm's warning that the time is up (sbatch --signal)
}

bool end_on_sigterm() {
  std::signal(SIGTERM, SIG_DFL);
  std::signal(SIGUSR1, SIG_DFL);
  return sigterm.load(std::memory_order_relaxed);
}

}  // namespace dynmo::train
