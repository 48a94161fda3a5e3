// SPDX-License-Identifier: Apache-2.0
// A run loses one rank after the other, the leader among them, and others join. What it leaves
// behind tells of the whole run.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/run_history.h"
#include "dynmo/observe/summary.h"
#include "dynmo/observe/traffic_log.h"
#include "tests/support/samples.h"
#include "tests/support/temp_folder.h"
#include "tests/train/elastic_run.h"
#include "tests/train/survival_points.h"

namespace dynmo::train::testing {
namespace {

constexpr int kRanks = 4;
constexpr int kStepsBetween = 3;

int losses_to_see() {
  return std::getenv("DYNMO_SAMPLES") != nullptr && draws_all_samples() ? 40 : 8;
}

TrainOptions options_of(const std::filesystem::path& folder, int steps) {
  TrainOptions options;
  const std::string text = fmt::format(
      "[model]\nhidden = 16\nblocks = 4\nheads = 2\nkv_heads = 2\nintermediate = 24\nsequence = 8\n"
      "[data]\npath = '{0}'\nvalidation_path = '{0}'\nvocabulary = {1}\n"
      "[batch]\nmicro_batches = 4\nmicro_batch_size = 1\n"
      "[train]\nsteps = {2}\nvalidation_every = 10\nvalidation_steps = 1\n"
      "[checkpoint]\nevery = 10\nkeep = 1000\n[run]\nload_trace = 1\n"
      "[elastic]\nenabled = true\nsnapshot_cost = 0.2\n",
      (folder / "tokens").string(), kVocabulary, steps);
  const auto applied = apply_text(options.config, text, "the test");
  EXPECT_TRUE(applied) << applied.error().message;
  options.config.run.directory = (folder / "run").string();
  return options;
}

// Between two steps: has the next rank lost once all are there, in turn the leader and the last.
class Hunter {
 public:
  explicit Hunter(int losses) : left_(losses) {}

  void watch(HubGroups& groups) {
    const int number = static_cast<int>(groups.self().id.value) - 1;
    ++started_;
    groups.tell({.at = [this, number, &groups](Moment moment) {
      if (moment != Moment::kAsks) return;
      {
        const std::lock_guard lock(mutex_);
        if (!lost_.contains(number)) train_.insert(number);
      }
      if (victim_ == number) {
        victim_ = -1;
        groups.expect_loss();
        groups.die("it was killed");
      }
    }});
  }
  void between(ElasticRun& run) {
    if (++calls_ < kStepsBetween || victim_ >= 0 || left_ == 0) return;
    calls_ = 0;
    std::unique_lock lock(mutex_);
    const auto waiting = started_ - std::ssize(train_) - std::ssize(lost_);
    if (waiting == 0 && std::ssize(train_) < kRanks) {
      lock.unlock();
      return run.add_newcomer();
    }
    if (waiting > 0) return;
    const int victim = left_-- % 2 == 0 ? *train_.begin() : *train_.rbegin();
    train_.erase(victim);
    lost_.insert(victim);
    victim_ = victim;
  }
  [[nodiscard]] const std::set<int>& lost() const { return lost_; }

