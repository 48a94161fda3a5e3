// SPDX-License-Identifier: Apache-2.0
// A group loses a rank, and the others go back to what they have in memory: the same bits as if
// nothing had been lost.
#include "dynmo/runtime/snapshot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "dynmo/elastic/recovery.h"
#include "dynmo/runtime/regroup.h"
#include "tests/runtime/named_sources.h"

namespace dynmo::runtime::testing {
namespace {

using schedule::ScheduleKind;
using transport::Fault;
using transport::Transport;

TEST(Keepers, AreOnAnotherHostWhereThereIsOne) {
  const auto of = [](std::vector<int> hosts) {
    std::vector<int> numbers;
    for (const WorldRank rank : keepers(hosts)) numbers.push_back(rank.value);
    return numbers;
  };
  EXPECT_EQ(of({0}), (std::vector{0}));
  EXPECT_EQ(of({0, 0, 0}), (std::vector{1, 2, 0}));
  EXPECT_EQ(of({0, 1, 0, 1}), (std::vector{1, 2, 3, 0}));
  EXPECT_EQ(of({0, 0, 1, 1}), (std::vector{2, 3, 0, 1}));
  EXPECT_EQ(of({0, 0, 0, 1, 1, 1, 2, 2, 2}), (std::vector{3, 4, 5, 6, 7, 8, 0, 1, 2}));
  EXPECT_EQ(of({0, 0, 1}), (std::vector{1, 2, 0}));
}

// How far the ranks are in a step when one of them is lost.
enum class End { kBetweenSteps, kBeforeExchange, kSomeHaveFinished, kCount };

// One training: what all its ranks have alike.
struct Training {
  RunOptions run;
  model::Model layers;
  PipelineOptions options;
  int every = 1;  // steps between two snapshots
  std::vector<double> losses = {};

  explicit Training(const RunOptions& given, int steps_between = 1)
      : run(given),
        layers(model::in_precision(given.layers, given.precision)),
        options(pipeline_options(small_model(), given)),
        every(steps_between) {}

