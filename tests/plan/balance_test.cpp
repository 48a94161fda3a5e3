// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>

#include "dynmo/plan/chain_impl.h"
#include "tests/plan/baselines.h"
#include "tests/plan/cuts.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

double rank_time(const BalanceProblem& problem, int rank, int first, int end) {
  double sum = 0;
  for (int i = first; i < end; ++i) sum += cost::work_s(problem.model, i, problem.micro_batches);
  return sum / problem.cluster.ranks[static_cast<std::size_t>(rank)].speed;
}

std::int64_t rank_bytes(const BalanceProblem& problem, int rank, int first, int end) {
  const int stashes = problem.schedule == ScheduleKind::kGpipe
                          ? problem.micro_batches
                          : std::min(problem.micro_batches, problem.cluster.size() - rank);
  std::int64_t sum = 0;
  for (int i = first; i < end; ++i) {
    const cost::LayerCost& layer = problem.model.layers[static_cast<std::size_t>(i)];
    sum += cost::state_bytes(layer).value;
    if (i >= problem.model.frozen_layers()) sum += stashes * layer.activation_bytes.value;
  }
  return sum;
}

struct CutScore {
  double bottleneck = 0;
  double squares = 0;
  bool fits = true;
};

CutScore score(const BalanceProblem& problem, const std::vector<int>& counts) {
  CutScore score;
  int first = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    const int end = first + counts[r];
    const double time = rank_time(problem, static_cast<int>(r), first, end);
    score.bottleneck = std::max(score.bottleneck, time);
    score.squares += time * time;
    score.fits &= rank_bytes(problem, static_cast<int>(r), first, end) <=
                  problem.cluster.ranks[r].memory.value;
    first = end;
  }
  return score;
}

std::optional<std::vector<int>> brute_force(const BalanceProblem& problem) {
  std::optional<std::vector<int>> best;
  CutScore least;
  for_each_cut(problem.model.size(), problem.cluster.size(), [&](const std::vector<int>& counts) {
    const CutScore now = score(problem, counts);
    if (!now.fits) return;
    if (!best || now.bottleneck < least.bottleneck ||
        (now.bottleneck == least.bottleneck && now.squares < least.squares)) {
      best = counts;
      least = now;
    }
  });
  return best;
}

cost::Cluster random_cluster(Rng& rng, int ranks, bool exact_speeds) {
  constexpr std::array kSpeeds = {1.0, 1.0, 0.5, 2.0, 0.25};
  const int room = pick(rng, 20, 200);
  const bool limited = pick(rng, 0, 3) > 0;
  const bool equal = pick(rng, 0, 1) == 0;
  cost::Cluster cluster = cost::equal_ranks(ranks);
  for (cost::ClusterRank& rank : cluster.ranks) {
    if (!equal) {
      rank.speed = exact_speeds ? kSpeeds[rng.below(kSpeeds.size())] : 0.2 + rng.uniform();
    }
    if (limited) rank.memory = Bytes{pick(rng, room / 2, 2 * room)};
  }
  return cluster;
}

struct RandomProblem {
  cost::ModelCost model;
  cost::Cluster cluster;
  int micro_batches = 1;
  ScheduleKind schedule = ScheduleKind::k1F1B;
  [[nodiscard]] BalanceProblem problem() const {
    return {{model, cluster, micro_batches}, schedule};
  }
};

RandomProblem random_problem(std::uint64_t seed, bool exact) {
  Rng rng(mix_key({0xBA1A4CE, seed}));
  const int layers = pick(rng, 1, 12);
  RandomProblem random;
  random.model = exact ? whole_number_model(rng, layers) : random_model(rng, layers);
  random.cluster = random_cluster(rng, pick(rng, 1, std::min(layers, 5)), exact);
  random.micro_batches = pick(rng, 1, 6);
  random.schedule = pick(rng, 0, 1) == 0 ? ScheduleKind::kGpipe : ScheduleKind::k1F1B;
  return random;
}

