// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/moe/load.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/dynamism/moe/load_counts.h"
#include "tests/dynamism/shapes.h"
#include "tests/support/temp_folder.h"

namespace dynmo::dynamism {
namespace {

// All experts alike in every layer: what is left is the drawing.
MoeOptions even(int ranks) {
  MoeOptions p;
  p.expert_ranks = ranks;
  p.min_skew = p.max_skew = p.drift = 0;
  return p;
}

constexpr std::size_t kFirstMoe = 2;  // embedding, attention, MoE

// phi of the first MoE layer, read back from its time: (F - router) / (dense F - router).
double phi_of(const cost::ModelCost& model, const LoadInputs& inputs) {
  const auto& shape = inputs.shape;
  const double router = 2.0 * static_cast<double>(shape.tokens() * shape.hidden * shape.experts) /
                        inputs.device.flops_per_s;
  const double all = dense(inputs).layers[kFirstMoe].forward_s;
  return (model.layers[kFirstMoe].forward_s - router) / (all - router);
}

TEST(Moe, StragglerFactorIsTheBusiestDeviceOverTheMean) {
  const std::vector<double> load = {1, 2, 3, 6};
  EXPECT_DOUBLE_EQ(straggler_factor(load, 1, 100), 1);
  EXPECT_DOUBLE_EQ(straggler_factor(load, 2, 100), 2.0 * 9 / 12);
  EXPECT_DOUBLE_EQ(straggler_factor(load, 4, 100), 4.0 * 6 / 12);
  // Capacity 3: the last expert drops half of its tokens.
  EXPECT_DOUBLE_EQ(straggler_factor(load, 4, 3), 4.0 * 3 / 12);
  EXPECT_DOUBLE_EQ(straggler_factor(load, 1, 3), 9.0 / 12);
  // Collapse onto one expert: R.
  EXPECT_DOUBLE_EQ(straggler_factor(std::vector<double>{0, 0, 0, 8}, 4, 8), 4);
}

TEST(Moe, ZipfSharesSumToOneAndFall) {
  EXPECT_EQ(zipf(4, 0), (std::vector<double>(4, 0.25)));
  const std::vector<double> share = zipf(3, 1);  // 1 : 1/2 : 1/3
  EXPECT_NEAR(share[0], 6.0 / 11, 1e-15);
  EXPECT_NEAR(share[2], 2.0 / 11, 1e-15);
}

// The mean of the largest of `count` standard normal deviates: the integral of x over its density.
double mean_largest_normal(int count) {
  constexpr double kStep = 1e-3;
  double mean = 0;
  for (double x = -8; x < 8; x += kStep) {
    const double density = std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0));
    const double below = std::erfc(-x / std::sqrt(2.0)) / 2;
    mean += x * count * density * std::pow(below, count - 1) * kStep;
  }
  return mean;
}

// R devices of T tokens draw R k T assignments. A device's share has the mean k T and, less the
// mean of all, the std sqrt(k T) of a normal number. So phi is 1 + E[largest of R] / sqrt(k T)
// even where all experts are equally popular.
TEST(Moe, EvenExpertsReachTheMultinomialFloor) {
  for (const int ranks : {8, 16, 64}) {
    for (const std::int64_t tokens : {1024, 4096}) {
      MoeOptions p = even(ranks);
      p.sampled_micro_batches = 2000;
      auto shape = mixture(1, ranks, 2);
      shape.sequence = shape.positions = tokens;
      const LoadInputs inputs = inputs_of(shape);
      const double floor =
          mean_largest_normal(ranks) / std::sqrt(2.0 * static_cast<double>(tokens));
      // The mean of 2,000 has a std of at most 0.012 of the floor.
      EXPECT_NEAR((phi_of((*make_moe(p, inputs))->at(5000), inputs) - 1) / floor, 1, 0.05)
          << ranks << " ranks, " << tokens << " tokens";
    }
  }
}

// The normal approximation against tokens drawn one by one.
TEST(Moe, AgreesWithTokensDrawnOneByOne) {
  constexpr int kRanks = 8;
  constexpr int kRounds = 100;
  const auto shape = mixture(1, kRanks, 2);
  double phi = 0;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    Rng rng(mix_key({0x70CE5, round}));
    std::vector<double> load(kRanks, 0.0);
    for (std::int64_t i = 0; i < kRanks * 2 * shape.tokens(); ++i) load[rng.below(kRanks)] += 1;
    phi += straggler_factor(load, kRanks, 1e9) / kRounds;
  }
  MoeOptions p = even(kRanks);
  p.sampled_micro_batches = 2000;
  const LoadInputs inputs = inputs_of(shape);
  // The std of one phi is about 0.01, of the mean of 100 0.001.
  EXPECT_NEAR(phi_of((*make_moe(p, inputs))->at(0), inputs), phi, 0.004);
}

