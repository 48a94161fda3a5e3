// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/question/advice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/cost/device.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/plan/pack.h"
#include "dynmo/plan/question/question.h"
#include "tests/plan/cuts.h"

namespace dynmo::plan {
namespace {

// Layers of F = I = W, without memory or messages.
cost::ModelCost timed_model(const std::vector<double>& milliseconds) {
  cost::ModelCost model;
  for (const double each : milliseconds) {
    cost::LayerCost layer;
    layer.name = "layer " + std::to_string(model.size());
    layer.forward_s = layer.backward_input_s = layer.backward_weight_s = each / 3e3;
    model.layers.push_back(layer);
  }
  return model;
}

cost::ModelCost model_with_head(int blocks, double head_ms) {
  std::vector<double> times(static_cast<std::size_t>(blocks), 3.0);
  times.push_back(head_ms);
  cost::ModelCost model = timed_model(times);
  model.layers.back().name = "head";
  return model;
}

Advice advice_on(const AdviceProblem& problem) {
  const auto advice = advise(problem);
  EXPECT_TRUE(advice);
  return advice.value_or(Advice{});
}

std::optional<double> optimal_step_s(const ModelCosts& models, const cost::Cluster& cluster,
                                     int ranks, int micro_batches) {
  double sum = 0;
  for (const cost::ModelCost& model : models) {
    const auto proposal = propose_on(ranks_to_keep(cluster, ranks), Balancer::kOptimal,
                                     {{model, cluster, micro_batches}});
    if (!proposal) return std::nullopt;
    sum += proposal->evaluation.step_time_s;
  }
  return sum / static_cast<double>(models.size());
}

// Every number of ranks is tried here, also those that no balance would allow.
TEST(Advice, FewestRanksAreThoseOfTryingEveryNumber) {
  int fewer = 0;
  int none = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Rng rng(mix_key({0xADF1CE, seed}));
    const int ranks = pick(rng, 1, 8);
    const int layers = pick(rng, ranks, 16);
    ModelCosts models;
    for (int i = pick(rng, 1, 3); i > 0; --i) models.push_back(random_model(rng, layers));
    if (pick(rng, 0, 1) == 0) {
      for (cost::ModelCost& model : models) model.layers.back().forward_s = 5e-3;
    }
    cost::Cluster cluster = cost::equal_ranks(ranks);
    const int room = pick(rng, 60, 500);
    for (cost::ClusterRank& rank : cluster.ranks) {
      rank.memory = Bytes{room};
      rank.speed = pick(rng, 0, 2) == 0 ? 0.5 : 1;
    }
    cluster.inside_node.latency_s = pick(rng, 0, 2) * 1e-4;
    const int micro_batches = pick(rng, 1, 12);
    const auto advice =
        advise({.models = models, .cluster = cluster, .micro_batches = micro_batches});
    std::vector<RankCount> tried;
    double best_s = 1e9;
    for (int count = 1; count <= ranks; ++count) {
      const auto step_s = optimal_step_s(models, cluster, count, micro_batches);
      if (!step_s) continue;
      tried.push_back({count, *step_s});
      best_s = std::min(best_s, *step_s);
    }
    const bool fits = !tried.empty() && tried.back().ranks == ranks;
    ASSERT_EQ(advice.has_value(), fits) << "seed " << seed;
    if (!advice) {
      ++none;
      continue;
    }
    const auto fewest = std::find_if(tried.begin(), tried.end(), [&](const RankCount& count) {
      return count.step_s <= (1 + kAdviceMargin) * best_s;
    });
    ASSERT_TRUE(advice->fewest) << "seed " << seed;
    EXPECT_EQ(advice->fewest->ranks, fewest->ranks) << "seed " << seed;
    EXPECT_DOUBLE_EQ(advice->fewest->step_s, fewest->step_s) << "seed " << seed;
    EXPECT_DOUBLE_EQ(advice->best_s, best_s) << "seed " << seed;
    EXPECT_DOUBLE_EQ(advice->all.step_s, tried.back().step_s) << "seed " << seed;
    fewer += advice->fewest->ranks < ranks ? 1 : 0;
  }
  EXPECT_GT(fewer, 50);
  EXPECT_GT(none, 5);
}

// 16 blocks of 3 ms and a head of 24: two ranks of 24 ms and the head's do what eight do.
TEST(Advice, AHeavyHeadIsNamedWithTheFewestSlicesThatDo) {
  const cost::ModelCost model = model_with_head(16, 24);
  const cost::Cluster cluster = cost::equal_ranks(8);
  const auto sliced = [&](std::int64_t slices) -> Expected<ModelCosts> {
    DYNMO_ASSIGN(cost::ModelCost one, with_head_slices(model, slices));
    return ModelCosts{one};
  };
  const Advice advice =
      advice_on({.models = {model}, .cluster = cluster, .micro_batches = 32, .sliced = sliced});
  EXPECT_EQ(advice.limit, StepLimit::kHead);
  EXPECT_EQ(advice.layer, "head");
  ASSERT_TRUE(advice.fewest);
  EXPECT_LT(advice.fewest->ranks, 5);
  ASSERT_TRUE(advice.remedy);
  EXPECT_EQ(advice.remedy->key, AdviceKey::kHeadSlices);
  // The remedy is what a plan with that value takes, and no other number does better with less.
  const std::int64_t chosen = std::stoll(advice.remedy->value);
  double best_s = 1e9;
  for (std::int64_t slices = 2; slices <= 64; slices *= 2) {
    const auto step_s = optimal_step_s(*sliced(slices), cluster, 8, 32);
    ASSERT_TRUE(step_s);
    best_s = std::min(best_s, *step_s);
    if (slices == chosen) {
      EXPECT_DOUBLE_EQ(advice.remedy->step_s, *step_s);
    } else if (slices < chosen) {
      EXPECT_GT(*step_s, advice.remedy->step_s);
    }
  }
  EXPECT_LE(advice.remedy->step_s, (1 + kAdviceMargin) * best_s);
  EXPECT_LT(advice.remedy->step_s, 0.6 * advice.all.step_s);
}

TEST(Advice, WhatBoundsTheStepIsNamed) {
  const cost::Cluster four = cost::equal_ranks(4);
  const cost::ModelCost even = timed_model(std::vector<double>(16, 3));
  // Nothing but the first and the last micro-batches of 1,000.
  EXPECT_EQ(advice_on({.models = {even}, .cluster = four, .micro_batches = 1000}).limit,
            StepLimit::kWork);
  const Advice filling = advice_on({.models = {even}, .cluster = four, .micro_batches = 4});
  EXPECT_EQ(filling.limit, StepLimit::kFill);
  ASSERT_TRUE(filling.remedy);
  EXPECT_EQ(filling.remedy->key, AdviceKey::kSchedule);
  const auto kind = schedule::parse_schedule_kind(filling.remedy->value);
  ASSERT_TRUE(kind);
  const auto with = propose(Balancer::kOptimal, {{even, four, 4}, *kind});
  ASSERT_TRUE(with);
  EXPECT_DOUBLE_EQ(filling.remedy->step_s, with->evaluation.step_time_s);

  const Advice more = advice_on(
      {.models = {even}, .cluster = four, .micro_batches = 4, .schedules = ScheduleChoice::kBest});
  ASSERT_TRUE(more.remedy);
  EXPECT_EQ(more.remedy->key, AdviceKey::kMicroBatches);
  EXPECT_EQ(more.remedy->value, "8");
  EXPECT_DOUBLE_EQ(more.remedy->step_s, *optimal_step_s({even}, four, 4, 8) / 2);

  std::vector<double> times(16, 3);
  times[5] = 40;
  const Advice layer =
      advice_on({.models = {timed_model(times)}, .cluster = four, .micro_batches = 100});
  EXPECT_EQ(layer.limit, StepLimit::kLayer);
  EXPECT_EQ(layer.layer, "layer 5");
  ASSERT_TRUE(layer.remedy);  // 15, 40 and 30 ms
  EXPECT_EQ(layer.remedy->key, AdviceKey::kRanks);
  EXPECT_EQ(layer.remedy->value, "3");
  EXPECT_DOUBLE_EQ(layer.remedy->step_s, *optimal_step_s({timed_model(times)}, four, 3, 100));

  // Six layers on four ranks: 2, 2, 1, 1.
  const Advice cut = advice_on(
      {.models = {timed_model(std::vector<double>(6, 3))}, .cluster = four, .micro_batches = 100});
  EXPECT_EQ(cut.limit, StepLimit::kCut);
  ASSERT_TRUE(cut.remedy);
  EXPECT_EQ(cut.remedy->key, AdviceKey::kRanks);
  EXPECT_EQ(cut.remedy->value, "3");
}

// A question with an even cut of four ranks under 1F1B.
Question question_on(const cost::ModelCost& model, const cost::Cluster& cluster,
                     int micro_batches) {
  Question question;
  question.model = model;
  set_cluster(question, cluster, {});
  question.micro_batches = micro_batches;
  question.balancer = Balancer::kOptimal;
  question.schedule = schedule::ScheduleKind::k1F1B;
  return question;
}

Advice advice_of(const Question& question) {
  const auto given = answer(question);
  EXPECT_TRUE(given) << given.error().message;
  EXPECT_TRUE(given->advice);
  return *given->advice;
}

double step_s_of(const Question& question) { return answer(question)->evaluation.step_time_s; }

TEST(Advice, MessagesNameTheLinkThatShortensTheStep) {
  cost::ModelCost even = timed_model(std::vector<double>(16, 3));
  for (cost::LayerCost& layer : even.layers) layer.boundary_bytes = Bytes{1'000'000};
  const auto check = [&](const cost::Cluster& cluster, AdviceKey key, const std::string& value,
                         const cost::Cluster& changed) {
    const Advice advice = advice_of(question_on(even, cluster, 8));
    EXPECT_EQ(advice.limit, StepLimit::kMessages);
    ASSERT_TRUE(advice.remedy) << name(key);
    EXPECT_EQ(advice.remedy->key, key);
    EXPECT_EQ(advice.remedy->value, value);
    EXPECT_LT(advice.remedy->step_s, 0.98 * advice.all.step_s);
    EXPECT_DOUBLE_EQ(advice.remedy->step_s, step_s_of(question_on(even, changed, 8)));
  };
  cost::Cluster far = cost::equal_ranks(4);
  far.inside_node = {.latency_s = 20e-3, .bandwidth_bytes_per_s = 1e12};
  cost::Cluster near = far;
  near.inside_node.latency_s = 10e-3;
  check(far, AdviceKey::kInsideLatency, "0.01", near);
  cost::Cluster narrow = cost::equal_nodes(4, 1);
  narrow.between_nodes = {.latency_s = 1e-6, .bandwidth_bytes_per_s = 50e6};
  cost::Cluster wide = narrow;
  wide.between_nodes.bandwidth_bytes_per_s = 100e6;
  check(narrow, AdviceKey::kBetweenBandwidth, "1e+08", wide);
}

TEST(Advice, LargerMicroBatchesAreNamedWhereMessagesAreMany) {
  const cost::TransformerShape shape = cost::transformer_shape(
      {.vocabulary = 512, .hidden = 512, .blocks = 8, .sequence = 128}, cost::Architecture::kLlama);
  const auto device = cost::find_device("h100");
  ASSERT_TRUE(device);
  const auto asked = [&](std::int64_t size, int micro_batches) {
    cost::TransformerShape sized = shape;
    sized.micro_batch_size = size;
    cost::Cluster cluster = cost::equal_ranks(4);
    cluster.inside_node.latency_s = 5e-3;
    Question question = question_on({}, cluster, micro_batches);
    EXPECT_TRUE(set_shape(question, sized, *device));
    return question;
  };
  const Advice advice = advice_of(asked(1, 64));
  EXPECT_EQ(advice.limit, StepLimit::kMessages);
  ASSERT_TRUE(advice.remedy);
  EXPECT_EQ(advice.remedy->key, AdviceKey::kMicroBatchSize);
  EXPECT_EQ(advice.remedy->value, "2");
  ASSERT_TRUE(advice.remedy->with);
  EXPECT_EQ(advice.remedy->with->key, AdviceKey::kMicroBatches);
  EXPECT_EQ(advice.remedy->with->value, "32");
  EXPECT_DOUBLE_EQ(advice.remedy->step_s, step_s_of(asked(2, 32)));
}

TEST(Advice, SlicesThatAHeadCannotHaveAreAnError) {
  const cost::TransformerShape shape = cost::transformer_shape(
      {.vocabulary = 257, .hidden = 64, .blocks = 2, .sequence = 32}, cost::Architecture::kLlama);
  Question question = question_on({}, cost::equal_ranks(2), 4);
  ASSERT_TRUE(set_shape(question, shape, *cost::find_device("cpu")));
  EXPECT_TRUE(question.sliced(2));
  const auto refused = question.sliced(4);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
}

TEST(Advice, ASlowRankIsNamedWithTheSpeedOfTheOthers) {
  const cost::ModelCost four = timed_model({3, 3, 3, 3});
  cost::Cluster cluster = cost::equal_ranks(4);
  cluster.ranks[2].speed = 0.7;
  const Advice advice = advice_of(question_on(four, cluster, 64));
  EXPECT_EQ(advice.limit, StepLimit::kSlowRank);
  ASSERT_TRUE(advice.remedy);
  EXPECT_EQ(advice.remedy->key, AdviceKey::kSpeed);
  EXPECT_DOUBLE_EQ(advice.remedy->step_s, step_s_of(question_on(four, cost::equal_ranks(4), 64)));
}

TEST(Advice, ABalancerWhoseCutIsWorseIsNamed) {
  const cost::ModelCost uneven = timed_model({1, 1, 1, 1, 1, 1, 4, 4});
  Question question = question_on(uneven, cost::equal_ranks(4), 64);
  question.balancer = Balancer::kUniform;
  const Advice advice = advice_of(question);
  EXPECT_EQ(advice.limit, StepLimit::kBalancer);
  ASSERT_TRUE(advice.remedy);
  EXPECT_EQ(advice.remedy->key, AdviceKey::kBalancer);
  question.balancer = Balancer::kOptimal;
  EXPECT_DOUBLE_EQ(advice.remedy->step_s, step_s_of(question));
  EXPECT_NE(advice_of(question).limit, StepLimit::kBalancer);
}

// Slack makes the step longer because the user asks for it.
TEST(Advice, OfAPackedPlanDoesNotBlameTheBalancer) {
  Question question;
  question.model = timed_model(std::vector<double>(16, 3));
  set_ranks(question, 4, std::nullopt, std::nullopt, std::nullopt);
  question.balancer = Balancer::kOptimal;
  question.schedule = schedule::ScheduleKind::k1F1B;
  question.pack = true;
  question.slack = 10;
  const auto given = answer(question);
  ASSERT_TRUE(given) << given.error().message;
  EXPECT_EQ(ranks_at_work(given->proposal.plan).size(), 1);
  ASSERT_TRUE(given->advice);
  EXPECT_NE(given->advice->limit, StepLimit::kBalancer);
}

TEST(Advice, DoesNotCutTheHeadOfCountedLayers) {
  std::vector<cost::LayerWork> work(6);
  for (std::size_t i = 0; i < work.size(); ++i) {
    work[i].name = i == 0 ? "embedding" : i == 5 ? "head" : "blocks." + std::to_string(i);
    work[i].matrix_flops = i == 5 ? 4e12 : 1e12;
    work[i].parameters = 1e6;
  }
  Question question;
  const cost::Device device = cost::find_device("h100").value();
  ASSERT_TRUE(set_work(question, work, 4096, device, {}));
  set_ranks(question, 4, std::nullopt, device, std::nullopt);
  question.balancer = Balancer::kOptimal;
  question.schedule = schedule::ScheduleKind::k1F1B;
  const auto given = answer(question);
  ASSERT_TRUE(given) << given.error().message;
  ASSERT_TRUE(given->advice);
  EXPECT_EQ(given->advice->limit, StepLimit::kHead);
  EXPECT_NE(given->advice->remedy ? given->advice->remedy->key : AdviceKey::kRanks,
            AdviceKey::kHeadSlices);
}

// The second forward counts in the heaviest layer's work and in every replay.
TEST(Advice, IsAboutPlansThatRecompute) {
  const cost::ModelCost model = timed_model({3, 3, 3, 30, 3, 3});
  const cost::Cluster cluster = cost::equal_ranks(3);
  const Advice plain = advice_on({.models = {model}, .cluster = cluster, .micro_batches = 64});
  const Advice again = advice_on(
      {.models = {model}, .cluster = cluster, .micro_batches = 64, .recompute = Recompute::kWhole});
  const cost::ModelCost run = recomputed(model, all_layers(model));
  EXPECT_DOUBLE_EQ(again.all.step_s, *optimal_step_s({run}, cluster, 3, 64));
  EXPECT_GT(again.all.step_s, 1.3 * plain.all.step_s);
  EXPECT_EQ(again.limit, StepLimit::kLayer);
  EXPECT_EQ(again.layer, "layer 3");
}

TEST(Advice, AChangeThatGainsNothingIsNotNamed) {
  const cost::ModelCost even = timed_model(std::vector<double>(16, 3));
  cost::Cluster far = cost::equal_ranks(4);
  far.inside_node.latency_s = 20e-3;
  const auto same = [&](StepLimit) {
    return std::vector<AdviceChange>{{.set = {AdviceKey::kInsideLatency, "0.02"},
                                      .models = {even},
                                      .cluster = far,
                                      .micro_batches = 8}};
  };
  const Advice advice =
      advice_on({.models = {even}, .cluster = far, .micro_batches = 8, .changes = same});
  EXPECT_EQ(advice.limit, StepLimit::kMessages);
  EXPECT_NE(advice.remedy ? advice.remedy->key : AdviceKey::kMemory, AdviceKey::kInsideLatency);
}

// The memory that is named is enough for the step that is named, and a byte less is not.
TEST(Advice, MemoryThatForbidsTheEvenCutIsNamedWithWhatWouldDo) {
  cost::ModelCost model = timed_model(std::vector<double>(16, 3));
  constexpr std::int64_t kMiB = 1 << 20;
  for (std::size_t i = 0; i < 8; ++i) model.layers[i].parameter_bytes = Bytes{100 * kMiB};
  cost::Cluster cluster = cost::equal_ranks(4, Bytes{250 * kMiB});
  const Advice advice =
      advice_on({.models = {model}, .cluster = cluster, .micro_batches = 100, .head_room = 0.5});
  EXPECT_EQ(advice.limit, StepLimit::kMemory);
  ASSERT_TRUE(advice.remedy);
  EXPECT_EQ(advice.remedy->key, AdviceKey::kMemory);
  EXPECT_EQ(advice.remedy->value, "800MiB");
  cluster = cost::equal_ranks(4, Bytes{400 * kMiB});
  EXPECT_DOUBLE_EQ(*optimal_step_s({model}, cluster, 4, 100), advice.remedy->step_s);
  cluster = cost::equal_ranks(4, Bytes{399 * kMiB});
  EXPECT_GT(*optimal_step_s({model}, cluster, 4, 100), advice.remedy->step_s);
}

TEST(Advice, IsBisectedForManyRanks) {
  std::vector<double> times(400, 3);
  times.back() = 30;
  const cost::ModelCost model = timed_model(times);
  const cost::Cluster cluster = cost::equal_ranks(128);
  constexpr int kMicroBatches = 256;
  const Advice advice =
      advice_on({.models = {model}, .cluster = cluster, .micro_batches = kMicroBatches});
  ASSERT_TRUE(advice.fewest);
  const int few = advice.fewest->ranks;
  EXPECT_LT(few, 128);
  EXPECT_DOUBLE_EQ(*optimal_step_s({model}, cluster, few, kMicroBatches), advice.fewest->step_s);
  EXPECT_GT(*optimal_step_s({model}, cluster, few - 1, kMicroBatches),
            (1 + kAdviceMargin) * advice.best_s);
}

TEST(Advice, IsNotGivenWhereItWouldTakeLong) {
  const cost::ModelCost model = timed_model(std::vector<double>(2048, 1));
  const cost::Cluster cluster = cost::equal_ranks(1024);
  EXPECT_FALSE(advise({.models = {model}, .cluster = cluster, .micro_batches = 4096}));
}

TEST(Advice, AHeadIsDividedEvenly) {
  const cost::ModelCost model = model_with_head(2, 24);
  const auto sliced = with_head_slices(model, 4);
  ASSERT_TRUE(sliced);
  EXPECT_EQ(sliced->size(), 6);
  EXPECT_EQ(sliced->layers.back().name, "head.3 of 4");
  EXPECT_DOUBLE_EQ(cost::work_s(*sliced, 5, 1) * 4, cost::work_s(model, 2, 1));
  EXPECT_EQ(with_head_slices(*sliced, 2).error().code, ErrorCode::kBadInput);
}

}  // namespace
}  // namespace dynmo::plan
