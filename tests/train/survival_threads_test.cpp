// SPDX-License-Identifier: Apache-2.0
// A run that loses any rank at any point leaves every bit behind that an undisturbed one does.
//
// A cell is a point of the run, a rank, and what becomes of the rank there. The points are all
// messages that the rank sends or receives in the run, by what they are about, and the moments that
// no message tells of; a first run, in which nothing happens, finds out which ones the rank comes
// by and how often. `make test` draws some of the cells, `make soak` runs all of them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/rng.h"
#include "dynmo/transport/tags.h"
#include "tests/support/samples.h"
#include "tests/support/temp_folder.h"
#include "tests/train/elastic_run.h"
#include "tests/train/survival_points.h"

namespace dynmo::train::testing {
namespace {

constexpr std::size_t kDrawn = 70;      // cells of a scenario, in `make test`
constexpr std::size_t kDrawnInCi = 25;  // by the commit
constexpr int kSteps = 12;

// ---------------------------------------------------------------------------------- scenarios

struct Scenario {
  const char* name;
  int ranks;
  const char* settings;
  int replicas = 1;
  // Once so many steps are done ...
  int at = 0;
  int leaves = -1;                 // ... this rank is asked to leave,
  bool joins = false;              // ... or one comes.
  std::optional<Cell> first = {};  // a rank that is lost before the cell's
};

constexpr const char* kPruned =
    "[freezing]\nenabled = true\nfraction = 0.5\n"
    "[pruning]\nenabled = true\nstart = 0\nend = 8\nevery = 4\n";
constexpr const char* kExperts =
    "[moe]\nenabled = true\nrouter = 'bias'\nexperts = 4\n"
    "[early_exit]\nenabled = true\nexit_every = 1\nwarm_up = 1\nramp_steps = 1\n";

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> kAll = {
      {.name = "Steps", .ranks = 3, .settings = kPruned},
      {.name = "Experts", .ranks = 3, .settings = kExperts},
      {.name = "Replicas", .ranks = 4, .settings = kPruned, .replicas = 2},
      {.name = "TwoOfThree", .ranks = 6, .settings = kPruned, .replicas = 2},
      {.name = "ThreeOfTwo", .ranks = 6, .settings = kPruned, .replicas = 3},
      {.name = "Leaving", .ranks = 3, .settings = kPruned, .at = 4, .leaves = 2},
      {.name = "LeaderLeaving", .ranks = 3, .settings = kPruned, .at = 4, .leaves = 0},
      {.name = "Joining", .ranks = 2, .settings = kPruned, .at = 4, .joins = true},
      {.name = "Recovery",
       .ranks = 4,
       .settings = kPruned,
       .first = Cell{.point = {Origin::kFirst, "before a step"}, .nth = 6, .rank = 1}},
  };
  return kAll;
}

TrainOptions options_for(const Scenario& scenario, const std::filesystem::path& folder) {
  TrainOptions options;
  config::Config& config = options.config;
  const std::string text = fmt::format(
      "[model]\nhidden = 16\nblocks = 4\nheads = 2\nkv_heads = 2\nintermediate = 24\n"
      "sequence = 8\ndropout = 0.1\n[data]\npath = '{0}'\nvalidation_path = '{0}'\nvocabulary = "
      "{1}\n[batch]\n"
      "micro_batches = 4\nmicro_batch_size = 1\n[optimizer]\nwarmup_steps = 3\n[train]\n"
      "steps = {2}\nvalidation_every = 4\nvalidation_steps = 1\n[checkpoint]\nevery = 4\nkeep = "
      "1000\n"
      "[balance]\nminimum_gain = 0\nnoise_factor = 0\n"
      "[elastic]\nenabled = true\nsnapshot_cost = 0.2\n{3}",
      (folder / "tokens").string(), kVocabulary, kSteps, scenario.settings);
  const auto applied = apply_text(config, text, "the test");
  EXPECT_TRUE(applied) << applied.error().message;
  config.run.directory = (folder / "run").string();
  config.pipeline.replicas = scenario.replicas;
  const auto valid = validate(config);
  EXPECT_TRUE(valid) << valid.error().message;
  options.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(std::make_unique<PassingSource>());
    return sources;
  };
  return options;
}

