// SPDX-License-Identifier: Apache-2.0
#include "tests/train/elastic_hub.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "dynmo/elastic/leader.h"

namespace dynmo::train::testing {
namespace {

constexpr std::chrono::milliseconds kNewsTime{50};  // between two looks, should no news come

// For survivors.h, each thread stands for a host of its own, whose state the hub knows.
elastic::Member on_own_host(elastic::Member member) {
  member.host = fmt::format("thread {}", member.id.value);
  return member;
}

elastic::View on_own_hosts(elastic::View view) {
  for (elastic::Member& member : view.members) member = on_own_host(std::move(member));
  return view;
}

elastic::View with_hosts_of(elastic::View view, const elastic::View& before) {
  for (elastic::Member& member : view.members) member.host = before.find(member.id)->host;
  return view;
}

}  // namespace

// Notes the first error of a group, which is what it has failed with, and damages messages.
class HubGroups::End final : public transport::Transport {
 public:
  End(std::unique_ptr<transport::Transport> inner, std::shared_ptr<State> state,
      std::vector<int> numbers)
      : inner_(std::move(inner)), state_(std::move(state)), numbers_(std::move(numbers)) {}
  transport::Member rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int number_of(transport::Member rank) const override {
    return numbers_.empty() ? rank.value : numbers_[rank.index()];
  }
  std::unique_ptr<transport::Operation> send(transport::Member to, transport::Tag tag,
                                             std::span<const std::byte> bytes) override {
    if (!std::exchange(state_->corrupts, false)) {
      return std::make_unique<Operation>(inner_->send(to, tag, bytes), state_);
    }
    std::vector<std::byte> damaged(bytes.begin(), bytes.end());
    damaged[damaged.size() / 2] ^= std::byte{1};
    auto operation = inner_->send(to, tag, damaged);
    return std::make_unique<Operation>(std::move(operation), state_, std::move(damaged));
  }
  std::unique_ptr<transport::Operation> receive(transport::Member from, transport::Tag tag,
                                                std::span<std::byte> bytes) override {
    const bool corrupts = std::exchange(state_->corrupts, false);
    return std::make_unique<Operation>(inner_->receive(from, tag, bytes), state_,
                                       std::vector<std::byte>(),
                                       corrupts ? bytes : std::span<std::byte>());
  }
  void abort(const Error& why) override { inner_->abort(why); }

 private:
  class Operation final : public transport::Operation {
   public:
    Operation(std::unique_ptr<transport::Operation> inner, std::shared_ptr<State> state,
              std::vector<std::byte> sent = {}, std::span<std::byte> damages = {})
        : sent_(std::move(sent)),
          damages_(damages),
          inner_(std::move(inner)),
          state_(std::move(state)) {}
    Expected<void> wait() override {
      Expected<void> done = inner_->wait();
      if (!done) {
        const std::lock_guard lock(state_->mutex);
        if (!state_->failure) state_->failure = done.error();
      }
      if (done && !damages_.empty()) damages_[damages_.size() / 2] ^= std::byte{1};
      return done;
    }

