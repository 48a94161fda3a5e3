// SPDX-License-Identifier: Apache-2.0
#pragma once

// Groups of an elastic run whose ranks are threads of this process. A thread may be lost as a
// process is: its end of the group goes, the others learn it, and those that are left meet as
// processes do, by elastic/survivors.h.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/elastic/control_plane.h"
#include "dynmo/elastic/groups.h"
#include "dynmo/elastic/quorum.h"
#include "dynmo/elastic/survivors.h"
#include "dynmo/transport/in_process.h"
#include "dynmo/transport/testing/fault.h"

namespace dynmo::train::testing {

inline constexpr std::chrono::seconds kHang{60};  // longer than anything takes on a busy machine

// Thrown through a thread that is lost, once the run is over. It is no std::exception, so that
// nothing on its way takes it for an error of the rank.
struct Killed {};

// Hands out the ends of in-process groups, one group a generation, and knows which members have
// ended. Any thread.
class Hub {
 public:
  // The end of `rank` in the group of `generation`. The first that asks makes the group.
  Expected<std::unique_ptr<transport::Transport>> take(Generation generation, int size,
                                                       WorldRank rank);
  // The same; returns when all ranks have taken theirs. An error once a member has ended.
  Expected<std::unique_ptr<transport::Transport>> meet(const elastic::View& view, WorldRank rank);
  // The group of `next` is to form while the other works, and never will where that fails before.
  void plan(Generation next, Generation beside);
  // Returns when all ranks of the group have called it: none waits for another's end any more.
  Expected<void> leave(Generation generation, int size);
  // Who waits in this group, or comes later, is told.
  void fail(Generation generation, const Error& why);
  // All groups, of now and later: the test has failed.
  void fail(const Error& why);
  [[nodiscard]] std::optional<Error> failure();

  // A member's thread begins and ends, as its process would.
  void begin(elastic::MemberId member);
  void end(elastic::MemberId member);
  // Answers as a control plane would for the member, with what it was told to.
  [[nodiscard]] elastic::Answer ask(elastic::MemberId member);
  void post(elastic::MemberId member, const std::string& notice);
  // The member does not answer from now on; returns when others have met without it (true), or all
  // have ended.
  bool sleep(elastic::MemberId member);
  // Changes when anything does.
  [[nodiscard]] std::uint64_t news();
  // Waits until it is another than `seen`, at most a moment.
  void wait_for_news(std::uint64_t seen);
  // Returns when every member has ended.
  void wait_for_end();

 private:
  struct Opening {
    std::vector<std::unique_ptr<transport::Transport>> ends;
    int taken = 0;
  };
  using Lock = std::unique_lock<std::mutex>;
  Expected<std::unique_ptr<transport::Transport>> take_locked(Generation generation, int size,
                                                              WorldRank rank);
  [[nodiscard]] std::optional<Error> failure_of(Generation generation) const;
  void fail_locked(Generation generation, const Error& why);
  void note_news();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t news_ = 0;
  std::map<Generation, Opening> openings_;
  std::map<Generation, Generation> planned_;  // by the next one: that which works meanwhile
  std::map<Generation, int> met_;
  std::map<Generation, int> left_;
  std::map<Generation, Error> failures_;
  std::optional<Error> failure_;  // of all
  std::set<elastic::MemberId> alive_;
  std::set<elastic::MemberId> asleep_;
  std::set<elastic::MemberId> left_out_;  // of those
  std::map<elastic::MemberId, std::string> notices_;
};

// How a group came to be.
enum class Origin { kFirst, kChange, kLoss };

// Moments of a rank's part that no message tells of.
enum class Moment {
  kAsks,      // before a step's figures are exchanged, and between two steps
  kOpens,     // the place where the next group meets
  kForms,     // before it takes its end of the next group
  kFormed,    // after it
  kDrops,     // the next group is not to be
  kTakes,     // before the barrier of a change
  kTaken,     // after it
  kSurvives,  // after a loss, before it looks for the others
  kMeets,     // it knows whom it is to meet
  kMet,       // it has met them
  kEnds,      // it is lost, and the run is over
};

// One member's part of them.
class HubGroups final : public elastic::Groups {
 public:
  struct Spy {
    // Called for each end that the member gets, before its first message. The next message on it is
    // damaged once `corrupts` is true.
    std::function<std::vector<transport::Fault>(const transport::Transport& end, Origin,
                                                bool& corrupts)>
        faults = {};
    std::function<void(Moment)> at = [](Moment) {};
  };
  HubGroups(Hub& hub, elastic::Member self) : hub_(hub), self_(std::move(self)) {}