 private:
  int left_;
  int calls_ = 0;
  std::int64_t started_ = 0;
  std::mutex mutex_;     // guards the next two
  std::set<int> train_;  // those that do
  std::set<int> lost_;
  std::atomic<int> victim_{-1};
};

TEST(ManyLosses, TheSummaryTellsOfTheWholeRunWhoeverLed) {
  const TempFolder folder;
  write_tokens(folder.path() / "tokens", kVocabulary);
  const int losses = losses_to_see();
  const int steps = 6 * kStepsBetween * losses + 20;
  const TrainOptions options = options_of(folder.path(), steps);
  TrainOptions twin = options;
  twin.config.run.directory = (folder.path() / "twin").string();
  twin.config.balance.enabled = false;
  const auto trained = train_twin(twin, 2);
  ASSERT_TRUE(trained) << trained.error().message;

  Hunter hunter(losses);
  ElasticCase what{.options = options, .ranks = kRanks};
  what.watch = [&](HubGroups& groups) { hunter.watch(groups); };
  what.between = [&](std::int64_t, ElasticRun& run) { hunter.between(run); };
  ElasticRun run(what);
  const auto done = run.run();
  ASSERT_TRUE(done) << done.error().message;
  ASSERT_EQ(std::ssize(hunter.lost()), losses) << run.story();
  const observe::RunFolder own(options.config.run.directory);
  expect_as_twin_after_losses(own.root(), twin.config.run.directory, losses);

  const auto summary = observe::read_summary(own.summary());
  ASSERT_TRUE(summary) << summary.error().message;
  const observe::RunSummary& whole = summary->runs.at(0);
  EXPECT_EQ(whole.steps, steps);
  ASSERT_TRUE(whole.size);
  EXPECT_EQ(whole.size->losses, losses) << run.story();
  EXPECT_EQ(whole.validation_step, steps);
  // Each line names the rank that was lost.
  for (const int lost : hunter.lost()) {
    EXPECT_NE(run.story().find(fmt::format("rank {} was lost", lost)), std::string::npos)
        << "rank " << lost << "\n"
        << run.story();
  }
  EXPECT_EQ(run.story().find("summary  is of"), std::string::npos) << run.story();

  // The load trace goes on with whoever leads; of a step under way at a loss it may have no line.
  const auto load = dynamism::read_trace(own.load_trace(0));
  ASSERT_TRUE(load) << load.error().message;
  const std::vector<std::int64_t> recorded = (*load)->recorded_steps();
  EXPECT_LE(recorded.front(), 1);
  EXPECT_EQ(recorded.back(), steps - 1);
  EXPECT_GE(std::ssize(recorded) + 2 * losses, steps);

  // A group's predictions name its own ranks, also of a validation before its first step.
  const auto traffic = observe::read_traffic(own.traffic());
  ASSERT_TRUE(traffic) << traffic.error().message;
  EXPECT_GE(std::ssize(*traffic), losses);
}

// A rack fails: each loss is noticed in the recovery from the one before.
TEST(ManyLosses, InOneRecoveryAreNoStepThatIsLostManyTimes) {
  const TempFolder folder;
  write_tokens(folder.path() / "tokens", kVocabulary);
  const TrainOptions options = options_of(folder.path(), 20);
  TrainOptions twin = options;
  twin.config.run.directory = (folder.path() / "twin").string();
  twin.config.balance.enabled = false;
  const auto trained = train_twin(twin, 2);
  ASSERT_TRUE(trained) << trained.error().message;

  std::atomic<bool> fails{false};
  std::array<std::atomic<int>, 5> reported{};  // ranks, by recovery
  ElasticCase what{.options = options, .ranks = 8};
  what.watch = [&](HubGroups& groups) {
    const int number = static_cast<int>(groups.self().id.value) - 1;
    const auto met = std::make_shared<int>(0);
    // Before the next group is measured, when all have reported what they have: 5 in the first
    // recovery, then 3, then 1. Others have copies of their layers.
    const auto measures = [&, number, met] {
      ++reported.at(static_cast<std::size_t>(*met));
      if (number % 2 == 0 || number + 2 * *met != 7) return;
      while (reported.at(static_cast<std::size_t>(*met)) < 8 - *met) std::this_thread::yield();
      groups.die("its rack has no power");
    };
    const Tag hosts = transport::control_tag(Control::kHosts);
    groups.tell({.faults =
                     [=](const transport::Transport&, Origin origin, bool&) {
                       std::vector<Fault> faults;
                       if (origin == Origin::kLoss) {
                         faults.push_back({.kind = Fault::Kind::kCall,
                                           .first_tag = hosts,
                                           .last_tag = hosts,
                                           .call = measures});
                       }
                       return faults;
                     },
                 .at =
                     [&, number, met](Moment moment) {
                       if (moment == Moment::kMet) ++*met;
                       if (moment != Moment::kAsks || number != 7 || !fails) return;
                       groups.die("its rack has no power");
                     }});
  };
  what.between = [&](std::int64_t done, ElasticRun&) { fails = fails || done == 7; };
  ElasticRun run(what);
  const auto done = run.run();
  ASSERT_TRUE(done) << done.error().message;
  const std::string& story = run.story();
  EXPECT_EQ(story.find(": on with "), story.rfind(": on with ")) << "one recovery\n" << story;
  const auto ended = run.ended();
  for (std::size_t rank = 0; rank < ended.size(); ++rank) {
    EXPECT_EQ(ended[rank].lost, rank % 2 == 1) << "rank " << rank << "\n" << run.story();
    EXPECT_TRUE(ended[rank].lost || ended[rank].done) << run.story();
  }
  expect_as_twin_after_losses(options.config.run.directory, twin.config.run.directory, 2);
}

// Damages the newest checkpoint: one byte of a layer.
void damage(const std::filesystem::path& checkpoint) {
  const auto path = checkpoint / checkpoint::layer_file_name(LayerId(1));
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-1, std::ios::end);
  const char last = static_cast<char>(file.get());
  file.seekp(-1, std::ios::end);
  file.put(static_cast<char>(~last));
  EXPECT_TRUE(file.good());
}

// The newest checkpoint is newer than the snapshot, but it cannot be read.
TEST(ManyLosses, ADamagedCheckpointDoesNotCostTheSnapshot) {
  const TempFolder folder;
  write_tokens(folder.path() / "tokens", kVocabulary);
  TrainOptions options = options_of(folder.path(), 40);
  options.config.checkpoint.every = 20;
  options.config.elastic.snapshot_cost = 0.0001;  // none after the second, before step 1
  TrainOptions twin = options;
  twin.config.run.directory = (folder.path() / "twin").string();
  twin.config.balance.enabled = false;
  const auto trained = train_twin(twin, 2);
  ASSERT_TRUE(trained) << trained.error().message;

  const observe::RunFolder own(options.config.run.directory);
  std::list<Watcher> watchers;  // with them a checkpoint is on the disk after some steps
  std::atomic<bool> dies{false};
  ElasticCase what{.options = options, .ranks = 3};
  what.watch = [&](HubGroups& groups) {
    Watcher& watcher = watchers.emplace_back(groups, std::vector<Cell>{}, folder.path() / "job");
    HubGroups::Spy spy = watcher.spy();
    if (groups.self().id.value == 2) {
      spy.at = [&](Moment moment) {
        if (moment == Moment::kAsks && dies) groups.die("it was killed");
      };
    }
    groups.tell(std::move(spy));
  };
  what.between = [&](std::int64_t, ElasticRun&) {
    const auto found = checkpoint::list_checkpoints(own.checkpoints());
    if (!found || found->empty() || dies) return;
    damage(found->front().path);
    dies = true;
  };
  ElasticRun run(what);
  const auto done = run.run();
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_NE(run.story().find("the checkpoint of step 20 cannot be used"), std::string::npos)
      << run.story();
  const auto events = read_file(own.events());
  ASSERT_TRUE(events);
  EXPECT_NE(events->find(R"("from":"snapshot")"), std::string::npos) << *events;
  expect_as_twin_after_losses(own.root(), twin.config.run.directory, /*unfinished=*/0);
}

// A run that is resumed sums up what came before, too.
TEST(ManyLosses, TheSummaryOfAResumedRunIsOfTheWhole) {
  const TempFolder folder;
  write_tokens(folder.path() / "tokens", kVocabulary);
  TrainOptions whole = options_of(folder.path(), 30);
  whole.config.elastic = {};
  ASSERT_TRUE(train_twin(whole, 2));
  TrainOptions parts = whole;
  parts.config.run.directory = (folder.path() / "parts").string();
  ASSERT_TRUE(train_twin(parts, 2));
  const observe::RunFolder own(parts.config.run.directory);
  std::filesystem::remove_all(own.checkpoints() / "step-00000030");  // it was killed before
  parts.resume = true;
  ASSERT_TRUE(train_twin(parts, 1));
  const auto one = observe::read_summary(observe::RunFolder(whole.config.run.directory).summary());
  const auto two = observe::read_summary(own.summary());
  ASSERT_TRUE(one) << one.error().message;
  ASSERT_TRUE(two) << two.error().message;
  const observe::RunSummary& wanted = one->runs.at(0);
  const observe::RunSummary& found = two->runs.at(0);
  EXPECT_EQ(found.steps, 30);
  EXPECT_EQ(found.loss_digest, wanted.loss_digest);
  EXPECT_EQ(found.loss_first, wanted.loss_first);
  EXPECT_EQ(found.validation_loss, wanted.validation_loss);
  EXPECT_GT(found.checkpoints_written, wanted.checkpoints_written);
  EXPECT_GE(found.seconds, 30 * 1e-6);
}

}  // namespace
}  // namespace dynmo::train::testing