  [[nodiscard]] MicroBatch batch_of(std::int64_t step, MicroBatchId id) const {
    return batch(small_model(), run.seed, step, id);
  }
  [[nodiscard]] Pipeline::Batches batches() const {
    return [this](std::int64_t step, MicroBatchId id) { return batch_of(step, id); };
  }
};

std::vector<WorldRank> next_ranks(int ranks) {
  return keepers(std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

// Another cut, placement and order now and then.
Expected<void> move(Pipeline& pipeline, const Training& training) {
  const int ranks = pipeline.plan().ranks;
  if (training.run.balancing == Balancing::kAutomatic || ranks == 1) return {};
  if (pipeline.next_step() % 3 != 2) return {};
  Rng rng(mix_key({training.run.seed, static_cast<std::uint64_t>(pipeline.next_step()),
                   static_cast<std::uint64_t>(pipeline.plan().generation)}));
  constexpr std::array kMoving = {ScheduleKind::kGpipe, ScheduleKind::k1F1B, ScheduleKind::kZbH1,
                                  ScheduleKind::kAdaptive};
  DYNMO_ASSIGN(const bool moved, pipeline.apply(random_plan(
                                     rng, kMoving[rng.below(kMoving.size())], kLayers, ranks,
                                     training.run.micro_batches, pipeline.plan().generation + 1)));
  EXPECT_TRUE(moved) << pipeline.last_migration().refusal;
  return {};
}

// The steps of one rank in one group, before `until`, and what it does of that one.
Expected<void> train_until(Transport& group, Training& training, std::int64_t until, End end,
                           RankState& state) {
  at::set_num_threads(1);
  const std::vector<WorldRank> keeping = next_ranks(group.size());
  Pipeline pipeline(group, training.layers, training.options, std::move(state));
  if (pipeline.costs()) DYNMO_TRY(pipeline.go_on());
  const std::int64_t first = pipeline.next_step();
  while (pipeline.next_step() < until) {
    const std::int64_t step = pipeline.next_step();
    if (step == first || step % training.every == 0) {
      DYNMO_ASSIGN(const MigrationReport report, pipeline.take_snapshot(keeping));
      EXPECT_TRUE(report.committed) << report.refusal;
    }
    DYNMO_TRY(move(pipeline, training));
    DYNMO_ASSIGN(const StepReport report, pipeline.step(training.batches()));
    if (group.rank() != transport::Member(0)) continue;
    training.losses.resize(static_cast<std::size_t>(step) + 1);
    training.losses.back() = report.loss;
  }
  if (end != End::kBetweenSteps) {
    DYNMO_TRY(pipeline.begin_step(training.batches()));
  }
  if (end == End::kSomeHaveFinished) {
    DYNMO_ASSIGN(const Exchange exchanged, pipeline.exchange_figures());
    if (group.rank().value % 2 == 1) DYNMO_TRY(pipeline.finish_step(exchanged));
  }
  state = pipeline.take_state();
  return {};
}

std::vector<elastic::Report> reports_of(const std::vector<RankState>& states) {
  std::vector<elastic::Report> reports;
  for (const RankState& state : states) {
    elastic::Report report{.step = state.step};
    for (const Holdings::Layer& held : holdings_of(state).layers) {
      report.holdings.push_back(held.copy);
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

// One rank of a group of those that are left, which begins again at `step`.
Expected<void> begin_again(Transport& group, const Training& training, std::int64_t step,
                           std::size_t lost, const plan::Plan& plan, RankState& state) {
  roll_back(state, step);
  if (state.controller) {
    std::vector<std::optional<Rank>> before;
    for (int i = 0; i < group.size(); ++i) {
      before.emplace_back(Rank(i < static_cast<int>(lost) ? i : i + 1));
    }
    state.controller->ranks_changed(before);
  }
  const transport::Grid grid(group, 1);
  return regroup_at(step, grid, training.layers, plan, state, training.run.staging);
}

std::vector<RankState> first_states(const Training& training, const plan::Plan& plan) {
  std::vector<RankState> states(static_cast<std::size_t>(plan.ranks));
  for (int rank = 0; rank < plan.ranks; ++rank) {
    LayerStates layers;
    if (training.run.begin) {
      layers = std::move(training.run.begin(training.layers, plan, Rank(rank)).value().states);
    } else {
      layers = initial_states(training.layers, plan, Rank(rank), training.run.seed);
    }
    states[static_cast<std::size_t>(rank)] = {.plan = plan, .layers = std::move(layers)};
  }
  return states;
}

std::map<int, std::string> digests_of(const std::vector<RankState>& states) {
  std::map<int, std::string> digests;
  for (const RankState& state : states) {
    for (const auto& [id, layer] : state.layers) {
      digests[id.value] = model::digest(model::on_device(layer, at::kCPU)).hex();
    }
  }
  return digests;
}

RunOptions run_with(const NamedSources& sources, int steps) {
  model::LlamaConfig config = small_model();
  config.shape.blocks = sources.blocks;
  RunOptions run{.steps = steps, .micro_batches = 4, .cut = {kLayers}};
  run.make_sources = sources.make;
  run.imported = sources.imported;
  if (sources.imported) run.begin = unlike_matrices;
  run.layers = shaped(model::make_llama(config), run.make_sources);
  return run;
}

// From `ranks` ranks to one: again and again a rank is lost, and the rest begins again.
void lose_all_but_one(Training& training, int ranks, Rng& rng, const std::string& what) {
  Generation generation = 0;
  plan::Plan plan =
      plan::make_plan(random_cut(rng, kLayers, ranks), ScheduleKind::k1F1B, generation);
  std::vector<RankState> states = first_states(training, plan);
  std::int64_t step = 0;
  std::optional<std::size_t> lost;
  for (; ranks > 0; --ranks) {
    const std::int64_t left = training.run.steps - step;
    const std::int64_t until =
        ranks == 1 ? training.run.steps
                   : step + 1 +
                         static_cast<std::int64_t>(rng.below(
                             static_cast<std::uint64_t>(std::max<std::int64_t>(left / ranks, 1))));
    const bool last = until >= training.run.steps;
    const auto end = last ? End::kBetweenSteps : static_cast<End>(rng.below(3));
    const auto done = transport::run_ranks(ranks, [&](Transport& group) -> Expected<void> {
      at::set_num_threads(1);
      RankState& state = states[group.rank().index()];
      if (lost) DYNMO_TRY(begin_again(group, training, step, *lost, plan, state));
      return train_until(group, training, until, end, state);
    });
    ASSERT_TRUE(done) << what << ", " << ranks << " ranks: " << done.error().message;
    if (last) break;
    lost = rng.below(static_cast<std::uint64_t>(ranks));
    states.erase(states.begin() + static_cast<std::ptrdiff_t>(*lost));
    const auto decision =
        elastic::recover({.layers = kLayers, .initial_values = false}, reports_of(states));
    ASSERT_TRUE(decision) << what << ": " << decision.error().message;
    EXPECT_EQ(decision->origin, elastic::Origin::kMemory) << what;
    EXPECT_LE(until - decision->step, training.every) << what;
    EXPECT_GE(decision->step, step) << what;
    step = decision->step;
    generation += 1000;
    plan = plan::make_plan(random_cut(rng, kLayers, ranks - 1), ScheduleKind::k1F1B, generation);
  }
  const RunResult alone = run_pipeline(training.run);
  ASSERT_TRUE(alone.status) << what << ": " << alone.status.error().message;
  EXPECT_EQ(training.losses, alone.losses) << what;
  EXPECT_EQ(digests_of(states), alone.states) << what;
}

TEST(Snapshot, ARankThatIsLostAfterAnyStepChangesNoBit) {
  const char* given = std::getenv("DYNMO_SEED");
  const std::uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  const char* samples = std::getenv("DYNMO_SAMPLES");
  const int cases = samples != nullptr ? std::atoi(samples) : 12;
  Rng rng(mix_key({0x54A9, seed}));
  for (int i = 0; i < cases && !HasFailure(); ++i) {
    const NamedSources& sources = kSources[rng.below(kSources.size())];
    RunOptions run = run_with(sources, /*steps=*/20);
    if (i % 2 == 1) run.precision = cost::Precision::kBf16;
    if (i % 3 == 2) run.balancing = Balancing::kAutomatic;
    Training training(run, 1 + static_cast<int>(rng.below(4)));
    const int ranks = 2 + static_cast<int>(rng.below(3));
    lose_all_but_one(training, ranks, rng,
                     fmt::format("seed {}, case {}: {} on {} ranks, every {} steps", seed, i,
                                 sources.name, ranks, training.every));
  }
}

// The tags that a snapshot sends on.
Fault at_message(Fault::Kind kind, Fault::On on, int first, int count = 1) {
  return {.kind = kind,
          .on = on,
          .first_tag = transport::kFirstMigrationTag,
          .last_tag = transport::kFirstReductionTag - 1,
          .first = first,
          .count = count};
}
Fault at_vote(Fault::On on, int first) {
  const transport::Tag vote = transport::control_tag(transport::Control::kSnapshot);
  return {.on = on, .first_tag = vote, .last_tag = vote, .first = first};
}

constexpr int kThree = 3;

// Three ranks that have a snapshot of step 0 and stand before step 2.
struct BeforeTheSecond {
  RunOptions run = run_with(kSources.front(), /*steps=*/5);
  Training training = Training(run, /*steps_between=*/5);
  plan::Plan plan = plan::make_plan({3, 2, 3}, ScheduleKind::k1F1B);
  std::vector<RankState> states = first_states(training, plan);

  BeforeTheSecond() {
    const auto done = transport::run_ranks(kThree, [&](Transport& group) {
      return train_until(group, training, 2, End::kBetweenSteps, states[group.rank().index()]);
    });
    EXPECT_TRUE(done) << done.error().message;
  }

  // The second one, with faults at rank 1: whether a rank was told of an error.
  bool take(const std::vector<Fault>& faults, std::vector<MigrationReport>& reports) {
    reports.resize(kThree);
    const auto done = transport::run_ranks(kThree, [&](Transport& inner) -> Expected<void> {
      at::set_num_threads(1);
      const auto group = transport::with_faults(
          inner, inner.rank() == transport::Member(1) ? faults : std::vector<Fault>());
      RankState& state = states[inner.rank().index()];
      Pipeline pipeline(*group, training.layers, training.options, std::move(state));
      auto report = pipeline.take_snapshot(next_ranks(kThree));
      state = pipeline.take_state();
      if (report) reports[inner.rank().index()] = *std::move(report);
      return report ? Expected<void>() : report.error();
    });
    return !done;
  }
};

// Rank 1 is lost with a message; the others end with the bits of an undisturbed run, from the older
// or the newer snapshot. Returns whether there was such a message.
bool lose_rank_1_at(const Fault& fault, const RunResult& alone, std::set<std::int64_t>& steps) {
  BeforeTheSecond before;
  std::vector<MigrationReport> reports;
  if (!before.take({fault}, reports)) return false;
  before.states.erase(before.states.begin() + 1);
  const auto decision =
      elastic::recover({.layers = kLayers, .initial_values = false}, reports_of(before.states));
  EXPECT_TRUE(decision) << decision.error().message;
  if (!decision) return true;
  steps.insert(decision->step);
  const plan::Plan plan = plan::make_plan({4, 4}, ScheduleKind::k1F1B, 7);
  const auto done = transport::run_ranks(2, [&](Transport& group) -> Expected<void> {
    at::set_num_threads(1);
    RankState& state = before.states[group.rank().index()];
    DYNMO_TRY(begin_again(group, before.training, decision->step, 1, plan, state));
    return train_until(group, before.training, before.run.steps, End::kBetweenSteps, state);
  });
  EXPECT_TRUE(done) << done.error().message;
  EXPECT_EQ(before.training.losses, alone.losses);
  EXPECT_EQ(digests_of(before.states), alone.states);
  return true;
}

TEST(Snapshot, ALossAtAnyMessageLeavesAWholeOne) {
  const RunResult alone = run_pipeline(BeforeTheSecond().run);
  std::set<std::int64_t> steps;
  int losses = 0;
  for (const Fault::On on : {Fault::On::kSend, Fault::On::kReceive}) {
    for (int message = 0; !HasFailure(); ++message) {
      SCOPED_TRACE(fmt::format("{} {}", on == Fault::On::kSend ? "send" : "receive", message));
      if (!lose_rank_1_at(at_message(Fault::Kind::kFail, on, message), alone, steps)) break;
      ++losses;
    }
    for (int message = 0; message < kThree - 1; ++message) {
      losses += lose_rank_1_at(at_vote(on, message), alone, steps) ? 1 : 0;
    }
  }
  // Rank 1 has two layers, and keeps three: each a header, its pieces and a digest.
  EXPECT_GE(losses, 3 * (2 + 3) + 2);
  for (const std::int64_t step : steps) EXPECT_TRUE(step == 0 || step == 2) << step;
}

TEST(Snapshot, ACopyThatIsRefusedLeavesTheOneBefore) {
  BeforeTheSecond before;
  std::vector<MigrationReport> reports;
  ASSERT_FALSE(before.take({at_message(Fault::Kind::kCorrupt, Fault::On::kSend, 1)}, reports));
  for (int rank = 0; rank < kThree; ++rank) {
    const auto place = static_cast<std::size_t>(rank);
    EXPECT_FALSE(reports[place].committed);
    EXPECT_NE(reports[place].refusal.find("checksum"), std::string::npos);
    ASSERT_TRUE(before.states[place].snapshot);
    EXPECT_EQ(before.states[place].snapshot->step, 0);
    EXPECT_TRUE(before.states[place].arriving.empty());
  }
  ASSERT_FALSE(before.take({}, reports));
  for (const RankState& state : before.states) EXPECT_EQ(state.snapshot->step, 2);
}

// Training does not write into it, and it is without gradients.
TEST(Snapshot, HoldsWhatTheLayersWere) {
  BeforeTheSecond before;
  const auto copies = [&] {
    std::map<std::pair<std::size_t, int>, std::string> digests;
    for (std::size_t rank = 0; rank < kThree; ++rank) {
      for (const LayerStates* some :
           {&before.states[rank].snapshot->own, &before.states[rank].snapshot->neighbours}) {
        for (const auto& [id, layer] : *some) {
          digests[{rank, id.value}] = model::digest(layer).hex();
          for (const model::Parameter& parameter : layer.parameters) {
            EXPECT_FALSE(parameter.gradient.defined());
          }
        }
      }
    }
    return digests;
  };
  const auto old = copies();
  EXPECT_EQ(old.size(), 2U * kLayers);
  const auto first = digests_of(first_states(before.training, before.plan));
  for (const auto& [place, digest] : old) EXPECT_EQ(digest, first.at(place.second));
  std::vector<MigrationReport> reports;
  ASSERT_FALSE(before.take({}, reports));
  const auto live = digests_of(before.states);
  for (const auto& [place, digest] : copies()) EXPECT_EQ(digest, live.at(place.second));
}

}  // namespace
}  // namespace dynmo::runtime::testing