// With all experts on one device and nothing dropped every assignment is computed there, so cost is
// constant; a capacity makes skewed layers do less.
TEST(Moe, OneDeviceWorksConstantlyUnlessTokensAreDropped) {
  const LoadInputs inputs = inputs_of(mixture(2, 8, 2));
  MoeOptions p;
  p.expert_ranks = 1;
  const auto model = (*make_moe(p, inputs))->at(100);
  EXPECT_NEAR(phi_of(model, inputs), 1, 1e-12);
  p.capacity_factor = 1;
  double before = 1.01;
  for (const double skew : {0.0, 0.5, 1.0, 2.0}) {
    p.min_skew = p.max_skew = skew;
    const double phi = phi_of((*make_moe(p, inputs))->at(9000), inputs);
    EXPECT_LT(phi, before) << "skew " << skew;
    before = phi;
  }
  EXPECT_LT(before, 0.6);
}

TEST(Moe, DefaultsLieInThePlanningRange) {
  double least = 10;
  double most = 0;
  double sum = 0;
  int count = 0;
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const LoadInputs inputs = inputs_of(default_shape("moe"), seed);
    const auto model = (*make_moe({}, inputs))->at(8000);
    const double phi = phi_of(model, inputs);
    least = std::min(least, phi);
    most = std::max(most, phi);
    sum += phi;
    ++count;
  }
  EXPECT_GT(least, 1.05);
  EXPECT_LT(most, 2.0);
  EXPECT_GT(sum / count, 1.2);
  EXPECT_LT(sum / count, 1.6);
}

// Popularity changes most in the first 10^2 to 10^3 steps and slowly after: adjacent steps are
// alike, which FlexMoE (Nie et al. 2023) and Pro-Prophet (Wang et al. 2024) rest on.
TEST(Moe, DriftsFastFirstAndSlowlyLater) {
  const LoadInputs inputs = inputs_of(default_shape("moe"), 3);
  MoeOptions p;
  p.sampled_micro_batches = 400;  // the draws averaged out
  const auto load = make_moe(p, inputs);
  const auto moved = [&](std::int64_t from, std::int64_t to) {
    const auto a = (*load)->at(from);
    const auto b = (*load)->at(to);
    double sum = 0;
    for (std::size_t i = kFirstMoe; i < a.layers.size(); i += 2) {
      sum += std::abs(b.layers[i].forward_s / a.layers[i].forward_s - 1);
    }
    return sum / inputs.shape.blocks;
  };
  EXPECT_GT(moved(0, 500), 3 * moved(8000, 8500));
  EXPECT_LT(moved(8000, 8001), 0.02);  // adjacent steps are alike
  EXPECT_GT(moved(4000, 9000), 2 * moved(8000, 8001));
}

TEST(Moe, OnlyTheExpertsScale) {
  const LoadInputs inputs = inputs_of(mixture(3, 8, 2));
  const auto all = dense(inputs);
  const auto model = (*make_moe({}, inputs))->at(7);
  ASSERT_EQ(model.size(), all.size());
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    const bool moe = i % 2 == 0 && i > 0 && i + 1 < model.layers.size();
    if (!moe) {
      EXPECT_EQ(model.layers[i], all.layers[i]) << i;
      continue;
    }
    EXPECT_GT(model.layers[i].forward_s, all.layers[i].forward_s);
    EXPECT_GT(model.layers[i].activation_bytes, all.layers[i].activation_bytes);
    // 8 experts on 8 devices: an eighth of the weights, and the router.
    const auto& s = inputs.shape;
    const auto router = static_cast<double>(s.hidden * s.experts) * 2;
    EXPECT_NEAR(static_cast<double>(model.layers[i].parameter_bytes.value) - router,
                (static_cast<double>(all.layers[i].parameter_bytes.value) - router) / 8, 2);
    EXPECT_EQ(model.layers[i].boundary_bytes, all.layers[i].boundary_bytes);
  }
}

TEST(Moe, FaultsNameTheField) {
  const LoadInputs inputs = inputs_of(mixture(1, 8, 2));
  MoeOptions p;
  p.expert_ranks = 3;
  EXPECT_EQ(make_moe(p, inputs).error().message,
            "moe.expert_ranks is 3, wanted a divisor of the 8 experts");
  p = {};
  p.drift = std::nan("");
  EXPECT_EQ(make_moe(p, inputs).error().message, "moe.drift is nan, wanted 0 to 10");
  EXPECT_NE(make_moe({}, inputs_of(gpt(1, 512, 512))).error().message.find("no experts"),
            std::string::npos);
}