struct Outcome {
  std::map<std::pair<int, Point>, int> passed;  // by rank
  int acted = 0;
  bool went_on = false;  // to the end, some rank
  std::string unexpected;
  std::string story;
};

bool tells_of_loss(const Error& error) {
  return error.code == ErrorCode::kPeerLost || error.message.find(kFault) != std::string::npos ||
         error.message.find("out of memory") != std::string::npos ||
         error.message.find("dropped an operation") != std::string::npos;
}

// One run in which this happens.
Outcome run_with(const Scenario& scenario, const TrainOptions& options,
                 const std::vector<Cell>& cells) {
  std::list<Watcher> watchers;
  std::vector<HubGroups*> ranks;
  bool done = false;
  ElasticCase what{.options = options, .ranks = scenario.ranks};
  what.watch = [&](HubGroups& groups) {
    ranks.push_back(&groups);
    groups.tell(watchers
                    .emplace_back(groups, cells,
                                  std::filesystem::path(options.config.run.directory) / "job.json")
                    .spy());
  };
  what.between = [&](std::int64_t steps, ElasticRun& run) {
    if (done || scenario.at == 0 || steps < scenario.at) return;
    done = true;
    if (scenario.leaves >= 0) ranks[static_cast<std::size_t>(scenario.leaves)]->ask_to_leave();
    if (scenario.joins) run.add_newcomer();
  };
  ElasticRun run(what);
  const auto ran = run.run();
  Outcome outcome;
  outcome.story = run.story();
  if (!ran) outcome.unexpected = ran.error().message;
  const auto ended = run.ended();
  const auto noted_as_lost = [&](std::size_t number) {
    return outcome.story.find(fmt::format("rank {} was lost", number)) != std::string::npos;
  };
  // The lowest of those that were not lost before all was done, and have not left, has led last.
  std::size_t last_leader = 0;
  while (last_leader + 1 < ranks.size() &&
         (noted_as_lost(last_leader) || ranks[last_leader]->was_asked_to_leave())) {
    ++last_leader;
  }
  // A loss before the ranks know each other is not survived: who knows the others by then may be
  // too few.
  bool all_begun = true;
  for (std::size_t i = 0; const Watcher& watcher : watchers) {
    all_begun = all_begun && (ended[i].lost || ended[i].gave_up || watcher.has_begun());
    ++i;
  }
  std::size_t i = 0;
  for (const Watcher& watcher : watchers) {
    const int number = static_cast<int>(i);
    for (const auto& [point, count] : watcher.passed()) outcome.passed[{number, point}] = count;
    outcome.acted += watcher.acted();
    // (Of a leader that was lost after all was done the launcher removes them.)
    const bool launcher_removes = ended[last_leader].lost && !noted_as_lost(last_leader);
    if (watcher.left_files() && noted_as_lost(i) && !launcher_removes) {
      outcome.unexpected += fmt::format("rank {}: job.json is left; ", number);
    }
    if (ranks[i]->has_waited_in_vain() && all_begun) {
      outcome.unexpected += fmt::format("rank {} has waited in vain; ", number);
    }
    const bool left_out = ranks[i]->was_left_out();
    const ElasticRun::Ended& end = ended[i++];
    if (left_out) {
      const bool known = !end.done && end.done.error().code == ErrorCode::kPeerLost &&
                         end.done.error().message.ends_with("go on without this rank");
      if (!known) outcome.unexpected += fmt::format("rank {} was left out, and goes on; ", number);
      continue;
    }
    if (end.lost || end.gave_up) continue;
    const bool excused = end.torn || !all_begun;  // (nor is one in the barrier of a change)
    if (end.done) {
      outcome.went_on =
          outcome.went_on || !ranks[static_cast<std::size_t>(number)]->was_asked_to_leave();
    } else if (!excused || !tells_of_loss(end.done.error())) {
      outcome.unexpected +=
          fmt::format("rank {} ended with: {}; ", number, end.done.error().message);
    }
  }
  return outcome;
}

// -------------------------------------------------------------------------------------- cells

