// SPDX-License-Identifier: Apache-2.0
// A head in slices in a pipeline: any ranks, cut, schedule and move has the bits of one rank.
#include <gtest/gtest.h>

#include "dynmo/core/rng.h"
#include "dynmo/model/decoder.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

constexpr std::int64_t kWords = 3 * 128 + 61;
constexpr int kSlices = 3;
constexpr int kSliced = kLayers + kSlices - 1;

struct Case {
  cost::Family family;
  bool tied;
  cost::Precision precision;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << cost::name(c.family) << (c.tied ? ", tied" : "")
       << (c.precision == cost::Precision::kBf16 ? ", bf16" : "");
}

class SlicedHead : public ::testing::TestWithParam<Case> {
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

TEST_P(SlicedHead, AnyScheduleOnUpToThreeRanksEqualsOneRankBitForBit) {
  constexpr std::uint64_t kSeed = 41;
  for (const int ranks : {2, 3}) {
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
  RunOptions still = options(30, kMicroBatches, kSlices);
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
  replicas.cut = {5, kSliced - 6, 1};
  expect_same(of_one_rank, run_pipeline(replicas), "two replicas");
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

INSTANTIATE_TEST_SUITE_P(
    Of, SlicedHead,
    ::testing::Values(Case{cost::Family::kLlama, false, cost::Precision::kFp32},
                      Case{cost::Family::kLlama, true, cost::Precision::kFp32},
                      Case{cost::Family::kGpt2, true, cost::Precision::kFp32},
                      Case{cost::Family::kLlama, false, cost::Precision::kBf16},
                      Case{cost::Family::kGpt2, true, cost::Precision::kBf16}),
    [](const auto& test) {
      return fmt::format("{}{}{}", cost::name(test.param.family), test.param.tied ? "Tied" : "",
                         test.param.precision == cost::Precision::kBf16 ? "Bf16" : "");
    });

}  // namespace
}  // namespace dynmo::runtime::testing
