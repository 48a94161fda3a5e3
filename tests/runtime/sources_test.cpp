// SPDX-License-Identifier: Apache-2.0
// Every source that trains, alone and with another, under every way to run it: the same bits as on
// one rank. All pairs of two choices are run, in cases that another seed draws every time; it is in
// the messages, and DYNMO_SEED repeats it. DYNMO_SAMPLES=all runs the whole product.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>

#include "blinking_source.h"
#include "dynmo/dynamism/pruning/source.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

constexpr int kSourcesSteps = 60;

dynamism::PruningOptions pruned_within_sixty_steps() {
  dynamism::PruningOptions options;
  options.start = 4;
  options.end = 44;
  options.every = 8;
  options.sparse_above = 0.6;
  return options;
}

struct NamedSources {
  const char* name;
  dynamism::Sources (*make)(std::int64_t steps);
};

template <typename... One>
dynamism::Sources sources_of(One... one) {
  dynamism::Sources sources;
  (sources.push_back(std::move(one)), ...);
  return sources;
}

const std::vector<NamedSources> kSources = {
    {"freezing by schedule",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_freezing_source({.schedule = freezing()}, steps));
     }},
    {"freezing by norm",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_freezing_source(norm_rule(), steps));
     }},
    {"freezing by plasticity",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_freezing_source(plasticity_rule(), steps));
     }},
    {"pruning",
     [](std::int64_t) {
       return sources_of(dynamism::make_pruning_source(pruned_within_sixty_steps()));
     }},
    {"pruning and freezing", [](std::int64_t steps) {
       return sources_of(dynamism::make_pruning_source(pruned_within_sixty_steps()),
                         dynamism::make_freezing_source({.schedule = freezing()}, steps));
     }}};

enum Choice { kSource, kSchedule, kRanks, kCopies, kMoves, kChoices };
constexpr std::array<int, kChoices> kValues = {5, 6, 4, 3, 2};
using Case = std::array<int, kChoices>;

int ranks_of(const Case& c) { return c[kRanks] + 1; }
bool has_replicas(const Case& c) { return c[kCopies] == 1; }
bool moves(const Case& c) { return c[kMoves] == 1; }
// What interleaved takes; sums of a step are in the order of its micro-batches.
int micro_batches_of(const Case& c) { return ranks_of(c) == 3 ? 6 : 4; }

// One rank has nowhere to move to, and no two stages.
bool is_possible(const Case& c) {
  const schedule::ScheduleKind kind = kKinds[static_cast<std::size_t>(c[kSchedule])];
  const bool two_stages =
      kind == schedule::ScheduleKind::kInterleaved || kind == schedule::ScheduleKind::kZbV;
  return ranks_of(c) > 1 || (!two_stages && !moves(c));
}

std::vector<Case> product() {
  std::vector<Case> cases = {Case{}};
  for (std::size_t choice = 0; choice < kChoices; ++choice) {
    std::vector<Case> longer;
    for (Case c : cases) {
      for (c[choice] = 0; c[choice] < kValues[choice]; ++c[choice]) longer.push_back(c);
    }
    cases = std::move(longer);
  }
  std::erase_if(cases, [](const Case& c) { return !is_possible(c); });
  return cases;
}

using Pair = std::array<int, 4>;  // two choices and their values
std::set<Pair> pairs_of(const Case& c) {
  std::set<Pair> pairs;
  for (int a = 0; a < kChoices; ++a) {
    for (int b = a + 1; b < kChoices; ++b) {
      pairs.insert({a, c[static_cast<std::size_t>(a)], b, c[static_cast<std::size_t>(b)]});
    }
  }
  return pairs;
}

// Cases that have all pairs which the product has: each the one of 30 drawn with most new ones.
std::vector<Case> with_all_pairs(const std::vector<Case>& all, Rng& rng) {
  std::set<Pair> left;
  for (const Case& c : all) left.merge(pairs_of(c));
  std::vector<Case> cases;
  while (!left.empty()) {
    Case best{};
    std::size_t most = 0;
    for (int i = 0; i < 30 || most == 0; ++i) {
      const Case& drawn = all[rng.below(all.size())];
      std::size_t fresh = 0;
      for (const Pair& pair : pairs_of(drawn)) fresh += left.count(pair);
      if (fresh > most) {
        most = fresh;
        best = drawn;
      }
    }
    for (const Pair& pair : pairs_of(best)) left.erase(pair);
    cases.push_back(best);
  }
  return cases;
}

RunOptions run_of(const Case& c) {
  RunOptions run{.steps = kSourcesSteps,
                 .micro_batches = micro_batches_of(c),
                 .replicas = has_replicas(c) ? 2 : 1,
                 .cut = {kLayers}};
  run.make_sources = kSources[static_cast<std::size_t>(c[kSource])].make;
  run.layers = shaped(model::make_llama(small_model()), run.make_sources);
  return run;
}

std::uint64_t rotating_seed() {
  if (const char* given = std::getenv("DYNMO_SEED")) return std::strtoull(given, nullptr, 10);
  return std::random_device()();
}

TEST(Sources, TrainToTheSameBitsHoweverTheyAreRun) {
  const std::uint64_t seed = rotating_seed();
  RecordProperty("seed", std::to_string(seed));
  fmt::print("seed {}\n", seed);
  Rng rng(mix_key({0x50C5, seed}));
  const char* samples = std::getenv("DYNMO_SAMPLES");
  const bool whole = samples != nullptr && std::string_view(samples) == "all";
  const std::vector<Case> all = product();
  std::map<std::array<int, 3>, RunResult> alone;  // by sources, micro-batches, replicas
  for (const Case& c : whole ? all : with_all_pairs(all, rng)) {
    const auto [found, fresh] =
        alone.try_emplace({c[kSource], micro_batches_of(c), has_replicas(c) ? 2 : 1});
    if (fresh) found->second = run_pipeline(run_of(c));
    RunOptions run = run_of(c);
    const schedule::ScheduleKind kind = kKinds[static_cast<std::size_t>(c[kSchedule])];
    run.plan = random_plan(rng, kind, kLayers, ranks_of(c), run.micro_batches);
    if (c[kCopies] == 2) run.recompute = plan::Recompute::kWhole;
    if (moves(c)) run.before_step = random_plans(rng.next(), ranks_of(c), run.micro_batches);
    expect_same(
        found->second, run_pipeline(run),
        fmt::format("seed {}: {}, {} on {} ranks{}{}{}", seed,
                    kSources[static_cast<std::size_t>(c[kSource])].name, plan::to_string(*run.plan),
                    ranks_of(c), has_replicas(c) ? ", two replicas" : "",
                    c[kCopies] == 2 ? ", recomputed" : "", moves(c) ? ", moving" : ""));
    if (HasFailure()) return;
  }
}

// Else the test above would say nothing.
TEST(Sources, DoSomethingWithinItsSteps) {
  RunOptions plain{.steps = kSourcesSteps, .cut = {kLayers}};
  const std::vector<double> dense = run_pipeline(plain).losses;
  for (int source = 0; source < kValues[kSource]; ++source) {
    EXPECT_NE(run_pipeline(run_of({source})).losses, dense)
        << kSources[static_cast<std::size_t>(source)].name;
  }
}

}  // namespace
}  // namespace dynmo::runtime::testing
