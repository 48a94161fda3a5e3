// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/text.h"

#include <gtest/gtest.h>

#include "dynmo/schedule/generate.h"
#include "tests/schedule/random_pipelines.h"

namespace dynmo::schedule {
namespace {

using testing::action;
using testing::pick;

TEST(ActionText, SpellsEveryKindAsPyTorchDoes) {
  EXPECT_EQ(to_string(action(ActionKind::kForward, 2, 0)), "2F0");
  EXPECT_EQ(to_string(action(ActionKind::kBackward, 2, 0)), "2B0");
  EXPECT_EQ(to_string(action(ActionKind::kInputGradient, 2, 0)), "2I0");
  EXPECT_EQ(to_string(action(ActionKind::kWeightGradient, 2, 0)), "2W0");
  EXPECT_EQ(to_string(action(ActionKind::kSendActivation, 1, 0)), "1SEND_F0");
  EXPECT_EQ(to_string(action(ActionKind::kReceiveActivation, 1, 0)), "1RECV_F0");
  EXPECT_EQ(to_string(action(ActionKind::kSendGradient, 1, 12)), "1SEND_B12");
  EXPECT_EQ(to_string(action(ActionKind::kReceiveGradient, 10, 0)), "10RECV_B0");
}

TEST(ActionText, ReadsBackWhatItWrites) {
  Rng rng(1);
  for (int i = 0; i < 1000; ++i) {
    const Action given = action(static_cast<ActionKind>(pick(rng, 0, 7)), pick(rng, 0, 2147483646),
                                pick(rng, 0, 2147483646));
    const Expected<Action> read = parse_action(to_string(given));
    ASSERT_TRUE(read) << "draw " << i << " of seed 1: " << read.error().message;
    EXPECT_EQ(*read, given) << "draw " << i << " of seed 1";
  }
}

TEST(ActionText, RefusesWhatIsNoAction) {
  for (const char* text : {"", "F", "2F", "F0", "20", "-2F0", "2F-1", " 2F0", "2F0 ", "2F0F1",
                           "2f0", "2RECV_W0", "99999999999F0", "2F99999999999", "2_0"}) {
    const Expected<Action> read = parse_action(text);
    ASSERT_FALSE(read) << "'" << text << "' was read as " << to_string(*read);
    EXPECT_EQ(read.error().code, ErrorCode::kBadInput);
    EXPECT_EQ(read.error().message.find('\n'), std::string::npos);
  }
}

TEST(ActionText, SuggestsTheNearestKind) {
  const Expected<Action> read = parse_action("1SND_F0");
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().message,
            "action '1SND_F0' has the unknown kind 'SND_F', did you mean 'SEND_F'?");
}

// Random bytes over the alphabet of actions: whatever is accepted must be written back as given,
// but for leading zeros.
TEST(ActionText, AcceptsOnlyTextItCanWriteBack) {
  constexpr std::string_view kAlphabet = "0123FBIWSENDRCV_";
  Rng rng(2);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = std::to_string(pick(rng, 0, 99));
    for (int n = pick(rng, 0, 6); n > 0; --n) text += kAlphabet[rng.below(kAlphabet.size())];
    const Expected<Action> read = parse_action(text);
    if (!read || text[text.find_last_not_of("0123") + 1] == '0') continue;
    ++accepted;
    EXPECT_EQ(to_string(*read), text) << "draw " << i << " of seed 2";
  }
  EXPECT_GT(accepted, 100);
}

TEST(Grid, PrintsOneLineARankInAlignedColumns) {
  const PipelineShape shape{
      .ranks = 3, .micro_batches = 3, .stages = {{.rank = Rank{0}}, {.rank = Rank{2}}}};
  EXPECT_EQ(to_grid(*make_schedule(ScheduleKind::k1F1B, shape)),
            "rank 0 | 0F0 0F1 0B0 0F2 0B1 0B2\n"
            "rank 1 | idle\n"
            "rank 2 | 1F0 1B0 1F1 1B1 1F2 1B2\n");
}

TEST(Grid, MarksPositionsAndCutsTheRest) {
  const Schedule schedule = *make_schedule(ScheduleKind::kGpipe, testing::even_shape(2, 3));
  const std::vector<Position> marked = {{Rank{1}, 2}, {Rank{1}, 3}, {Rank{7}, 0}};
  EXPECT_EQ(to_grid(schedule, {.marked = marked}),
            "rank 0 | 0F0 0F1 0F2   0B0   0B1 0B2\n"
            "rank 1 | 1F0 1F1 >1F2< >1B0< 1B1 1B2\n");
  EXPECT_EQ(to_grid(schedule, {.marked = marked, .context = 1}),
            "rank 0 | ...\n"
            "rank 1 | ... 1F1 >1F2< >1B0< 1B1 ...\n");
}

}  // namespace
}  // namespace dynmo::schedule