   private:
    std::vector<std::byte> sent_;  // outlives the operation
    std::span<std::byte> damages_;
    std::unique_ptr<transport::Operation> inner_;
    std::shared_ptr<State> state_;
  };
  std::unique_ptr<transport::Transport> inner_;
  std::shared_ptr<State> state_;
  std::vector<int> numbers_;
};

std::optional<Error> Hub::failure_of(Generation generation) const {
  if (failure_) return failure_;
  const auto found = failures_.find(generation);
  return found == failures_.end() ? std::nullopt : std::optional(found->second);
}

void Hub::note_news() {
  ++news_;
  changed_.notify_all();
}

Expected<std::unique_ptr<transport::Transport>> Hub::take_locked(Generation generation, int size,
                                                                 WorldRank rank) {
  if (const auto failure = failure_of(generation)) return *failure;
  Opening& opening = openings_[generation];
  if (opening.ends.empty()) {
    opening.ends = transport::make_in_process_group(size, {.deadline = kHang});
  }
  if (std::ssize(opening.ends) != size || opening.ends[rank.index()] == nullptr) {
    return make_error(ErrorCode::kInternal, "rank {} of {} in a group of {}, or twice", rank, size,
                      opening.ends.size());
  }
  std::unique_ptr<transport::Transport> end = std::move(opening.ends[rank.index()]);
  if (++opening.taken == size) openings_.erase(generation);
  return end;
}

Expected<std::unique_ptr<transport::Transport>> Hub::take(Generation generation, int size,
                                                          WorldRank rank) {
  const std::lock_guard lock(mutex_);
  return take_locked(generation, size, rank);
}

Expected<std::unique_ptr<transport::Transport>> Hub::meet(const elastic::View& view,
                                                          WorldRank rank) {
  Lock lock(mutex_);
  const Generation generation = view.generation;
  DYNMO_ASSIGN(std::unique_ptr<transport::Transport> end,
               take_locked(generation, view.size(), rank));
  ++met_[generation];
  note_news();
  // A member is gone that has ended, or that was called and does not answer any more (survivors.h).
  const auto gone = [&] {
    return std::ranges::find_if(view.members, [&](const elastic::Member& member) {
      return !alive_.contains(member.id) || asleep_.contains(member.id);
    });
  };
  const bool settled = changed_.wait_for(lock, kHang, [&] {
    return met_[generation] >= view.size() || failure_of(generation) ||
           gone() != view.members.end();
  });
  if (met_[generation] >= view.size()) {
    for (const elastic::MemberId member : asleep_) {
      if (!view.has(member)) left_out_.insert(member);
    }
    note_news();
    return end;
  }
  if (!settled) return make_error(ErrorCode::kPeerLost, "a rank does not come");
  if (const auto failure = failure_of(generation)) return *failure;
  const Error why =
      make_error(ErrorCode::kPeerLost, "rank {} was lost: it does not come", gone()->number);
  failures_.emplace(generation, why);
  openings_.erase(generation);
  note_news();
  return why;
}

// Whoever is the last one to come has all leave, whatever is lost after it.
Expected<void> Hub::leave(Generation generation, int size) {
  Lock lock(mutex_);
  if (left_[generation] < size) {
    if (const auto failure = failure_of(generation)) return *failure;
  }
  ++left_[generation];
  note_news();
  const bool settled = changed_.wait_for(
      lock, kHang, [&] { return failure_of(generation) || left_[generation] >= size; });
  if (left_[generation] >= size) return {};
  if (!settled) return make_error(ErrorCode::kPeerLost, "a rank does not leave its group");
  return *failure_of(generation);
}

void Hub::fail(Generation generation, const Error& why) {
  const std::lock_guard lock(mutex_);
  fail_locked(generation, why);
  for (const auto& [next, beside] : planned_) {
    if (beside == generation) fail_locked(next, why);
  }
  note_news();
}

void Hub::fail_locked(Generation generation, const Error& why) {
  failures_.emplace(generation, why);
  openings_.erase(generation);  // nobody waits for who has not come
}

void Hub::plan(Generation next, Generation beside) {
  const std::lock_guard lock(mutex_);
  planned_.emplace(next, beside);
  if (const auto why = failure_of(beside)) fail_locked(next, *why);
}

void Hub::fail(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = why;
  note_news();
}

std::optional<Error> Hub::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Hub::begin(elastic::MemberId member) {
  const std::lock_guard lock(mutex_);
  alive_.insert(member);
}

void Hub::end(elastic::MemberId member) {
  const std::lock_guard lock(mutex_);
  alive_.erase(member);
  note_news();
}

elastic::Answer Hub::ask(elastic::MemberId member) {
  const std::lock_guard lock(mutex_);
  if (!alive_.contains(member)) return {.fate = elastic::Fate::kDead};
  if (asleep_.contains(member)) return {};
  return {.fate = elastic::Fate::kAlive, .notice = notices_[member]};
}

void Hub::post(elastic::MemberId member, const std::string& notice) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(notices_[member], notice) != notice) note_news();
}

