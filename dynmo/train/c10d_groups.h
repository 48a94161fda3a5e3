// SPDX-License-Identifier: Apache-2.0
#pragma once

// The groups of a run whose ranks are processes. The processes of each group meet through the store
// of its first rank.

#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/c10d/nccl_transport.h"
#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/control_plane.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/elastic/quorum.h"
#include "dynmo/elastic/survivors.h"
#include "dynmo/train/hang_watch.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Returns this process as a member without a number.
[[nodiscard]] elastic::Member this_member();

[[nodiscard]] c10d::MeetingPlace meeting_place(const elastic::Place& place);

// Time after a loss for all ranks that are left to meet again. It adds to pipeline.timeout_s while
// all missing ranks answer, because they may work for so long before they notice the loss.
inline constexpr std::chrono::seconds kSurviveTime{60};

// Limits that follow from pipeline.timeout_s and elastic.silence_s. If a run can continue without a
// hung rank, that rank ends before the others stop waiting for it.
struct MessageLimits {
  std::chrono::milliseconds message;
  std::chrono::milliseconds silence;
  std::optional<std::chrono::milliseconds> hang = {};
};
[[nodiscard]] MessageLimits message_limits(const config::Config& config);

class C10dGroups final : public elastic::Groups {
 public:
  using Decorate =
      std::function<std::unique_ptr<transport::Transport>(std::unique_ptr<transport::Transport>)>;

  // Connects the devices of a group's ranks. Called once for each group, on all its ranks.
  using Connect =
      std::function<Expected<c10d::NcclTransport>(c10d::Group&, const c10d::GroupOptions&)>;

  // Joins the first group of a run, or the group in which a joiner has a place. `decorate` wraps
  // the transport of each group. `connect` is empty on CPUs. If this rank hangs for `hang_limit` in
  // a group of several, its process ends with exit code 5. Returns the errors of join_group()
  // (c10d/c10d_transport.h).
  [[nodiscard]] static Expected<std::unique_ptr<C10dGroups>> join(
      const c10d::GroupOptions& options, const elastic::Member& self, Decorate decorate,
      std::optional<std::chrono::milliseconds> hang_limit = {}, Connect connect = {});
  C10dGroups(const C10dGroups&) = delete;
  C10dGroups& operator=(const C10dGroups&) = delete;
  ~C10dGroups() override = default;

  [[nodiscard]] transport::Transport& group() override { return *now_.transport; }
  [[nodiscard]] const elastic::Member& self() const override { return self_; }
  [[nodiscard]] bool asked_to_leave() const override;
  [[nodiscard]] std::string address() const override;
  [[nodiscard]] Expected<elastic::Place> open(const elastic::View& next) override;
  [[nodiscard]] Expected<transport::Transport*> form(const elastic::View& next,
                                                     const elastic::Place& place,
                                                     const GiveUp& give_up) override;
  void drop(const Error& why) override;
  [[nodiscard]] Expected<bool> take() override;
  void watch(const elastic::View& view) override;
  [[nodiscard]] std::optional<Error> failure() const override;
  [[nodiscard]] std::optional<std::string> take_warning() override {
    return plane_ == nullptr ? std::nullopt : plane_->take_failure();
  }
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> failed_at() const override;
  // Lets the surviving ranks find each other by their control planes (elastic/survivors.h). Returns
  // kPeerLost if too many missing ranks may live for any rank to continue. Also returns it if the
  // others have continued without this rank.
  [[nodiscard]] Expected<elastic::Survival> survive(const elastic::Loss& loss) override;
  [[nodiscard]] Expected<void> may_change(const elastic::View& next) override;
  [[nodiscard]] Json standing(const elastic::View& next) const override;
  [[nodiscard]] Expected<void> know(const Json& standing) override;

  // Returns whether others may continue if this rank fails.
  [[nodiscard]] bool others_go_on() const {
    return hangs_ != nullptr && now_.group != nullptr && now_.group->size() > 1;
  }

  // Returns the device channels of the group with this transport, which is the current or the
  // forming one. Returns empty channels for any other transport.
  [[nodiscard]] const c10d::NcclTransport& devices_of(const transport::Transport& group) const;
  // Closes the channels of the current group, when nothing is in flight. All its ranks call it.
  // Fails with kPeerLost.
  [[nodiscard]] Expected<void> close_channels();

  // Ends the group in force for all its ranks.
  void end_for_all(const Error& why) { now_.abort(why); }

  // Returns the current group of c10d, or null once this process has left.
  [[nodiscard]] c10d::Group* in_force() const { return now_.group.get(); }

 private:
  struct Joined {
    std::unique_ptr<c10d::Group> group;
    std::unique_ptr<transport::Transport> transport;  // over the group
    std::vector<elastic::PlanePlace> planes;          // of its ranks
    c10d::NcclTransport devices;                      // their channels; ends before the group

    // Ends the group for all ranks, and first what its channels do in memory of this device.
    void abort(const Error& why);
    // Destroys the members: channels, then transport, then group.
    void reset();
  };
  // The next group, while it forms.
  struct Next {
    Joined joined;
    std::shared_ptr<c10d::Meeting> meeting;  // at its first rank
    std::optional<elastic::Standing> standing;
  };
  C10dGroups(c10d::GroupOptions options, elastic::Member self, Decorate decorate, Connect connect)
      : options_(std::move(options)),
        self_(std::move(self)),
        decorate_(std::move(decorate)),
        connect_(std::move(connect)) {}
  [[nodiscard]] Expected<Joined> join(const c10d::GroupOptions& options);
  // Returns the addresses of the control planes of a group's ranks. Fails with kPeerLost.
  [[nodiscard]] Expected<std::vector<elastic::PlanePlace>> planes_of(c10d::Group& group);
  [[nodiscard]] std::shared_ptr<elastic::ControlPlane> plane_for(int size);
  // Lets the watch for hangs know the channels of the group in force.
  void watch_devices();
  [[nodiscard]] c10d::GroupOptions options_for(const elastic::View& next) const;
  // Forms a group of the surviving ranks, and makes it the current one. After an error the caller
  // tries another group.
  [[nodiscard]] Expected<void> meet_again(elastic::Survivors& survivors,
                                          const elastic::MeetingCall& call,
                                          const elastic::View& before);
  [[nodiscard]] elastic::Answer ask(const elastic::Member& member) const;

  c10d::GroupOptions options_;  // of the first group; later ones share some with it
  elastic::Member self_;
  Decorate decorate_;
  Connect connect_;
  std::unique_ptr<HangWatch> hangs_;  // null: not watched
  std::shared_ptr<elastic::ControlPlane> plane_;
  std::future<void> closing_;  // of the previous group
  Joined now_;
  std::string address_;  // of this process, in the newest group
  Next next_;
  elastic::Standing standing_;
  std::map<elastic::MemberId, elastic::PlanePlace> places_;  // of members of views that count
};

// Runs this process's part of a training, and then leaves the last group. An error ends the group
// for all. Exceptions of libtorch and failed checks become the run's error, so that the others
// receive it.
[[nodiscard]] Expected<void> in_groups(C10dGroups& groups,
                                       const std::function<Expected<void>()>& work);

// Makes SIGTERM ask this process to leave (asked_to_leave) instead of ending it.
void leave_on_sigterm();
// Makes SIGTERM end this process again. Returns whether a SIGTERM was received before.
[[nodiscard]] bool end_on_sigterm();

}  // namespace dynmo::train