  // Before the member's thread begins.
  void tell(Spy spy) { spy_ = std::move(spy); }
  // This member was given its place in a group that others have formed, or that is the first.
  // `numbers` of its ranks; none: the ranks.
  Expected<void> enter(Generation generation, int size, WorldRank rank, Origin origin,
                       std::vector<int> numbers = {});
  // Leaves the last group; an error ends it for all.
  Expected<void> close(const Expected<void>& done);
  void ask_to_leave() { asked_ = true; }
  // For who looks from outside: the run does not come by a point.
  bool was_asked_to_leave() const { return asked_; }
  // Its end of the group fails at this message that it sends, unless it is `excused`.
  void fail_at(int message, std::function<bool()> excused);
  // Ends a process that is no rank of the run yet.
  void give_up(const Error& why);

  // This member is lost: the others learn it at once. Its thread goes no further, and ends with the
  // run. Called on the thread.
  [[noreturn]] void die(const std::string& how);
  // The others lose this member, which wakes when they have gone on, or ended. Called on the
  // thread.
  void sleep();
  [[nodiscard]] bool was_left_out() const { return left_out_; }
  // Whether it looked for the others until its time was up, as a process would for a minute.
  [[nodiscard]] bool has_waited_in_vain() const { return waited_in_vain_; }
  // From now on an error of this member is its own loss.
  void expect_loss() { lost_ = true; }
  [[nodiscard]] bool is_lost() const { return lost_; }
  // The same as C10dGroups'.
  [[nodiscard]] bool others_go_on() const { return end_ != nullptr && size_ > 1; }
  // Whether a loss has caught it in the barrier of a change, after which it may not go on.
  [[nodiscard]] bool is_torn() const { return torn_; }

  transport::Transport& group() override { return *end_; }
  const elastic::Member& self() const override { return self_; }
  bool asked_to_leave() const override;
  std::string address() const override { return "127.0.0.1"; }
  Expected<elastic::Place> open(const elastic::View& next) override;
  Expected<transport::Transport*> form(const elastic::View& next, const elastic::Place& place,
                                       const GiveUp&) override;
  void drop(const Error& why) override;
  Expected<bool> take() override;
  std::optional<Error> failure() const override;
  Expected<elastic::Survival> survive(const elastic::Loss& loss) override;

 private:
  // The state of one end.
  struct State {
    std::mutex mutex = {};              // guards the failure: several threads wait for messages
    std::optional<Error> failure = {};  // as this member knows it
    bool corrupts = false;
  };
  class End;
  // The end with what watches it.
  std::unique_ptr<transport::Transport> watched(std::unique_ptr<transport::Transport> end,
                                                Origin origin, std::vector<int> numbers);

  Hub& hub_;
  elastic::Member self_;
  Spy spy_;
  std::atomic<bool> asked_{false};
  std::atomic<bool> lost_{false};
  std::atomic<bool> torn_{false};
  std::atomic<bool> left_out_{false};
  std::atomic<bool> waited_in_vain_{false};
  Generation generation_ = 0;
  int size_ = 0;
  std::shared_ptr<State> state_;               // of the group in force
  std::unique_ptr<transport::Transport> end_;  // null once this member has left
  Generation next_generation_ = 0;
  int next_size_ = 0;
  std::shared_ptr<State> next_state_;
  std::unique_ptr<transport::Transport> next_;
  elastic::Standing standing_;
};

}  // namespace dynmo::train::testing