bool Hub::sleep(elastic::MemberId member) {
  Lock lock(mutex_);
  asleep_.insert(member);
  note_news();
  changed_.wait(lock, [&] {
    return failure_ || left_out_.contains(member) || alive_.size() <= asleep_.size();
  });
  asleep_.erase(member);
  note_news();
  return left_out_.contains(member);
}

std::uint64_t Hub::news() {
  const std::lock_guard lock(mutex_);
  return news_;
}

void Hub::wait_for_news(std::uint64_t seen) {
  Lock lock(mutex_);
  changed_.wait_for(lock, kNewsTime, [&] { return news_ != seen; });
}

void Hub::wait_for_end() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return alive_.empty(); });
}

std::unique_ptr<transport::Transport> HubGroups::watched(std::unique_ptr<transport::Transport> end,
                                                         Origin origin, std::vector<int> numbers) {
  next_state_ = std::make_shared<State>();
  end = std::make_unique<End>(std::move(end), next_state_, std::move(numbers));
  if (!spy_.faults) return end;
  std::vector<transport::Fault> faults = spy_.faults(*end, origin, next_state_->corrupts);
  return transport::with_faults(std::move(end), std::move(faults));
}

Expected<void> HubGroups::enter(Generation generation, int size, WorldRank rank, Origin origin,
                                std::vector<int> numbers) {
  generation_ = generation;
  size_ = size;
  DYNMO_ASSIGN(auto end, hub_.take(generation, size, rank));
  end_ = watched(std::move(end), origin, std::move(numbers));
  state_ = std::exchange(next_state_, nullptr);
  return {};
}

Expected<void> HubGroups::close(const Expected<void>& done) {
  if (end_ == nullptr) return done;
  if (done.has_value()) {
    const Expected<void> left = hub_.leave(generation_, size_);
    // The same as in_groups (c10d_groups.h): the run is done, and one was lost on its way out.
    if (left.has_value() || left.error().code == ErrorCode::kPeerLost ||
        left.error().code == ErrorCode::kInternal) {
      return {};
    }
    return left;
  }
  drop(done.error());
  Error told = done.error();
  if (told.code != ErrorCode::kPeerLost) {
    told.message = fmt::format("rank {}: {}", self_.id.value - 1, told.message);
  }
  hub_.fail(generation_, told);
  end_->abort(told);
  return done;
}

void HubGroups::fail_at(int message, std::function<bool()> excused) {
  transport::Transport& inner = *end_;
  const auto call = [&inner, excused = std::move(excused)] {
    if (!excused()) inner.abort(make_error(ErrorCode::kPeerLost, "the newcomer fails"));
  };
  end_ = transport::with_faults(
      std::move(end_), {{.kind = transport::Fault::Kind::kCall, .first = message, .call = call}});
}

void HubGroups::give_up(const Error& why) {
  if (end_ != nullptr) end_->abort(why);
  end_.reset();
}

void HubGroups::die(const std::string& how) {
  lost_ = true;
  // (Members' ids are their numbers and one more.)
  const Error why =
      make_error(ErrorCode::kPeerLost, "rank {} was lost: {}", self_.id.value - 1, how);
  hub_.end(self_.id);
  for (const Generation generation : {generation_, next_generation_}) hub_.fail(generation, why);
  for (transport::Transport* end : {end_.get(), next_.get()}) {
    if (end != nullptr) end->abort(why);
  }
  hub_.wait_for_end();
  spy_.at(Moment::kEnds);
  throw Killed();
}

void HubGroups::sleep() {
  const Error why = make_error(ErrorCode::kPeerLost, "rank {} was lost: nothing was heard of it",
                               self_.id.value - 1);
  for (const Generation generation : {generation_, next_generation_}) hub_.fail(generation, why);
  for (transport::Transport* end : {end_.get(), next_.get()}) {
    if (end != nullptr) end->abort(why);
  }
  left_out_ = hub_.sleep(self_.id);
}

bool HubGroups::asked_to_leave() const {
  spy_.at(Moment::kAsks);
  return asked_;
}

