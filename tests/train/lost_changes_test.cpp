// SPDX-License-Identifier: Apache-2.0
// A loss interrupts a change of the number of ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <vector>

#include "dynmo/core/files.h"
#include "tests/support/temp_folder.h"
#include "tests/train/elastic_run.h"
#include "tests/train/survival_points.h"

namespace dynmo::train::testing {
namespace {

TrainOptions options_of(const std::filesystem::path& folder) {
  TrainOptions options;
  const std::string text = fmt::format(
      "[model]\nhidden = 16\nblocks = 4\nheads = 2\nkv_heads = 2\nintermediate = 24\nsequence = 8\n"
      "[data]\npath = '{}'\nvocabulary = {}\n[batch]\nmicro_batches = 4\nmicro_batch_size = 1\n"
      "[train]\nsteps = 30\nvalidation_every = 0\n[checkpoint]\nevery = 10\nkeep = 1000\n"
      "[elastic]\nenabled = true\n",
      (folder / "tokens").string(), kVocabulary);
  const auto applied = apply_text(options.config, text, "the test");
  EXPECT_TRUE(applied) << applied.error().message;
  options.config.run.directory = (folder / "run").string();
  return options;
}

// The leavers have ended when the next group fails, before the newcomers know that it is in force.
TEST(LostChanges, WhatHasLeftIsReleasedThoughTheNewcomerIsLost) {
  const TempFolder folder;
  write_tokens(folder.path() / "tokens", kVocabulary);
  std::vector<HubGroups*> ranks;
  std::atomic<bool> taken{false};
  bool waits = false;  // as does the next one, on the leader's thread
  int asks = 0;
  ElasticCase what{.options = options_of(folder.path()), .ranks = 3};
  what.watch = [&](HubGroups& groups) {
    ranks.push_back(&groups);
    if (ranks.size() > 1) return;
    // After the vote, the leader's only such message is the newcomer's confirmation.
    const Tag tag = transport::control_tag(Control::kSize);
    const auto fails = [&] {
      if (!taken.exchange(false)) return;
      groups.group().abort(make_error(ErrorCode::kPeerLost, "its network has failed"));
    };
    groups.tell({.faults =
                     [=](const transport::Transport&, Origin, bool&) {
                       return std::vector<Fault>{{.kind = Fault::Kind::kCall,
                                                  .first_tag = tag,
                                                  .last_tag = tag,
                                                  .count = std::numeric_limits<int>::max(),
                                                  .call = fails}};
                     },
                 .at =
                     [&](Moment moment) {
                       taken = taken || moment == Moment::kTaken;
                       // All ranks have decided that the newcomer waits.
                       if (moment == Moment::kAsks && waits && ++asks == 2) {
                         ranks[1]->ask_to_leave();
                       }
                     }});
  };
  // The newcomer waits for the checkpoint under way, and a rank leaves meanwhile.
  what.between = [&](std::int64_t done, ElasticRun& run) {
    if (done == 10) run.add_newcomer();
    if (done == 11) waits = true;
  };
  ElasticRun run(what);
  const auto done = run.run();
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_NE(run.story().find("its network has failed: on with ranks 0, 2"), std::string::npos)
      << run.story();
  EXPECT_NE(run.story().find("release 1: rank 1"), std::string::npos) << run.story();
}

// The generation of a group that never was is not that of the survivors' group.
TEST(LostChanges, TheSurvivorsGroupHasANumberOfItsOwn) {
  const TempFolder folder;
  write_tokens(folder.path() / "tokens", kVocabulary);
  std::map<int, std::vector<Moment>> met;
  ElasticCase what{.options = options_of(folder.path()), .ranks = 3};
  what.watch = [&](HubGroups& groups) {
    const int number = static_cast<int>(groups.self().id.value) - 1;
    std::vector<Moment>& mine = met[number];
    groups.tell({.at = [&groups, &mine, number](Moment moment) {
      if (moment == Moment::kMeets || moment == Moment::kMet) mine.push_back(moment);
      if (moment == Moment::kForms && number == 2) groups.die("it was killed");
    }});
  };
  what.between = [&](std::int64_t, ElasticRun& run) {
    if (met.size() == 3) run.add_newcomer();
  };
  ElasticRun run(what);
  const auto done = run.run();
  ASSERT_TRUE(done) << done.error().message;
  for (const int number : {0, 1}) {
    const std::vector<Moment> once = {Moment::kMeets, Moment::kMet};
    EXPECT_EQ(met[number], once) << "rank " << number << "\n" << run.story();
  }
}

}  // namespace
}  // namespace dynmo::train::testing
