// SPDX-License-Identifier: Apache-2.0
// Tries all orders of events that a few members can meet, and random ones of more members.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <ostream>
#include <set>
#include <string>
#include <string_view>

#include "dynmo/core/rng.h"
#include "tests/elastic/fingerprints.h"
#include "tests/elastic/world.h"
#include "tests/support/samples.h"

namespace dynmo::elastic {
namespace {

struct Found {
  std::string violation;  // empty: none
  std::int64_t events = 0;
  std::int64_t states = 0;  // or schedules
  bool of_schedules = false;
  std::set<std::string> ends = {};  // of worlds where nothing happens of itself any more
};

bool is_of_itself(Kind kind) { return kind < Kind::kCheckpoint; }

// All worlds that can come of the first one, each once: depth first, so that what is kept is a path
// and the hashes of what was seen, not a frontier of worlds.
Found explore_all(const WorldOptions& options, bool with_ends = false) {
  struct Level {
    World world;
    std::vector<Happening> left;
    Happening by;
  };
  Found found;
  Fingerprints seen;
  std::vector<Level> path;
  const auto enter = [&](World world, const Happening& by) {
    if (world.violation().empty() && !seen.insert(world.hash())) return;
    std::vector<Happening> left = world.next();
    const bool rests =
        std::none_of(left.begin(), left.end(), [](const auto& h) { return is_of_itself(h.kind); });
    if (rests && with_ends) found.ends.insert(world.outcome());
    if (rests && !world.beyond() && world.violation().empty()) {
      if (!world.retries()) world.check_at_rest();
      for (int a = 0; world.retries() && a < options.members + options.newcomers; ++a) {
        left.push_back({Kind::kRetry, static_cast<std::int8_t>(a)});
      }
    }
    path.push_back({std::move(world), std::move(left), by});
  };
  enter(World(options), {});
  while (!path.empty() && path.back().world.violation().empty()) {
    if (path.back().left.empty()) {
      path.pop_back();
      continue;
    }
    const Happening happening = path.back().left.back();
    path.back().left.pop_back();
    World next = path.back().world;
    next.apply(happening);
    ++found.events;
    enter(std::move(next), happening);
  }
  found.states = seen.size();
  if (path.empty()) return found;
  found.violation = path.back().world.violation();
  for (const Level& level : path) found.violation += "\n  " + to_string(level.by);
  found.violation += path.back().world.describe();
  return found;
}

// One schedule, a function of the seed.
Found explore_one(const WorldOptions& options, std::uint64_t seed, bool trace = false) {
  Rng rng(mix_key({seed, 0xe1a5}));
  World world(options);
  Found found;
  std::string text;
  std::vector<Happening> own;
  std::vector<Happening> outer;
  int calm = 0;
  while (found.events < 400) {
    own.clear();
    outer.clear();
    for (const Happening& happening : world.next()) {
      (is_of_itself(happening.kind) ? own : outer).push_back(happening);
    }
    const bool from_outside = !outer.empty() && (own.empty() || rng.below(10) == 0);
    Happening happening;
    if (from_outside && rng.below(4) != 0) {
      happening = outer[rng.below(outer.size())];
    } else if (!own.empty()) {
      happening = own[rng.below(own.size())];
    } else if (world.beyond() || !world.violation().empty()) {
      break;
    } else if (calm < 4) {
      world.calm();
      ++calm;
      for (int a = 0; world.retries() && a < options.members + options.newcomers; ++a) {
        if (world.is_up(a)) {
          world.apply({Kind::kRetry, static_cast<std::int8_t>(a)});
        }
      }
      if (trace) text += "\n  calm";
      continue;
    } else {
      world.check_at_rest();
      break;
    }
    world.apply(happening);
    ++found.events;
    if (trace) text += "\n  " + to_string(happening);
  }
  found.violation = world.violation();
  if (trace && !found.violation.empty()) found.violation += text + world.describe();
  return found;
}

WorldOptions random_options(std::uint64_t seed) {
  Rng rng(mix_key({seed, 0x0b71}));
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(rng.below(static_cast<std::uint64_t>(high - low + 1)));
  };
  WorldOptions options{.members = draw(4, 6),
                       .newcomers = draw(0, 1),
                       .layers = draw(4, 7),
                       .steps = draw(0, 1) * draw(1, 5),
                       .snapshot_every = draw(1, 3),
                       .checkpoints = draw(0, 1),
                       .moves = draw(0, 1) == 1,
                       .replicas = draw(0, 3) == 0,
                       .faults = draw(1, 4),
                       .ballots = 30,
                       .changes = draw(0, 2),
                       .single_links = draw(0, 1) == 1,
                       .failures = draw(0, 1) == 1};
  return options;
}

// Until one has a violation that says `wanted`.
Found explore_random(std::int64_t schedules, std::uint64_t first_seed = 1,
                     const std::string& wanted = "",
                     const std::function<void(WorldOptions&)>& change = {}) {
  Found all;
  all.of_schedules = true;
  for (std::int64_t i = 0; i < schedules; ++i) {
    const std::uint64_t seed = first_seed + static_cast<std::uint64_t>(i);
    WorldOptions options = random_options(seed);
    if (change) change(options);
    const Found one = explore_one(options, seed);
    all.events += one.events;
    all.states = i + 1;
    if (one.violation.empty() || one.violation.find(wanted) == std::string::npos) continue;
    all.violation = fmt::format("seed {}: {}", seed, explore_one(options, seed, true).violation);
    break;
  }
  return all;
}

// Seconds of the processor, which do not depend on who else is at work; nothing is decided by them.
double processor_s() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

void say(const std::string& what, const Found& found, double since_s) {
  fmt::print("{}: {} events, {} {}, {:.1f} s\n", what, found.events, found.states,
             found.of_schedules ? "schedules" : "states", processor_s() - since_s);
}

bool whole() {
  const char* wanted = std::getenv("DYNMO_SAMPLES");
  return wanted != nullptr && std::string_view(wanted) == "all";
}

TEST(Explorer, RandomSchedulesOfFourToSixMembers) {
  const double since = processor_s();
  const Found found = explore_random(whole() ? 1'000'000 : samples(100'000));
  say("random", found, since);
  EXPECT_EQ(found.violation, "");
}

struct Space {
  enum class When { kAlways, kPlainBuilds, kWhole };
  const char* name;
  WorldOptions options;
  When when = When::kAlways;
};

WorldOptions space_of(int newcomers, int changes, int faults, int ballots) {
  return {.newcomers = newcomers,
          .faults = faults,
          .ballots = ballots,
          .changes = changes,
          .at_once = true,
          .reduced = true};
}

std::vector<Space> spaces() {
  using enum Space::When;
  WorldOptions training = space_of(0, 0, 1, 2);
  training.steps = 2;
  return {{"a_change_with_a_newcomer", space_of(1, 1, 0, 3)},
          {"one_fault", space_of(0, 0, 1, 3)},
          {"one_fault_a_newcomer_and_a_change", space_of(1, 1, 1, 2), kWhole},
          {"one_fault_and_a_change", space_of(0, 1, 1, 2), kPlainBuilds},
          {"one_fault_in_training", training, kWhole},
          {"two_faults", space_of(0, 0, 2, 3), kWhole},
          {"two_faults_and_a_change", space_of(0, 1, 2, 2), kWhole},
          {"two_faults_a_newcomer_and_a_change", space_of(1, 1, 2, 1), kWhole}};
}

void PrintTo(const Space& space, std::ostream* out) { *out << space.name; }  // GoogleTest's name

bool wanted(Space::When when) {
  if (when == Space::When::kWhole) return whole();
  return when == Space::When::kAlways || draws_all_samples();
}

class Spaces : public testing::TestWithParam<Space> {};

TEST_P(Spaces, HaveNoViolationInAnyOrderOfEvents) {
  if (!wanted(GetParam().when)) GTEST_SKIP() << "a large space; DYNMO_SAMPLES=all tries it";
  const double since = processor_s();
  const Found found = explore_all(GetParam().options);
  say(GetParam().name, found, since);
  EXPECT_EQ(found.violation, "");
}

INSTANTIATE_TEST_SUITE_P(Explorer, Spaces, testing::ValuesIn(spaces()),
                         [](const auto& one) { return std::string(one.param.name); });

std::vector<Space> small_spaces() {
  WorldOptions training = space_of(1, 1, 1, 2);
  training.members = training.layers = 2;
  training.steps = 1;
  return {{"a_change_with_a_newcomer", space_of(1, 1, 0, 3)},
          {"one_fault", space_of(0, 0, 1, 2)},
          {"a_fault_and_a_newcomer_in_training", training}};
}

class Reductions : public testing::TestWithParam<Space> {};

TEST_P(Reductions, LoseNoEnd) {
  WorldOptions options = GetParam().options;
  const Found reduced = explore_all(options, true);
  options.reduced = false;
  const Found full = explore_all(options, true);
  EXPECT_EQ(reduced.violation, "");
  EXPECT_EQ(full.violation, "");
  EXPECT_GT(full.ends.size(), 1U);
  EXPECT_EQ(reduced.ends, full.ends);
  EXPECT_LT(reduced.states, full.states);
  fmt::print("{}: {} states of {}, {} ends\n", GetParam().name, reduced.states, full.states,
             full.ends.size());
}

INSTANTIATE_TEST_SUITE_P(Explorer, Reductions, testing::ValuesIn(small_spaces()),
                         [](const auto& one) { return std::string(one.param.name); });

std::vector<Space> spaces_without_a_rule() {
  using enum Space::When;
  WorldOptions ties = space_of(0, 0, 1, 2);
  ties.rules.ties = false;
  WorldOptions open_ends = space_of(0, 0, 2, 3);
  open_ends.rules.open_ends = false;
  WorldOptions attempts = space_of(1, 1, 2, 3);
  attempts.members = attempts.layers = 2;
  attempts.replicas = true;
  attempts.rules.attempts = false;
  WorldOptions slots = space_of(0, 0, 1, 2);
  slots.steps = 2;
  slots.snapshot_every = 1;
  slots.keep_slots = false;
  WorldOptions shadows = space_of(0, 0, 1, 2);
  shadows.steps = 3;
  shadows.moves = true;
  shadows.keep_shadows = false;
  ties.members = ties.layers = 2;
  return {{"ties", ties},
          {"open_ends", open_ends},
          {"attempts", attempts, kPlainBuilds},
          {"slots", slots, kWhole},
          {"shadows", shadows, kWhole}};
}

class SpacesWithoutARule : public testing::TestWithParam<Space> {};

TEST_P(SpacesWithoutARule, HaveAViolationInSomeOrder) {
  if (!wanted(GetParam().when)) GTEST_SKIP() << "a large space; DYNMO_SAMPLES=all tries it";
  WorldOptions options = GetParam().options;
  for (const bool reduced : {true, false}) {
    options.reduced = reduced;
    const double since = processor_s();
    const Found found = explore_all(options);
    say(GetParam().name, found, since);
    EXPECT_NE(found.violation, "") << (reduced ? "reduced" : "full");
  }
}

INSTANTIATE_TEST_SUITE_P(Explorer, SpacesWithoutARule, testing::ValuesIn(spaces_without_a_rule()),
                         [](const auto& one) { return std::string(one.param.name); });

// Each rule that is taken away lets something happen that must not, in worlds where it matters.
struct Mutant {
  const char* name;
  const char* violation;
  std::function<void(WorldOptions&)> change;
  std::uint64_t first_seed = 1;  // shortly before one that is known to show it, where that is rare
};

void PrintTo(const Mutant& mutant, std::ostream* out) { *out << mutant.name; }

class Mutants : public testing::TestWithParam<Mutant> {};

TEST_P(Mutants, AreCaught) {
  const double since = processor_s();
  const Found found =
      explore_random(200'000, GetParam().first_seed, GetParam().violation, GetParam().change);
  say(GetParam().name, found, since);
  EXPECT_NE(found.violation, "") << "nothing notices that a rule is missing";
  fmt::print("{}\n", found.violation.substr(0, found.violation.find('\n')));
}

void few_with_a_newcomer(WorldOptions& options) {
  options.members = 2 + options.members % 2;
  options.newcomers = options.changes = 1;
  options.steps = 0;
  options.replicas = true;
}

INSTANTIATE_TEST_SUITE_P(
    Explorer, Mutants,
    testing::Values(
        Mutant{"attempts", "both run",
               [](WorldOptions& o) {
                 few_with_a_newcomer(o);
                 o.rules.attempts = false;
               },
               60'000},
        Mutant{"releases", "both run",
               [](WorldOptions& o) {
                 o.changes = 2;
                 o.rules.releases = false;
               }},
        Mutant{"ties", "both run", [](WorldOptions& o) { o.rules.ties = false; }},
        Mutant{"promises", "waits for nobody",  // what it reported is not there any more
               [](WorldOptions& o) {
                 o.members = 3;
                 o.newcomers = 0;
                 o.replicas = false;
                 o.single_links = o.failures = true;
                 o.faults = 4;
                 o.rules.promises = false;
               },
               105'000},
        Mutant{"open_ends", "both run", [](WorldOptions& o) { o.rules.open_ends = false; }},
        Mutant{"slots", "does not help", [](WorldOptions& o) { o.keep_slots = false; }},
        Mutant{"shadows", "nobody is missing",
               [](WorldOptions& o) {
                 o.keep_shadows = false;
                 o.moves = true;
                 o.replicas = false;
                 o.steps = 3;
               }}),
    [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace dynmo::elastic
