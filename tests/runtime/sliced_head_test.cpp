// SPDX-License-Identifier: Apache-2.0
// A head in slices in a pipeline: any ranks, cut, schedule and move has the bits of one rank.
#include <gtest/gtest.h>

#include "dynmo/core/rng.h"
#include "dynmo/model/decoder.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

constexpr std::int64_t kWords = 8 * 128 + 61;
constexpr int kSlices = 8;
constexpr int kSliced = kLayers + kSlices - 1;

struct SlicedCase {
  cost::Family family;
  bool tied;
  cost::Precision precision;
};

void PrintTo(const SlicedCase& c, std::ostream* out) {
  *out << cost::name(c.family) << (c.tied ? ", tied" : "")
       << (c.precision == cost::Precision::kBf16 ? ", bf16" : "");
}

class SlicedHead : public ::testing::TestWithParam<SlicedCase> {
 protected:
  [[nodiscard]] static RunOptions options(int steps, int micro_batches, std::int64_t slices) {
    const model::LlamaConfig sizes = small_model();
    model::DecoderConfig config;
    if (GetParam().family == cost::Family::kLlama) {
      model::LlamaConfig llama = sizes;
      llama.tied_embeddings = GetParam().tied;
      config = llama;
    } else {
      model::Gpt2Config gpt2;
      gpt2.shape = sizes.shape;
      gpt2.shape.kv_heads = 0;
      gpt2.shape.positions = sizes.shape.sequence;
      gpt2.tied_embeddings = GetParam().tied;
      config = gpt2;
    }
    std::visit(
        [&](auto& decoder) {
          decoder.shape.vocabulary = kWords;
          decoder.shape.head_slices = slices;
        },
        config);
    RunOptions options;
    options.steps = steps;
    options.micro_batches = micro_batches;
    options.layers = model::make_decoder(config);
    options.ties = model::ties(config);
    options.precision = GetParam().precision;
    options.vocabulary = kWords;
    return options;
  }
};

TEST_P(SlicedHead, AnyScheduleOnUpToFourRanksEqualsOneRankBitForBit) {
  constexpr std::uint64_t kSeed = 41;
  for (const int ranks : {2, 3, 4}) {
    RunOptions single = options(6, 2 * ranks, kSlices);
    single.cut = {kSliced};
    const RunResult expected = run_pipeline(single);
    Rng rng(mix_key({kSeed, static_cast<std::uint64_t>(ranks)}));
    for (const auto kind : kKinds) {
      RunOptions pipelined = options(6, 2 * ranks, kSlices);
      pipelined.plan = random_plan(rng, kind, kSliced, ranks, 2 * ranks);
      expect_same(expected, run_pipeline(pipelined),
                  fmt::format("seed {}, {} {}", kSeed, schedule::name(kind),
                              plan::to_string(*pipelined.plan)));
    }
  }
}

TEST_P(SlicedHead, RandomChangesOfPlanWithFreezingChangeNoBit) {
  constexpr std::uint64_t kSeed = 43;
  constexpr int kRanks = 3;
  constexpr int kMicroBatches = 6;
  RunOptions still = options(60, kMicroBatches, kSlices);
  still.cut = {3, 2, kSliced - 5};
  if (!GetParam().tied) still.freezing = freezing();
  RunOptions moving = still;
  std::set<std::pair<Rank, Rank>> owners;  // of the first and the last slice
  std::mutex mutex;
  moving.before_step = random_plans(kSeed, kRanks, kMicroBatches,
                                    [&](const Pipeline& pipeline, schedule::ScheduleKind) {
                                      const std::lock_guard lock(mutex);
                                      owners.emplace(pipeline.plan().owner(LayerId(kLayers - 1)),
                                                     pipeline.plan().owner(LayerId(kSliced - 1)));
                                    });
  expect_same(run_pipeline(still), run_pipeline(moving), fmt::format("seed {}", kSeed));
  EXPECT_TRUE(std::ranges::any_of(owners, [](const auto& o) { return o.first != o.second; }));
}

TEST_P(SlicedHead, ReplicasAndRecomputationChangeNoBit) {
  RunOptions single = options(6, 4, kSlices);
  single.cut = {kSliced};
  single.accumulation = 2;
  RunOptions again = options(6, 4, kSlices);
  again.cut = {4, kSliced - 4};
  again.accumulation = 2;
  again.recompute = plan::Recompute::kWhole;
  expect_same(run_pipeline(single), run_pipeline(again), "recomputed");
  RunOptions replicas = options(6, 4, kSlices);
  replicas.replicas = 2;
  replicas.cut = {kSliced};
  const RunResult of_one_rank = run_pipeline(replicas);
  replicas.cut = {kSliced - 5, 5};
  expect_same(of_one_rank, run_pipeline(replicas), "two replicas of two ranks");
}