TEST(Balance, OptimalEqualsBruteForceWithItsTieRuleAndVerdicts) {
  int infeasible = 0;
  for (std::uint64_t seed = 0; seed < 10000; ++seed) {
    const RandomProblem random = random_problem(seed, /*exact=*/true);
    const auto expected = brute_force(random.problem());
    const auto found = balance(Balancer::kOptimal, random.problem());
    ASSERT_EQ(found.has_value(), expected.has_value()) << "seed " << seed;
    if (found) {
      ASSERT_EQ(*found, *expected) << "seed " << seed;
    } else {
      ++infeasible;
      ASSERT_EQ(found.error().code, ErrorCode::kInfeasible) << "seed " << seed;
    }
  }
  EXPECT_GT(infeasible, 1000);  // the verdict was really put to the test
  EXPECT_LT(infeasible, 8000);
}

// Chains of up to 120 layers with a few huge ones, unequal ranks and memory.
internal::Chain wide_chain(Rng& rng) {
  const int layers = pick(rng, 1, 120);
  const int ranks = pick(rng, 1, std::min(layers, 24));
  std::vector<double> weights(static_cast<std::size_t>(layers));
  const bool whole = pick(rng, 0, 1) == 0;  // many ties
  for (double& weight : weights) weight = whole ? pick(rng, 0, 3) : 0.5 + rng.uniform();
  for (int huge = pick(rng, 0, 3); huge > 0; --huge) {
    weights[rng.below(weights.size())] = pick(rng, 0, 1) == 0 ? pick(rng, 4, 40) : 3000;
  }
  std::vector<double> speeds(static_cast<std::size_t>(ranks), 1.0);
  if (pick(rng, 0, 1) == 0) {
    for (double& speed : speeds) speed = pick(rng, 0, 9) == 0 ? 0.01 : pick(rng, 1, 4) * 0.5;
  }
  internal::Chain chain;
  chain.work = internal::quantized_prefix_sums(weights);
  chain.state.assign(1, 0);
  chain.activation.assign(1, 0);
  for (int i = 0; i < layers; ++i) {
    chain.state.push_back(chain.state.back() + pick(rng, 0, 9));
    chain.activation.push_back(chain.activation.back() + pick(rng, 0, 3));
  }
  chain.ranks.resize(speeds.size());
  internal::set_speeds(chain, speeds);
  const bool limited = pick(rng, 0, 1) == 0;
  const int share = 1 + 10 * layers / ranks;
  for (internal::ChainRank& rank : chain.ranks) {
    rank.in_flight = pick(rng, 1, 4);
    rank.memory_bytes = limited ? pick(rng, share / 2, 4 * share) : 1 << 30;
  }
  return chain;
}

// Tries every end of every start under `bottleneck`. The least sum of squared times wins, then the
// leftmost cut.
std::optional<std::vector<int>> tried_cut(const internal::Chain& chain, internal::Wide bottleneck) {
  constexpr internal::Wide kNone = ~internal::Wide{0};
  const auto layers = static_cast<std::size_t>(chain.layers());
  const auto limits = internal::work_limits(chain, bottleneck);
  std::vector<std::vector<int>> counts(layers + 1);  // of the best cut from a start on
  std::vector<internal::Wide> squares(layers, kNone);
  squares.push_back(0);
  for (int s = chain.size(); s-- > 0;) {
    std::vector<std::vector<int>> of_more(layers + 1);
    std::vector<internal::Wide> least(layers + 1, kNone);
    for (int first = 0; first < chain.layers(); ++first) {
      const auto from = static_cast<std::size_t>(first);
      for (auto to = from + 1; to <= layers; ++to) {
        const int end = static_cast<int>(to);
        if (squares[to] == kNone) continue;
        if (!chain.fits(s, first, end, limits[static_cast<std::size_t>(s)])) break;
        const auto time =
            static_cast<internal::Wide>(chain.work_of(s, first, end)) *
            static_cast<internal::Wide>(chain.ranks[static_cast<std::size_t>(s)].tie_slowness);
        if (time * time + squares[to] >= least[from]) continue;
        least[from] = time * time + squares[to];
        of_more[from] = counts[to];
        of_more[from].insert(of_more[from].begin(), end - first);
      }
    }
    counts = std::move(of_more);
    squares = std::move(least);
  }
  if (squares[0] == kNone) return std::nullopt;
  return counts[0];
}