bool may_come(const Scenario& scenario, const Point& point) {
  if (scenario.first) return point.first == Origin::kLoss;
  if (scenario.at == 0 || point.first != Origin::kFirst) return true;
  // The others are those of a run that nobody leaves or joins.
  for (const char* part : {"size", "plan", "vote", "piece", "traffic", "opens", "forms", "formed",
                           "drops", "takes", "taken"}) {
    if (point.second.find(part) != std::string::npos) return true;
  }
  return false;
}

bool applies(const Scenario& scenario, const Cell& cell) {
  const bool message =
      cell.point.second.starts_with("send ") || cell.point.second.starts_with("receive ");
  if (cell.kind == Kind::kCorrupt)
    return message && cell.point.second.ends_with("piece of a layer");
  if (cell.kind == Kind::kSlow) return message;
  // The others are more than half, and nobody else is.
  if (cell.kind == Kind::kSleep) {
    return scenario.at == 0 && !scenario.first && scenario.ranks > 2;
  }
  // Clients of a leader that is gone, but whose thread is there, would wait for it.
  if (scenario.joins && cell.rank == 0 && is_lethal(cell.kind)) {
    return cell.kind == Kind::kThrow || cell.kind == Kind::kNoMemory;
  }
  return true;
}

std::vector<Cell> cells_of(const Scenario& scenario, const Outcome& undisturbed) {
  std::vector<Cell> all;
  for (const auto& [place, count] : undisturbed.passed) {
    const auto& [rank, point] = place;
    if (!may_come(scenario, point) || (scenario.first && scenario.first->rank == rank)) continue;
    std::set<int> times = {0, count / 2, count - 1};
    if (std::getenv("DYNMO_CELL") != nullptr) {
      for (int nth = 0; nth < 2 * count; ++nth) times.insert(nth);
    }
    for (const int nth : times) {
      for (int kind = 0; kind < std::ssize(kKindNames); ++kind) {
        const Cell cell{point, nth, rank, static_cast<Kind>(kind)};
        if (applies(scenario, cell)) all.push_back(cell);
      }
    }
  }
  return all;
}

const std::optional<std::uint64_t>& draw_of_ci() {
  static const auto kDraw = drawn_by("cells of the survivors' table");
  return kDraw;
}

