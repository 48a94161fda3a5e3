// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/c10d_groups.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/exception_error.h"
#include "dynmo/data/sampler.h"

namespace dynmo::train {
namespace {

// A change of groups among ranks that are there; the first group waits longer for its ranks.
constexpr std::chrono::milliseconds kChangeTime{30000};

std::atomic<bool> sigterm{false};

// The transport of a group that somebody else owns and ends.
class Borrowed final : public transport::Transport {
 public:
  explicit Borrowed(transport::Transport& group) : group_(group) {}
  transport::Member rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  std::unique_ptr<transport::Operation> send(transport::Member to, transport::Tag tag,
                                             std::span<const std::byte> bytes) override {
    return group_.send(to, tag, bytes);
  }
  std::unique_ptr<transport::Operation> receive(transport::Member from, transport::Tag tag,
                                                std::span<std::byte> bytes) override {
    return group_.receive(from, tag, bytes);
  }
  void abort(const Error& why) override { group_.abort(why); }

 private:
  transport::Transport& group_;
};

Expected<void> guarded(const std::function<Expected<void>()>& work) {
  try {
    return work();
  } catch (const CheckFailure& failure) {
    return make_error(ErrorCode::kInternal, "{}", failure.what());
  } catch (const data::ForeignShard& fault) {
    return make_error(ErrorCode::kBadInput, "{}", fault.what());
  } catch (const std::exception& fault) {
    return error_of(fault);
  }
}

}  // namespace

elastic::Member this_member() {
  std::random_device random;
  elastic::Member member;
  member.id.value = (std::uint64_t{random()} << 32 | random()) | 1;  // 0 is nobody
  std::array<char, 256> name{};
  member.host = ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
  member.pid = ::getpid();
  return member;
}

Expected<std::unique_ptr<C10dGroups>> C10dGroups::join(const runtime::GroupOptions& options,
                                                       const elastic::Member& self,
                                                       Decorate decorate) {
  std::unique_ptr<C10dGroups> groups(new C10dGroups(options, self, std::move(decorate)));
  DYNMO_TRY(groups->open());
  return groups;
}

Expected<void> C10dGroups::open() {
  DYNMO_ASSIGN(group_, runtime::join_group(options_));
  transport_ = std::make_unique<Borrowed>(*group_);
  if (decorate_) transport_ = decorate_(std::move(transport_));
  return {};
}

bool C10dGroups::asked_to_leave() const { return sigterm.load(std::memory_order_relaxed); }

elastic::Place C10dGroups::place_in(const elastic::View& view) const {
  return {.generation = view.generation,
          .size = view.size(),
          .address = options_.address,
          .port = options_.port,
          .attempt = options_.attempt};
}

Expected<std::optional<WorldRank>> C10dGroups::change(const elastic::View& next) {
  DYNMO_TRY(group_->leave());
  options_.store = group_->store();
  transport_.reset();
  group_.reset();
  const std::optional<WorldRank> mine = next.rank_of(self_.id);
  if (!mine) return mine;
  options_.rank = *mine;
  options_.size = next.size();
  options_.generation = next.generation;
  options_.join_timeout = kChangeTime;
  options_.names.clear();
  for (const elastic::Member& member : next.members) options_.names.push_back(member.number);
  DYNMO_TRY(open());
  return mine;
}

Expected<void> in_groups(C10dGroups& groups, const std::function<Expected<void>()>& work) {
  const Expected<void> done = guarded(work);
  if (groups.c10d() == nullptr) return done;  // has left already
  if (done.has_value()) return groups.c10d()->leave();
  if (done.error().code == ErrorCode::kInterrupted) {  // all stop alike, between two steps
    DYNMO_TRY(groups.c10d()->leave());
    return done.error();
  }
  groups.c10d()->abort(done.error());
  return done.error();
}

void leave_on_sigterm() {
  struct sigaction action {};
  action.sa_handler = [](int) { sigterm.store(true, std::memory_order_relaxed); };
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
}

}  // namespace dynmo::train