Expected<elastic::Place> HubGroups::open(const elastic::View& next) {
  spy_.at(Moment::kOpens);
  hub_.plan(next.generation, generation_);
  return elastic::Place{.generation = next.generation, .size = next.size(), .address = {}};
}

Expected<transport::Transport*> HubGroups::form(const elastic::View& next,
                                                const elastic::Place& place, const GiveUp&) {
  next_generation_ = place.generation;
  spy_.at(Moment::kForms);
  next_size_ = place.size;
  DYNMO_ASSIGN(auto end, hub_.take(place.generation, place.size, *next.rank_of(self_.id)));
  next_ = watched(std::move(end), Origin::kChange, elastic::numbers_of(next));
  spy_.at(Moment::kFormed);
  return next_.get();
}

void HubGroups::drop(const Error& why) {
  if (next_ != nullptr) {
    spy_.at(Moment::kDrops);
    next_->abort(why);
  }
  next_.reset();
  next_state_.reset();
  next_generation_ = 0;
}

Expected<bool> HubGroups::take() {
  spy_.at(Moment::kTakes);
  if (const auto left = hub_.leave(generation_, size_); !left) {
    torn_ = true;
    return left.error();
  }
  spy_.at(Moment::kTaken);
  end_ = std::move(next_);
  state_ = std::exchange(next_state_, nullptr);
  generation_ = std::exchange(next_generation_, 0);
  size_ = next_size_;
  return end_ != nullptr;
}

std::optional<Error> HubGroups::failure() const {
  if (state_ == nullptr) return std::nullopt;
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

// Does what c10d_groups.cpp does.
Expected<elastic::Survival> HubGroups::survive(const elastic::Loss& loss) {
  drop(loss.why);
  if (end_ != nullptr) end_->abort(loss.why);
  end_.reset();
  spy_.at(Moment::kSurvives);
  const elastic::View before = on_own_hosts(loss.before);
  const elastic::Loss here{
      .before = before, .generation = loss.generation, .replicas = loss.replicas, .why = loss.why};
  elastic::Survivors survivors(
      here, on_own_host(self_),
      [this](const elastic::Member& member) { return hub_.ask(member.id); }, standing_,
      /*patience=*/std::chrono::seconds(0));
  const auto until = std::chrono::steady_clock::now() + kHang;
  while (std::chrono::steady_clock::now() < until) {
    if (const auto failure = hub_.failure()) return *failure;
    if (loss.needs_nobody()) return loss.why;
    const std::uint64_t seen = hub_.news();
    survivors.look(std::chrono::steady_clock::now());
    std::optional<elastic::MeetingCall> call = survivors.heard();
    if (!call && (call = survivors.call())) {
      if (call->next.members.empty()) return loss.why;
      call->place = {.generation = call->next.generation, .size = call->next.size(), .address = {}};
      hub_.post(self_.id, text_of(*call));
    }
    if (!call || (call->waits && call->next.has(self_.id))) {
      hub_.wait_for_news(seen);
      continue;
    }
    const elastic::Survival met{with_hosts_of(call->next, loss.before), call->spares};
    const elastic::View& view = met.view;
    if (call->spares_member(self_.id)) return met;
    if (!view.has(self_.id)) {
      return make_error(ErrorCode::kPeerLost, "{}; the others go on without this rank",
                        loss.why.message);
    }
    spy_.at(Moment::kMeets);
    next_generation_ = view.generation;
    auto end = hub_.meet(view, *view.rank_of(self_.id));
    next_generation_ = 0;
    if (!end) continue;
    elastic::note_formed(standing_, call->next, before);
    hub_.post(self_.id, text_of(*call));  // for whoever was left out
    end_ = watched(*std::move(end), Origin::kLoss, elastic::numbers_of(view));
    state_ = std::exchange(next_state_, nullptr);
    generation_ = view.generation;
    size_ = view.size();
    spy_.at(Moment::kMet);
    return met;
  }
  waited_in_vain_ = true;
  return make_error(ErrorCode::kPeerLost, "{}; the others did not meet again", loss.why.message);
}

}  // namespace dynmo::train::testing