std::uint64_t seed() {
  const char* given = std::getenv("DYNMO_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : draw_of_ci().value_or(1);
}

// Cells run side by side, as their ranks mostly wait for each other and for the disk.
class Cells {
 public:
  Cells(const Scenario& scenario, const TrainOptions& options, const std::filesystem::path& twin,
        std::vector<Cell> cells)
      : scenario_(scenario), options_(options), twin_(twin), cells_(std::move(cells)) {}

  void run() {
    std::vector<std::jthread> workers;
    for (int i = 0; i < kWorkers; ++i) {
      workers.emplace_back([this, i] {
        TrainOptions mine = options_;
        mine.config.run.directory += fmt::format("-{}", i);
        while (!::testing::Test::HasFailure()) {
          const std::size_t at = next_++;
          if (at >= cells_.size()) return;
          run(cells_[at], mine);
        }
      });
    }
  }
  [[nodiscard]] int ran() const { return ran_; }
  // Runs that did not come by the point: no two move the same layers at the same steps.
  [[nodiscard]] int passed_by() const { return passed_by_; }
  [[nodiscard]] int resumed() const { return resumed_; }

 private:
  static constexpr int kWorkers = 4;

  void run(const Cell& cell, const TrainOptions& options) {
    SCOPED_TRACE(fmt::format("seed {}: {}", seed(), cell.text()));
    const std::filesystem::path folder = options.config.run.directory;
    std::filesystem::remove_all(folder);
    std::vector<Cell> all = {cell};
    if (scenario_.first) all.push_back(*scenario_.first);
    const Outcome outcome = run_with(scenario_, options, all);
    ++ran_;
    if (outcome.acted < std::ssize(all)) ++passed_by_;
    EXPECT_TRUE(outcome.unexpected.empty()) << outcome.unexpected;
    if (!outcome.went_on && outcome.unexpected.empty()) {
      const auto found = checkpoint::list_checkpoints(folder / "checkpoints");
      TrainOptions again = options;
      again.resume = found && !found->empty();
      again.overwrite = !again.resume;
      const auto done = train_twin(again, scenario_.replicas > 1 ? scenario_.replicas : 2);
      EXPECT_TRUE(done) << "resumed: " << done.error().message;
      ++resumed_;
    }
    const bool loses =
        is_lethal(cell.kind) || cell.kind == Kind::kSleep || scenario_.first.has_value();
    expect_as_twin_after_losses(folder, twin_, loses ? 2 : 0);
    if (::testing::Test::HasFailure()) ADD_FAILURE() << cell.text() << "\n" << outcome.story;
  }

  const Scenario& scenario_;
  const TrainOptions& options_;
  const std::filesystem::path& twin_;
  std::vector<Cell> cells_;
  std::atomic<std::size_t> next_{0};
  std::atomic<int> ran_{0};
  std::atomic<int> passed_by_{0};
  std::atomic<int> resumed_{0};
};

// DYNMO_CELL: of all cells, also those that are not drawn, the one of this text. DYNMO_SAMPLES: all
// or a number.
std::vector<Cell> drawn(std::vector<Cell> cells, std::size_t scenario) {
  if (const char* only = std::getenv("DYNMO_CELL")) {
    std::erase_if(cells, [&](const Cell& cell) { return cell.text() != only; });
    return cells;
  }
  const char* samples = std::getenv("DYNMO_SAMPLES");
  if (samples != nullptr && draws_all_samples()) return cells;
  // `make soak` has these: where not all know the others, those that do look for a minute.
  std::erase_if(cells, [](const Cell& cell) {
    return cell.kind == Kind::kSleep && cell.point.first == Origin::kFirst &&
           cell.point.second.ends_with("hosts");
  });
  Rng rng(mix_key({seed(), scenario}));
  for (std::size_t i = cells.size(); i > 1; --i) std::swap(cells[i - 1], cells[rng.below(i)]);
  const std::size_t count = draw_of_ci() ? kDrawnInCi : kDrawn;
  cells.resize(std::min(cells.size(), draws_all_samples() ? count : count / 5));
  return cells;
}

class SurvivalThreads : public ::testing::TestWithParam<std::size_t> {};

TEST_P(SurvivalThreads, NoLossChangesABit) {
  const Scenario& scenario = scenarios()[GetParam()];
  const TempFolder folder;
  write_tokens(folder.path() / "tokens", kVocabulary);
  const TrainOptions options = options_for(scenario, folder.path());
  TrainOptions twin = options;
  const std::filesystem::path alone = folder.path() / "twin";
  twin.config.run.directory = alone.string();
  twin.config.balance = {.enabled = false};
  const int replicas = scenario.replicas;
  const auto trained = train_twin(twin, replicas > 1 ? replicas : 2);
  ASSERT_TRUE(trained) << trained.error().message;
  std::vector<Cell> first;
  if (scenario.first) first.push_back(*scenario.first);
  const Outcome undisturbed = run_with(scenario, options, first);
  ASSERT_TRUE(undisturbed.unexpected.empty()) << undisturbed.unexpected << undisturbed.story;
  expect_as_twin_after_losses(options.config.run.directory, alone, scenario.first ? 2 : 0);
  for (const char* inside : {"update of a layer", "layer to the disk", "checkpoint committed"}) {
    EXPECT_TRUE(std::ranges::any_of(undisturbed.passed, [&](const auto& each) {
      return each.first.second.second == inside;
    })) << inside;
  }
  const std::vector<Cell> all = cells_of(scenario, undisturbed);

  const auto begin = std::chrono::steady_clock::now();
  Cells cells(scenario, options, alone, drawn(all, GetParam()));
  cells.run();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf(
      "[          ] seed %llu: %zu cells apply, %d ran in %.1f s; %d did not come by their point, "
      "%d ended all ranks and were resumed\n",
      static_cast<unsigned long long>(seed()), all.size(), cells.ran(), took.count(),
      cells.passed_by(), cells.resumed());
  EXPECT_GE(all.size(), 600U);
  EXPECT_LE(2 * cells.passed_by(), cells.ran() + 4);
}

// Whoever has the first layer fails in one step.
class PoisonedStep final : public dynamism::Source {
 public:
  static constexpr std::int64_t kStep = 5;
  std::string_view name() const override { return "poisoned"; }
  Expected<dynamism::Change> before_step(const dynamism::Boundary& boundary) override {
    const bool fails = boundary.step == kStep && boundary.states.contains(LayerId(0));
    if (fails && Watcher::current != nullptr) Watcher::current->fail();
    return dynamism::Change{};
  }
};

TEST(SurvivalOfAStep, AStepThatIsLostThreeTimesEndsTheRun) {
  const TempFolder folder;
  write_tokens(folder.path() / "tokens", kVocabulary);
  const Scenario scenario{.name = "", .ranks = 5, .settings = ""};
  TrainOptions options = options_for(scenario, folder.path());
  options.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(std::make_unique<PoisonedStep>());
    return sources;
  };
  std::list<Watcher> watchers;
  ElasticCase what{.options = options, .ranks = scenario.ranks};
  what.watch = [&](HubGroups& groups) {
    groups.tell(watchers.emplace_back(groups, std::vector<Cell>{}, folder.path() / "job").spy());
  };
  ElasticRun run(what);
  EXPECT_TRUE(run.run());
  int lost = 0;
  for (const ElasticRun::Ended& end : run.ended()) {
    if (end.lost) {
      ++lost;
      continue;
    }
    ASSERT_FALSE(end.done) << run.story();
    EXPECT_EQ(end.done.error().code, ErrorCode::kPeerLost);
    EXPECT_EQ(end.done.error().message,
              fmt::format("step 5 was lost 3 times, at last: rank 2: {}", kFault));
  }
  EXPECT_EQ(lost, 3) << run.story();
}

