// SPDX-License-Identifier: Apache-2.0
#pragma once

// The points of a run at which a rank may be lost, and what happens to it there: messages by what
// they are about, moments of its groups, calls of the sources of dynamism.

#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <limits>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dynmo/dynamism/training/source.h"
#include "dynmo/transport/tags.h"
#include "tests/train/elastic_hub.h"

namespace dynmo::train::testing {

using transport::Control;
using transport::Fault;
using transport::Tag;

inline constexpr const char* kFault = "a fault of this rank alone";
inline constexpr std::chrono::milliseconds kSlowTime{20};
inline constexpr std::chrono::milliseconds kSilence{30};

// Messages about one thing, in one direction.
struct Messages {
  std::string name;
  Tag first;
  Tag last;
  enum class Peer { kAny, kAbove, kBelow } peer = Peer::kAny;
};

inline constexpr std::array<const char*, 20> kControlNames = {
    "devices",  "settings", "barrier", "checkpoint", "traffic",  "traces", "hosts",
    "holdings", "costs",    "size",    "handover",   "exchange", "plan",   "loss",
    "vote",     "snapshot", "sources", "ping",       "clocks",   "user"};
static_assert(kControlNames.size() == static_cast<std::size_t>(Control::kCount));

inline std::vector<Messages> all_messages() {
  std::vector<Messages> all;
  for (std::size_t i = 0; i < kControlNames.size(); ++i) {
    const Tag tag = transport::control_tag(static_cast<Control>(i));
    all.push_back({kControlNames[i], tag, tag});
  }
  all.push_back(
      {"piece of a layer", transport::kFirstMigrationTag, transport::kFirstReductionTag - 1});
  all.push_back(
      {"reduction or tie", transport::kFirstReductionTag, transport::kFirstScheduleTag - 1});
  const Tag second = transport::second_message_tag(0, 0);
  for (const auto& [name, peer] :
       {std::pair("boundary with the next rank", Messages::Peer::kAbove),
        std::pair("boundary with the one before", Messages::Peer::kBelow)}) {
    all.push_back({name, transport::kFirstScheduleTag, second - 1, peer});
    all.push_back({fmt::format("rows at the {}", name), second,
                   second + transport::kChannelTags / 2 - 1, peer});
  }
  return all;
}

inline constexpr std::array<const char*, 12> kMomentNames = {"asks",  "opens", "forms", "formed",
                                                             "drops", "takes", "taken", "survives",
                                                             "meets", "met",   "ends",  ""};
enum class InSource { kBeforeStep, kWork, kUpdated, kState };
inline constexpr std::array<const char*, 4> kSourceNames = {
    "before a step", "between exchange and update", "after the update", "state of the sources"};

// Where it is in the run of a rank: in a group that came to be in this way.
using Point = std::pair<Origin, std::string>;
inline constexpr std::array<const char*, 3> kOriginNames = {"", " in a changed group",
                                                            " in a group after a loss"};

enum class Kind { kVanish, kStop, kThrow, kNoMemory, kSleep, kSigterm, kSlow, kCorrupt };
inline constexpr std::array<const char*, 8> kKindNames = {
    "vanishes", "is stopped",   "throws",  "lacks memory",
    "sleeps",   "gets SIGTERM", "is slow", "corrupts it"};

struct Cell {
  Point point;
  int nth = 0;  // time that the rank comes by
  int rank = 0;
  Kind kind = Kind::kVanish;

  [[nodiscard]] std::string text() const {
    return fmt::format("rank {} {} at '{}'{}, time {}", rank,
                       kKindNames[static_cast<std::size_t>(kind)], point.second,
                       kOriginNames[static_cast<std::size_t>(point.first)], nth);
  }
};

inline bool is_lethal(Kind kind) { return kind <= Kind::kNoMemory; }

// Counts the points that a rank comes by, and does at one what the cell says.
class Watcher {
 public:
  Watcher(HubGroups& groups, const std::vector<Cell>& cells, const std::filesystem::path& job)
      : groups_(groups), job_(job) {
    for (const Cell& cell : cells) {
      if (static_cast<std::uint64_t>(cell.rank) + 1 == groups.self().id.value)
        cells_.push_back(cell);
    }
  }