TEST(Balance, OptimalIsTheCutOfAllTriedOnLongChains) {
  int compared = 0;
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    Rng rng(mix_key({0x71DE, seed}));
    const internal::Chain chain = wide_chain(rng);
    const auto found = internal::best_cut(chain);
    if (!found) {
      ASSERT_FALSE(tried_cut(chain, internal::slowest_time(chain))) << "seed " << seed;
      continue;
    }
    internal::Wide bottleneck = 0;
    int first = 0;
    for (int s = 0; s < chain.size(); ++s) {
      const auto rank = static_cast<std::size_t>(s);
      const int end = first + (*found)[rank];
      bottleneck =
          std::max(bottleneck, static_cast<internal::Wide>(chain.work_of(s, first, end)) *
                                   static_cast<internal::Wide>(chain.ranks[rank].slowness));
      first = end;
    }
    ASSERT_EQ(*found, tried_cut(chain, bottleneck)) << "seed " << seed;
    if (bottleneck > 0) {
      ASSERT_FALSE(tried_cut(chain, bottleneck - 1)) << "seed " << seed;
    }
    ++compared;
  }
  EXPECT_GT(compared, 250);
}

TEST(Balance, OptimalEqualsBruteForceOnMeasuredCostsAndSpeeds) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const RandomProblem random = random_problem(seed, /*exact=*/false);
    const auto expected = brute_force(random.problem());
    const auto found = balance(Balancer::kOptimal, random.problem());
    ASSERT_EQ(found.has_value(), expected.has_value()) << "seed " << seed;
    if (!found) continue;
    const CutScore best = score(random.problem(), *expected);
    const CutScore ours = score(random.problem(), *found);
    ASSERT_TRUE(ours.fits) << "seed " << seed;
    ASSERT_LE(ours.bottleneck, best.bottleneck * (1 + 1e-7)) << "seed " << seed;
  }
}

TEST(Balance, TheUnitOfTimeChangesNoCut) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    RandomProblem random = random_problem(seed, /*exact=*/seed % 2 == 0);
    for (const Balancer balancer : {Balancer::kOptimal, Balancer::kTime}) {
      const auto seconds = balance(balancer, random.problem());
      RandomProblem micro = random;
      micro.model = scaled(micro.model, 1e-6);
      const auto microseconds = balance(balancer, micro.problem());
      ASSERT_EQ(seconds.has_value(), microseconds.has_value()) << "seed " << seed;
      if (seconds) {
        ASSERT_EQ(*seconds, *microseconds) << "seed " << seed;
      }
    }
  }
}

TEST(Balance, BalancingAgainChangesNothing) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    const RandomProblem random = random_problem(seed, /*exact=*/false);
    const auto once = balance(Balancer::kOptimal, random.problem());
    const auto again = balance(Balancer::kOptimal, random.problem());
    ASSERT_EQ(once.has_value(), again.has_value());
    if (once) {
      ASSERT_EQ(*once, *again) << "seed " << seed;
    }
  }
}

