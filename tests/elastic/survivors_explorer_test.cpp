// SPDX-License-Identifier: Apache-2.0
// Members of a run meet losses, silence and planned changes in all orders, and in random ones where
// there are more of them: never do two groups have all their members, so that both could take a
// step.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "tests/elastic/survivors_world.h"
#include "tests/support/samples.h"

namespace dynmo::elastic::explorer {
namespace {

struct Found {
  std::string split;  // the events that have led to it; "": none has
  std::int64_t events = 0;
  std::int64_t states = 0;
};

Found explore_all(const Options& options) {
  struct Level {
    World world;
    std::vector<Event> left;
    Event by = {};
  };
  Found found;
  std::unordered_set<std::size_t> seen;  // hashes: memory for millions
  std::vector<Level> path;
  const auto enter = [&](World world, const Event& by) {
    if (!seen.insert(std::hash<std::string>{}(world.text())).second) return;
    std::vector<Event> left = world.next();
    path.push_back({std::move(world), std::move(left), by});
  };
  enter(World(options), {});
  while (!path.empty()) {
    if (path.back().left.empty()) {
      path.pop_back();
      continue;
    }
    const Event event = path.back().left.back();
    path.back().left.pop_back();
    World next = path.back().world;
    if (!next.apply(event)) continue;
    ++found.events;
    if (next.is_split()) {
      for (const Level& level : path) found.split += line_of(level.by) + "\n";
      found.split += line_of(event) + "\n" + next.text();
      break;
    }
    enter(std::move(next), event);
  }
  found.states = std::ssize(seen);
  return found;
}

// One schedule, a function of the seed.
Found explore_one(const Options& options, std::uint64_t seed) {
  Rng rng(mix_key({seed, 0x50f7}));
  World world(options);
  Found found;
  std::string story;
  unsigned side = 0;
  for (int i = 0; i < 1000; ++i) {
    if (rng.below(100) == 0) side = static_cast<unsigned>(rng.below(1U << 7));
    const Event event = world.draw(rng, side);
    if (!world.may(event)) continue;
    const bool rare = event.kind == Event::Kind::kDie || event.kind == Event::Kind::kGiveUp;
    if (rare && rng.below(4) > 0) continue;
    if (!world.apply(event)) continue;
    ++found.events;
    story += line_of(event) + "\n";
    if (!world.is_split()) continue;
    found.split = fmt::format("seed {}\n{}{}", seed, story, world.text());
    break;
  }
  return found;
}

TEST(SurvivorsExplorer, NoTwoGroupsTakeStepsInAnyOrderOfEvents) {
  std::vector<Options> spaces = {{.members = 2, .newcomers = 1, .deaths = 1, .changes = 1}};
  if (draws_all_samples()) {
    spaces.push_back({.members = 3, .deaths = 1, .newest = 3});
    spaces.push_back({.members = 4, .replicas = 2, .deaths = 1, .newest = 2});
  }
  if (draws_all_samples() && std::getenv("DYNMO_SAMPLES") != nullptr) {
    spaces.push_back({.members = 3, .deaths = 2, .newest = 3});
  }
  for (const Options& options : spaces) {
    const Found found = explore_all(options);
    std::printf(
        "[          ] %d members in %d replicas, %d newcomers, %d deaths, %d changes, %lld views: "
        "%lld events, %lld states\n",
        options.members, options.replicas, options.newcomers, options.deaths, options.changes,
        static_cast<long long>(options.newest), static_cast<long long>(found.events),
        static_cast<long long>(found.states));
    EXPECT_EQ(found.split, "");
    EXPECT_GT(found.states, 100);
  }
}

constexpr Options kMany = {.members = 5, .newcomers = 2, .deaths = 4, .changes = 3, .newest = 9};

TEST(SurvivorsExplorer, NoTwoGroupsTakeStepsInRandomSchedules) {
  const char* samples = std::getenv("DYNMO_SAMPLES");
  const std::uint64_t schedules = samples != nullptr && draws_all_samples() ? 40000
                                  : draws_all_samples()                     ? 1500
                                                                            : 100;
  const std::uint64_t first = drawn_by("random schedules of the survivors").value_or(0);
  std::int64_t events = 0;
  for (std::uint64_t seed = first; seed < first + schedules; ++seed) {
    for (const int members : {3, 4, 5}) {
      Options options = kMany;
      options.members = members;
      const Found found = explore_one(options, seed);
      events += found.events;
      ASSERT_EQ(found.split, "") << members << " members";
    }
    for (const int replicas : {2, 3}) {
      const Found found =
          explore_one({.members = 6, .replicas = replicas, .deaths = 4, .newest = 9}, seed);
      events += found.events;
      ASSERT_EQ(found.split, "") << replicas << " replicas";
    }
  }
  std::printf("[          ] %lld events\n", static_cast<long long>(events));
}

// From seeds a little before those that show it: all before them take half a minute.
TEST(SurvivorsExplorer, EachRuleIsNeeded) {
  const std::array<std::pair<Mutant, std::uint64_t>, 10> seeds = {
      {{Mutant::kForgetsOpenEnds, 0},
       {Mutant::kNewcomersKnowNothing, 32900},
       {Mutant::kAnyChange, 36600},
       {Mutant::kSilentIsDead, 0},
       {Mutant::kHalfIsEnough, 0},
       {Mutant::kKeepsAFailedView, 14500},
       {Mutant::kChangeForgetsOpenEnds, 32900},
       {Mutant::kGoesOnWithoutTheChange, 0},
       {Mutant::kChangesAPart, 4100},
       {Mutant::kLostIsDead, 0}}};
  const std::optional<std::uint64_t> draw = drawn_by("one of the ten rules of the survivors");
  for (const auto& [mutant, first] : seeds) {
    const bool is_drawn = draw && mutant == seeds[*draw % seeds.size()].first;
    if (first > 0 && !draws_all_samples() && !is_drawn) continue;
    std::uint64_t seed = first;
    bool split = false;
    for (; !split && seed < first + 20000; ++seed) {
      Options options = kMany;
      options.members = 3 + static_cast<int>(seed % 3);
      options.mutant = mutant;
      split = !explore_one(options, seed).split.empty();
    }
    EXPECT_TRUE(split) << "rule " << static_cast<int>(mutant);
    std::printf("[          ] without rule %d: schedule %llu\n", static_cast<int>(mutant),
                static_cast<unsigned long long>(seed - 1));
  }
}

}  // namespace
}  // namespace dynmo::elastic::explorer