TEST(SurvivalOfAStop, ALossAfterTheLogsAreClosedLeavesARecordOfEachStep) {
  const TempFolder folder;
  write_tokens(folder.path() / "tokens", kVocabulary);
  // The other replica has all live layers of that step.
  const Scenario scenario{.name = "", .ranks = 4, .settings = "", .replicas = 2};
  TrainOptions options = options_for(scenario, folder.path());
  options.config.balance = {.enabled = false};
  options.config.checkpoint.every = 1;  // where it stops, too
  TrainOptions twin = options;
  twin.config.run.directory = (folder.path() / "twin").string();
  const auto trained = train_twin(twin, 2);
  ASSERT_TRUE(trained) << trained.error().message;
  // Without moves, the first of these messages is about the records that are missing.
  const std::vector<Cell> cells = {{.point = {Origin::kFirst, "send traffic"}, .rank = 3}};
  std::list<Watcher> watchers;
  std::vector<HubGroups*> ranks;
  ElasticCase what{.options = options, .ranks = scenario.ranks};
  what.watch = [&](HubGroups& groups) {
    ranks.push_back(&groups);
    groups.tell(watchers.emplace_back(groups, cells, folder.path() / "job").spy());
  };
  what.between = [&](std::int64_t steps, ElasticRun&) {
    for (HubGroups* groups : ranks) {
      if (steps == 5) groups->ask_to_leave();
    }
  };
  ElasticRun run(what);
  EXPECT_TRUE(run.run());
  int stopped = 0;
  for (const ElasticRun::Ended& end : run.ended()) {
    if (end.lost || end.done) continue;  // or a spare
    EXPECT_EQ(end.done.error().code, ErrorCode::kInterrupted) << end.done.error().message;
    ++stopped;
  }
  EXPECT_EQ(stopped, 2) << run.story();
  options.resume = true;
  const auto resumed = train_twin(options, 2);
  ASSERT_TRUE(resumed) << resumed.error().message;
  expect_as_twin_after_losses(options.config.run.directory, twin.config.run.directory, 2);
}

INSTANTIATE_TEST_SUITE_P(In, SurvivalThreads, ::testing::Range<std::size_t>(0, scenarios().size()),
                         [](const auto& each) {
                           return std::string(scenarios()[each.param].name);
                         });

}  // namespace
}  // namespace dynmo::train::testing