TEST(Balance, OptimalIsNeverAboveTheBaselinesOnEqualRanksWithoutLimit) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Rng rng(mix_key({0xBA5E, seed}));
    const cost::ModelCost model = random_model(rng, pick(rng, 8, 60));
    const cost::Cluster cluster = cost::equal_ranks(pick(rng, 1, 8));
    const BalanceProblem problem{{model, cluster, 8}};
    const double ours = score(problem, *balance(Balancer::kOptimal, problem)).bottleneck;
    for (const Balancer baseline : {Balancer::kTime, Balancer::kUniform, Balancer::kParameters}) {
      ASSERT_LE(ours, score(problem, *balance(baseline, problem)).bottleneck * (1 + 1e-7))
          << name(baseline) << ", seed " << seed;
    }
  }
}

TEST(Balance, OptimalIsNeverAboveTheSearchesThatCameBefore) {
  int above = 0;  // theirs above ours
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Rng rng(mix_key({0xDEE9, seed}));
    const cost::ModelCost model = random_model(rng, pick(rng, 8, 48));
    const cost::Cluster cluster = cost::equal_ranks(pick(rng, 1, 8));
    const BalanceProblem problem{{model, cluster, 8}};
    const std::vector<double> work = cost::layer_work_s(model, 8);
    const double ours = baseline::bottleneck(work, *balance(Balancer::kOptimal, problem));
    const double deepspeed = baseline::bottleneck(work, baseline::deepspeed(work, cluster.size()));
    const double original =
        baseline::bottleneck(work, baseline::original_dynmo(work, cluster.size()));
    ASSERT_LE(ours, deepspeed * (1 + 1e-7)) << "seed " << seed;
    ASSERT_LE(ours, original * (1 + 1e-7)) << "seed " << seed;
    above += deepspeed > ours * (1 + 1e-7) ? 1 : 0;
  }
  EXPECT_GT(above, 0);  // else the baseline would be no search of its own
}

TEST(Balance, ParametersIsTheLeastLargestShareOfParameters) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    Rng rng(mix_key({0x9A4A, seed}));
    const cost::ModelCost model = whole_number_model(rng, pick(rng, 2, 12));
    const cost::Cluster cluster = cost::equal_ranks(pick(rng, 1, 2));
    const auto largest = [&](const std::vector<int>& counts) {
      std::int64_t most = 0;
      auto layer = model.layers.begin();
      for (const int count : counts) {
        std::int64_t sum = 0;
        for (int i = 0; i < count; ++i) sum += (layer++)->parameter_bytes.value;
        most = std::max(most, sum);
      }
      return most;
    };
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for_each_cut(model.size(), cluster.size(),
                 [&](const std::vector<int>& counts) { least = std::min(least, largest(counts)); });
    const bool any = std::any_of(model.layers.begin(), model.layers.end(), [](const auto& layer) {
      return layer.parameter_bytes > Bytes{0};
    });
    if (any) {
      ASSERT_EQ(largest(*balance(Balancer::kParameters, {{model, cluster}})), least)
          << "seed " << seed;
    }
  }
}

TEST(Balance, UniformGivesTheFirstRanksOneMore) {
  EXPECT_EQ(*balance(Balancer::kUniform, {{equal_model(10, 1), cost::equal_ranks(4)}}),
            (std::vector<int>{3, 3, 2, 2}));
}

cost::ModelCost named_model(const std::vector<std::string>& names) {
  cost::ModelCost model = equal_model(static_cast<int>(names.size()), 1);
  for (std::size_t i = 0; i < names.size(); ++i) model.layers[i].name = names[i];
  return model;
}