constexpr const char* kRecords =
    R"({"step": 0, "sources": {"moe": {"counts": [[1, 2, 3, 6], [3, 3, 3, 3]], "entropy": [1, 1]}}}
{"step": 1, "loss": 2.5}
{"step": 5, "sources": {"moe": {"counts": [[0, 0, 0, 8], [8, 0, 0, 0]]}}}
{"step": 6, "sour)";

TEST(MoeCounts, AreThoseOfTheNewestStepWrittenBefore) {
  const auto counts = parse_counts(kRecords, "records");
  ASSERT_TRUE(counts) << counts.error().message;
  EXPECT_EQ(counts->experts, 4);
  EXPECT_EQ(counts->steps.size(), 2U);
  EXPECT_EQ(counts->at(-1)[0], (std::vector<double>{1, 2, 3, 6}));
  EXPECT_EQ(counts->at(4)[0], (std::vector<double>{1, 2, 3, 6}));
  EXPECT_EQ(counts->at(900)[1], (std::vector<double>{8, 0, 0, 0}));
}

TEST(MoeCounts, ThatAreNoneAreRefusedByLine) {
  const auto message = [](std::string_view text) {
    const auto counts = parse_counts(text, "records");
    EXPECT_TRUE(counts || counts.error().code == ErrorCode::kBadInput);
    return counts ? std::string() : counts.error().message;
  };
  const auto record = [](std::string_view counts) {
    return fmt::format(R"({{"step": 3, "sources": {{"moe": {{"counts": {}}}}}}})", counts) + "\n";
  };
  EXPECT_NE(message("").find("moe.enabled"), std::string::npos);
  EXPECT_NE(message("{}\n").find("no record"), std::string::npos);
  EXPECT_NE(message("{}\nnothing\n{}\n").find("records:2"), std::string::npos);
  for (const char* bad :
       {"4", "[]", "[[]]", "[[1, -1]]", "[[1e16, 1]]", "[[1, 2], [1]]", "[[\"a\"]]"}) {
    EXPECT_NE(message(record(bad)).find("records:1: /sources/moe/counts"), std::string::npos)
        << bad;
  }
  EXPECT_NE(message(record("[[1, 2]]") + record("[[1, 2, 3]]")).find("records:2"),
            std::string::npos);
}

// Blocks of the scenario lie in proportion to those that were recorded.
TEST(MoeCounts, AreTheStragglerFactorsOfALoad) {
  const TempFolder folder;
  MoeOptions p;
  p.counts = (folder.path() / "rank-0.jsonl").string();
  ASSERT_TRUE(write_file_durably(p.counts, kRecords));
  LoadInputs inputs = inputs_of(mixture(4, 4, 2));
  for (const int ranks : {1, 2, 4}) {
    p.expert_ranks = ranks;
    const auto load = make_moe(p, inputs);
    ASSERT_TRUE(load) << load.error().message;
    EXPECT_NEAR(phi_of((*load)->at(0), inputs),
                straggler_factor(std::vector<double>{1, 2, 3, 6}, ranks, 100), 1e-9);
    EXPECT_NEAR(phi_of((*load)->at(77), inputs),
                straggler_factor(std::vector<double>{0, 0, 0, 8}, ranks, 100), 1e-9);
  }
  inputs.shape.experts = 8;
  const auto refused = make_moe(p, inputs);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("moe.counts"), std::string::npos);
  p.counts = "nowhere.jsonl";
  EXPECT_EQ(make_moe(p, inputs).error().code, ErrorCode::kBadInput);
}

// In a training whose tokens leave on the way, experts behind exits have the tokens that came, and
// in the end none.
TEST(MoeCounts, OfBlocksBehindExitsAreTheTokensThatCame) {
  const TempFolder folder;
  MoeOptions p;
  p.counts = (folder.path() / "rank-0.jsonl").string();
  p.expert_ranks = 2;
  ASSERT_TRUE(write_file_durably(
      p.counts, R"({"step": 0, "sources": {"moe": {"counts": [[8, 8], [6, 2], [0, 0]]}}})"
                "\n"));
  const LoadInputs inputs = inputs_of(mixture(3, 2, 1));
  const auto load = make_moe(p, inputs);
  ASSERT_TRUE(load) << load.error().message;
  const cost::ModelCost now = (*load)->at(0);
  const cost::ModelCost all = dense(inputs);
  const auto& shape = inputs.shape;
  // The router's product stays.
  const double router =
      2. * static_cast<double>(shape.tokens() * shape.hidden * shape.experts) / 1e12;
  const double experts = all.layers[2].forward_s - router;
  EXPECT_NEAR(now.layers[2].forward_s, router + experts, 1e-9);
  EXPECT_NEAR(now.layers[4].forward_s, router + experts * 0.5 * 1.5, 1e-9);
  EXPECT_NEAR(now.layers[6].forward_s, router, 1e-9);
}

}  // namespace
}  // namespace dynmo::dynamism