  [[nodiscard]] HubGroups::Spy spy() {
    return {.faults = [this](const transport::Transport& end, Origin origin,
                             bool& corrupts) { return faults(end, origin, corrupts); },
            .at =
                [this](Moment moment) {
                  if (moment == Moment::kEnds) {
                    left_files_ = std::filesystem::exists(job_);
                  } else {
                    pass(kMomentNames[static_cast<std::size_t>(moment)], nullptr);
                  }
                }};
  }
  void pass(const std::string& name, bool* corrupts) {
    const Point point{origin_, name};
    const int nth = passed_[point]++;
    for (const Cell& cell : cells_) {
      if (cell.point == point && cell.nth == nth) act(cell, corrupts);
    }
  }

  // The rank is lost by an error of its own.
  [[noreturn]] void fail() {
    groups_.expect_loss();
    throw std::runtime_error(kFault);
  }

  [[nodiscard]] const std::map<Point, int>& passed() const { return passed_; }
  [[nodiscard]] int acted() const { return acted_; }
  [[nodiscard]] bool left_files() const { return left_files_; }
  // Whether it came to where the ranks know each other.
  [[nodiscard]] bool has_begun() const {
    return passed_.contains({Origin::kFirst, "send hosts"}) ||
           passed_.contains({Origin::kChange, "send hosts"});
  }

  static thread_local Watcher* current;  // of this thread's rank

 private:
  std::vector<Fault> faults(const transport::Transport& end, Origin origin, bool& corrupts) {
    current = this;
    origin_ = origin;
    std::vector<Fault> all;
    static const std::vector<Messages> kMessages = all_messages();
    for (const Messages& messages : kMessages) {
      for (const Fault::On on : {Fault::On::kSend, Fault::On::kReceive}) {
        const std::string name = (on == Fault::On::kSend ? "send " : "receive ") + messages.name;
        Fault fault{.kind = Fault::Kind::kCall,
                    .on = on,
                    .first_tag = messages.first,
                    .last_tag = messages.last,
                    .count = std::numeric_limits<int>::max(),
                    .call = [this, name, &corrupts] { pass(name, &corrupts); }};
        if (messages.peer == Messages::Peer::kAny) all.push_back(fault);
        for (int peer = 0; peer < end.size(); ++peer) {
          if (messages.peer == Messages::Peer::kAny || peer == end.rank().value) continue;
          if ((peer > end.rank().value) != (messages.peer == Messages::Peer::kAbove)) continue;
          fault.peer = transport::Member(peer);
          all.push_back(fault);
        }
      }
    }
    return all;
  }

  void act(const Cell& cell, bool* corrupts) {
    ++acted_;
    if (is_lethal(cell.kind)) groups_.expect_loss();
    switch (cell.kind) {
      case Kind::kVanish:
        groups_.die("its connection closed");
      case Kind::kStop:
        std::this_thread::sleep_for(kSilence);
        groups_.die("it is silent");
      case Kind::kThrow:
        throw std::runtime_error(kFault);
      case Kind::kNoMemory:
        throw std::bad_alloc();
      case Kind::kSleep:
        groups_.sleep();
        return;
      case Kind::kSigterm:
        groups_.ask_to_leave();
        return;
      case Kind::kSlow:
        std::this_thread::sleep_for(kSlowTime);
        return;
      case Kind::kCorrupt:
        *corrupts = true;
        return;
    }
  }

  HubGroups& groups_;
  std::filesystem::path job_;
  std::vector<Cell> cells_;
  Origin origin_ = Origin::kFirst;
  std::map<Point, int> passed_;
  int acted_ = 0;
  bool left_files_ = false;
};

inline thread_local Watcher* Watcher::current = nullptr;

// Where the code below transports passes by (the linker has it call this).
inline void pass_inside(const char* name) {
  if (Watcher::current != nullptr) Watcher::current->pass(name, nullptr);
}

// Changes nothing, and passes by.
class PassingSource final : public dynamism::Source {
 public:
  std::string_view name() const override { return "passing"; }
  Expected<dynamism::Change> before_step(const dynamism::Boundary&) override {
    pass(InSource::kBeforeStep);
    return dynamism::Change{};
  }
  Expected<void> after_update(const dynamism::Boundary&, const dynamism::Outcome&) override {
    pass(InSource::kUpdated);
    return {};
  }
  std::vector<double> work(const dynamism::Boundary&, const dynamism::Outcome&) const override {
    pass(InSource::kWork);
    return {};
  }
  Json state() const override {
    pass(InSource::kState);
    return nullptr;
  }

 private:
  static void pass(InSource where) {
    if (Watcher::current == nullptr) return;
    Watcher::current->pass(kSourceNames[static_cast<std::size_t>(where)], nullptr);
  }
};

}  // namespace dynmo::train::testing