TEST(Balance, BlocksAreCutWholeAndEndsGoWithTheEnds) {
  const cost::ModelCost model = named_model(
      {"embedding", "blocks.0.attention", "blocks.0.mlp", "blocks.1.attention", "blocks.1.mlp",
       "blocks.10.attention", "blocks.10.mlp", "head.0 of 2", "head.1 of 2"});
  EXPECT_EQ(*balance(Balancer::kBlocks, {{model, cost::equal_ranks(1)}}), (std::vector<int>{9}));
  EXPECT_EQ(*balance(Balancer::kBlocks, {{model, cost::equal_ranks(2)}}), (std::vector<int>{5, 4}));
  EXPECT_EQ(*balance(Balancer::kBlocks, {{model, cost::equal_ranks(3)}}),
            (std::vector<int>{3, 2, 4}));
  const auto refused = balance(Balancer::kBlocks, {{model, cost::equal_ranks(4)}});
  EXPECT_EQ(refused.error().message,
            "3 blocks for 4 stages, wanted at least one a stage: use fewer ranks, or the uniform "
            "balancer where no layer is named blocks.N");
  EXPECT_FALSE(balance(Balancer::kBlocks, {{equal_model(4, 1), cost::equal_ranks(2)}}).has_value());
}

TEST(Balance, TiesGoToTheMostEvenThenTheLeftmostCut) {
  // 10 equal layers, 4 ranks: the bottleneck is 3 whatever the rest is; 3|3|3|1 is less even.
  EXPECT_EQ(*balance(Balancer::kOptimal, {{equal_model(10, 0.1), cost::equal_ranks(4)}}),
            (std::vector<int>{2, 2, 3, 3}));
}

TEST(Balance, LayersWithoutCostsCountAlike) {
  EXPECT_EQ(*balance(Balancer::kOptimal, {{equal_model(8, 0), cost::equal_ranks(4)}}),
            (std::vector<int>{2, 2, 2, 2}));
}

TEST(Balance, ASlowRankGetsLess) {
  cost::Cluster cluster = cost::equal_ranks(4);
  cluster.ranks[1].speed = 0.5;
  const cost::ModelCost model = equal_model(14, 1e-3);
  EXPECT_EQ(*balance(Balancer::kOptimal, {{model, cluster}}), (std::vector<int>{4, 2, 4, 4}));
  EXPECT_EQ(*balance(Balancer::kTime, {{model, cluster}}), (std::vector<int>{3, 3, 4, 4}));
}

// The greedy answer is wrong here: with as much as it can hold, rank 0 leaves rank 1 nothing it can
// start with.
TEST(Balance, ARankThatCannotHoldTheNextLayerIsLeftALighterOne) {
  cost::ModelCost model = equal_model(3, 1);
  for (cost::LayerCost& layer : model.layers) {
    layer = {};
    layer.forward_s = 1;
  }
  model.layers[0].parameter_bytes = Bytes{1};
  model.layers[1].parameter_bytes = Bytes{1};
  model.layers[2].parameter_bytes = Bytes{100};
  cost::Cluster cluster = cost::equal_ranks(3, Bytes{1000});
  cluster.ranks[1].memory = Bytes{10};
  EXPECT_EQ(*balance(Balancer::kOptimal, {{model, cluster}}), (std::vector<int>{1, 1, 1}));
}

struct NeededMemory {
  int rank = -1;  // every rank
  std::int64_t bytes = 0;
};

// Out of "...: rank 2 has 10 bytes (10 B), 14 bytes (14 B) there would do..." or "...: 4 bytes (4
// B) more on every rank would do...".
NeededMemory advice_of(const std::string& message) {
  const std::string after = message.substr(message.find("their memory: ") + 14);
  if (!after.starts_with("rank ")) return {.rank = -1, .bytes = std::stoll(after)};
  return {.rank = std::stoi(after.substr(5)),
          .bytes = std::stoll(after.substr(after.find("), ") + 3))};
}

