// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "dynmo/c10d/closing_groups.h"
#include "dynmo/c10d/gloo_group_impl.h"
#include "dynmo/c10d/relay_store_impl.h"
#include "dynmo/c10d/store_impl.h"
#include "dynmo/core/check.h"

namespace dynmo::c10d {
namespace {

using std::chrono::milliseconds;
using transport::Member;
using transport::Operation;
using transport::Tag;

// Returns the group's failure after an error of Gloo on a message to or from `peer`. The peer is
// not always the cause: it may have ended because of another rank.
Error resolve(const GroupState& state, Member peer, const std::string& what) {
  if (auto failure = state.failure()) return *failure;
  if (const auto verdict = state.watch->verdict_within(state.verdict_time)) {
    state.outstanding->fail(*verdict);
  } else {
    state.abort(
        make_error(ErrorCode::kPeerLost, "rank {} was lost: {}", state.number_of(peer), what));
  }
  return *state.failure();
}

class GlooOperation final : public Operation {
 public:
  GlooOperation(std::shared_ptr<GroupState> state, Member peer,
                c10::intrusive_ptr<::c10d::Work> work, milliseconds timeout)
      : state_(std::move(state)),
        peer_(peer),
        place_(state_->outstanding->add(std::move(work))),
        timeout_(timeout) {}

  ~GlooOperation() override {
    if (waited_) return;
    if (!state_->failure()) {
      state_->abort(make_error(ErrorCode::kInternal,
                               "an operation with rank {} was dropped before it was waited for",
                               state_->number_of(peer_)));
    }
    state_->outstanding->remove(place_);
  }

  Expected<void> wait() override {
    DYNMO_CHECK(!waited_, "one wait an operation, got a second");
    std::string what = "the transfer was aborted";
    bool arrived = false;
    const auto begin = std::chrono::steady_clock::now();
    try {
      // Without an argument, the wait has the timeout with which the group was connected:
      // c10d::Backend::setTimeout does not change existing connections.
      arrived = (*place_)->wait(timeout_);
    } catch (const std::exception& exception) {
      what = first_line_of(exception);
    }
    waited_ = true;
    state_->outstanding->remove(place_);
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if (waited >= timeout_) what = fmt::format("no message passed for {:.1f} s", waited.count());
    if (!arrived) return resolve(*state_, peer_, what);
    if (const auto failure = state_->failure()) return *failure;
    return {};
  }

 private:
  std::shared_ptr<GroupState> state_;
  Member peer_;
  Outstanding::Works::iterator place_;
  milliseconds timeout_;
  bool waited_ = false;
};

// An operation that Gloo refused to post, or that was posted after the failure.
class FailedOperation final : public Operation {
 public:
  FailedOperation(std::shared_ptr<GroupState> state, Member peer, std::string what)
      : state_(std::move(state)), peer_(peer), what_(std::move(what)) {}
  Expected<void> wait() override { return resolve(*state_, peer_, what_); }

 private:
  std::shared_ptr<GroupState> state_;
  Member peer_;
  std::string what_;
};

class GlooGroup final : public Group {
 public:
  GlooGroup(std::shared_ptr<GroupState> state, std::shared_ptr<Store> store, milliseconds timeout)
      : state_(std::move(state)), store_(std::move(store)), timeout_(timeout) {}
  ~GlooGroup() override {
    if (state_->watch != nullptr && !left_ && !state_->failure()) {
      abort(make_error(ErrorCode::kPeerLost, "rank {} has left the group",
                       state_->number_of(state_->rank)));
    }
    const ClosingGroup closing;
    state_.reset();
  }

  [[nodiscard]] Member rank() const override { return state_->rank; }
  [[nodiscard]] int size() const override { return state_->size; }
  [[nodiscard]] int number_of(Member rank) const override { return state_->number_of(rank); }

  std::unique_ptr<Operation> send(Member to, Tag tag, std::span<const std::byte> bytes) override {
    // Gloo takes the bytes of both directions as not const and reads these.
    auto* data = const_cast<std::byte*>(bytes.data());
    return post(to, tag, {data, bytes.size()}, &::c10d::Backend::send);
  }
  std::unique_ptr<Operation> receive(Member from, Tag tag, std::span<std::byte> bytes) override {
    return post(from, tag, bytes, &::c10d::Backend::recv);
  }

  void abort(const Error& why) override { state_->abort(why); }
  [[nodiscard]] std::optional<Error> failure() const override { return state_->failure(); }
  [[nodiscard]] std::chrono::steady_clock::time_point failed_at() const override {
    return state_->outstanding->failed_at();
  }
  Expected<void> leave() override;
  [[nodiscard]] std::shared_ptr<Store> store() const override { return store_; }
  [[nodiscard]] std::shared_ptr<Store> words() const override {
    DYNMO_CHECK(state_->watch != nullptr, "a group of several ranks, got {}", size());
    auto store = std::make_shared<Store>();
    store->keys = c10::make_intrusive<RelayStore>(state_->watch, timeout_);
    store->address = state_->address;
    return store;
  }
  [[nodiscard]] const std::string& address() const override { return state_->address; }

 private:
  using Post = c10::intrusive_ptr<::c10d::Work> (::c10d::Backend::*)(std::vector<at::Tensor>&, int,
                                                                     int);
  std::unique_ptr<Operation> post(Member peer, Tag tag, std::span<std::byte> bytes, Post how);

  std::shared_ptr<GroupState> state_;
  std::shared_ptr<Store> store_;
  milliseconds timeout_;
  bool left_ = false;
};

std::unique_ptr<Operation> GlooGroup::post(Member peer, Tag tag, std::span<std::byte> bytes,
                                           Post how) {
  DYNMO_CHECK(peer != rank() && peer.value >= 0 && peer.value < size(),
              "a peer of rank {} in a group of {}, got {}", rank(), size(), peer);
  DYNMO_CHECK(tag >= 0, "a tag of at least 0, got {}", tag);
  DYNMO_CHECK(!bytes.empty(), "a message of at least one byte");
  if (state_->failure()) return std::make_unique<FailedOperation>(state_, peer, "");
  std::vector<at::Tensor> tensors = {
      at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte)};
  try {
    auto work = ((*state_->gloo).*how)(tensors, peer.value, tag);
    return std::make_unique<GlooOperation>(state_, peer, std::move(work), timeout_);
  } catch (const std::exception& exception) {
    return std::make_unique<FailedOperation>(state_, peer, first_line_of(exception));
  }
}

Expected<void> GlooGroup::leave() {
  DYNMO_CHECK(!left_, "a group is left once");
  if (const auto failure = state_->failure()) return *failure;
  if (state_->watch != nullptr) {
    const auto done = state_->watch->leave(timeout_);
    if (!done) {
      abort(done.error());
      return *state_->failure();
    }
  }
  left_ = true;
  return {};
}

}  // namespace

std::string first_line_of(const std::exception& exception) {
  const auto* error = dynamic_cast<const c10::Error*>(&exception);
  std::string text = error != nullptr ? error->what_without_backtrace() : exception.what();
  if (text.starts_with('[')) {
    const std::size_t place = text.find("] ");
    if (place != std::string::npos) text.erase(0, place + 2);
  }
  return text.substr(0, text.find('\n'));
}

std::unique_ptr<Group> make_gloo_group(std::shared_ptr<GroupState> state,
                                       std::shared_ptr<Store> store, milliseconds message_timeout) {
  return std::make_unique<GlooGroup>(std::move(state), std::move(store), message_timeout);
}

}  // namespace dynmo::c10d