// The sums are others, so that the last bits are, too; the start and the path are the same.
TEST_P(SlicedHead, TrainsAsTheWholeHeadDoes) {
  RunOptions whole = options(8, 4, 1);
  whole.cut = {kLayers};
  RunOptions sliced = options(8, 4, kSlices);
  sliced.cut = {kSliced};
  const RunResult expected = run_pipeline(whole);
  const RunResult found = run_pipeline(sliced);
  ASSERT_TRUE(expected.status.has_value() && found.status.has_value());
  const bool bf16 = GetParam().precision == cost::Precision::kBf16;
  for (std::size_t step = 0; step < expected.losses.size(); ++step) {
    EXPECT_NEAR(found.losses[step], expected.losses[step], bf16 ? 2e-2 : 2e-5) << "step " << step;
  }
}

// The two numbers of a token that slices carry are at the end of its row: one flipped bit of either
// shows in the run, so the tests above would notice if they did not arrive.
TEST_P(SlicedHead, ACarriedNumberThatIsWithheldShows) {
  RunOptions run = options(4, 2, kSlices);
  run.cut = {kSliced - 3, 3};
  const RunResult expected = run_pipeline(run);
  ASSERT_TRUE(expected.status) << expected.status.error().message;
  const std::size_t hidden = 32;
  for (const std::size_t number : {hidden, hidden + 1}) {
    const std::size_t high_byte = 4 * number + 2;
    run.faults = {{.kind = transport::Fault::Kind::kCorrupt,
                   .first_tag = transport::schedule_tag(0, 0),
                   .last_tag = transport::schedule_tag(1, 0) - 1,
                   .byte = high_byte}};
    run.faulty = transport::Member(0);  // sends activations alone
    const RunResult found = run_pipeline(run);
    ASSERT_TRUE(found.status) << found.status.error().message;
    EXPECT_NE(found.losses, expected.losses) << number;
    // The score of the target is in the loss alone: its gradient is a constant.
    if (number == hidden) {
      EXPECT_NE(found.states, expected.states) << number;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Of, SlicedHead,
    ::testing::Values(SlicedCase{cost::Family::kLlama, false, cost::Precision::kFp32},
                      SlicedCase{cost::Family::kLlama, true, cost::Precision::kFp32},
                      SlicedCase{cost::Family::kGpt2, true, cost::Precision::kFp32},
                      SlicedCase{cost::Family::kLlama, false, cost::Precision::kBf16},
                      SlicedCase{cost::Family::kGpt2, true, cost::Precision::kBf16}),
    [](const auto& test) {
      return fmt::format("{}{}{}", cost::name(test.param.family), test.param.tied ? "Tied" : "",
                         test.param.precision == cost::Precision::kBf16 ? "Bf16" : "");
    });

// A rank that is lost at any message of the boundary between two slices, or while single slices
// move, ends every rank with the same error.
TEST(SlicedHeadLoss, AtAnyMessageOfABoundaryOrAMoveEndsEveryRank) {
  model::LlamaConfig config = small_model();
  config.shape.vocabulary = kWords;
  config.shape.head_slices = kSlices;
  RunOptions run{.steps = 2, .micro_batches = 3, .cut = {kSliced - 3, 3}};
  run.layers = model::make_llama(config);
  run.vocabulary = kWords;
  run.before_step = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 1) return {};
    // One slice goes to the other rank.
    DYNMO_TRY(pipeline.apply(
        plan::make_plan({kSliced - 2, 2}, pipeline.plan().schedule, /*generation=*/1)));
    return {};
  };
  const RunResult undisturbed = run_pipeline(run);
  ASSERT_TRUE(undisturbed.status) << undisturbed.status.error().message;
  const auto lost_at = [&](transport::Tag first_tag, transport::Tag last_tag) {
    int lost = 0;
    for (const int rank : {0, 1}) {
      for (int message = 0;; ++message) {
        run.faulty = transport::Member(rank);
        run.faults = {{.kind = transport::Fault::Kind::kFail,
                       .first_tag = first_tag,
                       .last_tag = last_tag,
                       .first = message}};
        const RunResult result = run_pipeline(run);
        if (result.status) {
          expect_same(undisturbed, result, "a fault behind the last message");
          break;
        }
        EXPECT_EQ(result.status.error().code, ErrorCode::kPeerLost)
            << result.status.error().message;
        ++lost;
      }
    }
    return lost;
  };
  // 3 micro-batches a step there and back; a step more for the gradients of the fixture.
  EXPECT_EQ(lost_at(transport::schedule_tag(0, 0), transport::schedule_tag(1, 0) - 1), 3 * 2 * 3);
  EXPECT_GE(
      lost_at(transport::migration_tag(LayerId(0)), transport::migration_tag(LayerId(kSliced))), 1);
}

}  // namespace
}  // namespace dynmo::runtime::testing