TEST(Balance, TheMemoryAdviceIsEnoughAndNotAByteTooMuch) {
  int single = 0;
  int every = 0;
  for (std::uint64_t seed = 0; seed < 5000; ++seed) {
    const RandomProblem random = random_problem(seed, /*exact=*/true);
    const auto verdict = balance(Balancer::kOptimal, random.problem());
    if (verdict) continue;
    RandomProblem enough = random;
    RandomProblem less = random;
    const std::string message = verdict.error().message;
    const NeededMemory advice = advice_of(message);
    if (advice.rank >= 0) {
      const auto rank = static_cast<std::size_t>(advice.rank);
      enough.cluster.ranks[rank].memory = Bytes{advice.bytes};
      less.cluster.ranks[rank].memory = Bytes{advice.bytes - 1};
      ++single;
    } else {
      for (auto& rank : enough.cluster.ranks) rank.memory += Bytes{advice.bytes};
      for (auto& rank : less.cluster.ranks) rank.memory += Bytes{advice.bytes - 1};
      ++every;
    }
    ASSERT_TRUE(brute_force(enough.problem())) << message << ", seed " << seed;
    ASSERT_FALSE(brute_force(less.problem())) << message << ", seed " << seed;
  }
  EXPECT_GT(single, 100);
  EXPECT_GT(every, 30);
}

TEST(Balance, BadInputIsNamed) {
  const auto message = [](const cost::ModelCost& model, const cost::Cluster& cluster,
                          int micro_batches = 1) {
    const auto result = balance(Balancer::kOptimal, {{model, cluster, micro_batches}});
    EXPECT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kBadInput);
    return result.error().message;
  };
  const cost::Cluster two = cost::equal_ranks(2);
  EXPECT_NE(message({}, two).find("no layers"), std::string::npos);
  EXPECT_NE(message(equal_model(1, 1), two).find("2 ranks for 1 layers"), std::string::npos);
  EXPECT_NE(message(equal_model(2, 1), {}).find("no ranks"), std::string::npos);
  EXPECT_NE(message(equal_model(2, 1), two, 0).find("0 micro-batches"), std::string::npos);
  cost::ModelCost model = equal_model(3, 1);
  model.layers[2].backward_input_s = std::nan("");
  EXPECT_NE(message(model, two).find("layer 2 ('layer 2'): backward_input_s is nan"),
            std::string::npos);
  model.layers[2].backward_input_s = -1;
  EXPECT_NE(message(model, two).find("backward_input_s is -1"), std::string::npos);
  model = equal_model(3, 1);
  model.layers[1].activation_bytes = Bytes{-5};
  EXPECT_NE(message(model, two).find("layer 1 ('layer 1'): activation_bytes is -5"),
            std::string::npos);
  cost::Cluster slow = two;
  slow.ranks[1].speed = 0;
  EXPECT_NE(message(equal_model(3, 1), slow).find("rank 1: speed is 0"), std::string::npos);
  model = equal_model(3000, 1);
  for (auto& layer : model.layers) layer.activation_bytes = cost::kMaxBytes;
  EXPECT_NE(message(model, two, 1000).find("2^62"), std::string::npos);
}

TEST(Balance, NamesAreReadBackAndTyposAnswered) {
  for (const Balancer balancer :
       {Balancer::kUniform, Balancer::kBlocks, Balancer::kParameters, Balancer::kTime,
        Balancer::kDiffusionParameters, Balancer::kDiffusionTime, Balancer::kOptimal,
        Balancer::kVPair, Balancer::kSearch}) {
    EXPECT_EQ(*parse_balancer(name(balancer)), balancer);
  }
  EXPECT_EQ(parse_balancer("optimum").error().message,
            "balancer 'optimum' is not known, did you mean 'optimal'?");
}

// One huge layer leaves the others no limit but the tie rule: the widest search there is.
TEST(Balance, PlansLargeProblems) {
  Rng rng(3);
  cost::ModelCost measured = random_model(rng, 1024);
  cost::ModelCost lopsided = measured;
  lopsided.layers[512].forward_s = 10;
  cost::Cluster cluster = cost::equal_ranks(64);
  for (const cost::ModelCost& model : {measured, lopsided}) {
    for (const double slow : {1.0, 0.7}) {
      cluster.ranks[9].speed = slow;
      ASSERT_TRUE(balance(Balancer::kOptimal, {{model, cluster, 256}}));
    }
  }
}

}  // namespace
}  // namespace dynmo::plan
