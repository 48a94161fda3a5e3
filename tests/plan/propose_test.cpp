// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/propose.h"

#include <gtest/gtest.h>

#include <array>

#include "tests/plan/cuts.h"
#include "tests/support/samples.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

TEST(Propose, GivesTheBalancersCutWithItsReplay) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(mix_key({0x9809, seed}));
    const cost::ModelCost model = random_model(rng, pick(rng, 6, 20));
    const cost::Cluster cluster = cost::equal_ranks(pick(rng, 1, 6));
    const BalanceProblem problem{{model, cluster, pick(rng, 1, 8)}};
    for (const Balancer balancer :
         {Balancer::kUniform, Balancer::kTime, Balancer::kDiffusionTime}) {
      const auto proposal = propose(balancer, problem);
      ASSERT_TRUE(proposal) << proposal.error().message << ", seed " << seed;
      EXPECT_EQ(proposal->plan, make_plan(*balance(balancer, problem), ScheduleKind::k1F1B));
      EXPECT_EQ(proposal->evaluation.step_time_s,
                evaluate(proposal->plan, {model, cluster, problem.micro_batches})->step_time_s);
      EXPECT_EQ(proposal->rounds > 0, balancer == Balancer::kDiffusionTime);
    }
  }
}

// One stage a rank: neither baseline is faster.
TEST(Propose, OptimalIsNoSlowerThanTheCutWithTheLeastBottleneckOrThePlanInForce) {
  int faster = 0;
  for (std::uint64_t seed = 0; seed < samples(100U); ++seed) {
    Rng rng(mix_key({0x0971, seed}));
    const cost::ModelCost model = random_model(rng, pick(rng, 6, 20));
    const cost::Cluster cluster = cost::equal_ranks(pick(rng, 2, 6));
    BalanceProblem problem{{model, cluster, pick(rng, 1, 8)}};
    const auto step_s = [&](const Plan& plan) {
      return evaluate(plan, {model, cluster, problem.micro_batches})->step_time_s;
    };
    const Plan cut = make_plan(*balance(Balancer::kOptimal, problem), ScheduleKind::k1F1B);
    const Plan current = make_plan(*balance(Balancer::kUniform, problem), ScheduleKind::k1F1B, 4);
    problem.current = &current;
    const auto proposal = propose(Balancer::kOptimal, problem);
    ASSERT_TRUE(proposal) << proposal.error().message << ", seed " << seed;
    const double time = proposal->evaluation.step_time_s;
    EXPECT_EQ(time, step_s(proposal->plan)) << "seed " << seed;
    EXPECT_LE(time, step_s(cut)) << "seed " << seed;
    EXPECT_LE(time, step_s(current)) << "seed " << seed;
    faster += time < step_s(cut) ? 1 : 0;
    // With several stages a rank it is the balancer's cut.
    problem.schedule = ScheduleKind::kInterleaved;
    problem.current = nullptr;
    problem.micro_batches = 2 * cluster.size();
    problem.stages_per_rank = 1;
    const auto looped = propose(Balancer::kOptimal, problem);
    ASSERT_TRUE(looped) << looped.error().message << ", seed " << seed;
    EXPECT_EQ(looped->plan.stages,
              make_plan(*balance(Balancer::kOptimal, problem), ScheduleKind::kInterleaved).stages);
  }
  EXPECT_GT(faster, 0);
}

TEST(Propose, TheBestScheduleIsNoWorseThanAnyOfThem) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Rng rng(mix_key({0xBE57, seed}));
    const cost::ModelCost model = random_model(rng, pick(rng, 8, 20));
    const cost::Cluster cluster = cost::equal_ranks(pick(rng, 1, 4));
    BalanceProblem problem{{model, cluster, 8}};
    const auto best = propose(Balancer::kTime, problem, {.schedules = ScheduleChoice::kBest});
    ASSERT_TRUE(best) << best.error().message;
    for (const ScheduleKind kind : {ScheduleKind::kGpipe, ScheduleKind::k1F1B}) {
      problem.schedule = kind;
      ASSERT_LE(best->evaluation.step_time_s,
                propose(Balancer::kTime, problem)->evaluation.step_time_s)
          << "seed " << seed;
    }
    EXPECT_GE(best->candidates, 2);
  }
}

constexpr std::array kAllKinds = {ScheduleKind::kGpipe,       ScheduleKind::k1F1B,
                                  ScheduleKind::kInterleaved, ScheduleKind::kZbH1,
                                  ScheduleKind::kZbV,         ScheduleKind::kAdaptive};

// Every balancer with every schedule, on problems with memory, speeds, links and frozen layers.
TEST(Propose, EveryPlanReturnedFitsAndIsWrittenAndReadBack) {
  int returned = 0;
  int refused = 0;
  for (std::uint64_t seed = 0; seed < samples(150U); ++seed) {
    Rng rng(mix_key({0xE7E4, seed}));
    const int ranks = pick(rng, 1, 4);
    const cost::ModelCost model = whole_number_model(rng, pick(rng, 2 * ranks, 14));
    cost::Cluster cluster = cost::equal_ranks(ranks, Bytes{pick(rng, 60, 400)});
    cluster.inside_node = {.latency_s = 0.1, .bandwidth_bytes_per_s = 10};
    for (cost::ClusterRank& rank : cluster.ranks) rank.speed = pick(rng, 1, 2);
    for (const ScheduleKind kind : kAllKinds) {
      const BalanceProblem problem{{model, cluster, 2 * ranks}, kind};
      for (const Balancer balancer : {Balancer::kUniform, Balancer::kParameters, Balancer::kTime,
                                      Balancer::kDiffusionParameters, Balancer::kDiffusionTime,
                                      Balancer::kOptimal, Balancer::kVPair}) {
        const auto proposal = propose(balancer, problem);
        if (!proposal) {
          const bool no_v = balancer == Balancer::kVPair && kind != ScheduleKind::kZbV &&
                            kind != ScheduleKind::kAdaptive;
          ASSERT_EQ(proposal.error().code, no_v ? ErrorCode::kBadInput : ErrorCode::kInfeasible)
              << proposal.error().message << ", seed " << seed;
          refused += no_v ? 0 : 1;
          continue;
        }
        ++returned;
        ASSERT_TRUE(fits_memory(proposal->evaluation.result, cluster)) << "seed " << seed;
        const Json json = plan_json(proposal->plan, proposal->evaluation, model, name(balancer));
        EXPECT_EQ(json["micro_batches"], 2 * ranks);
        const auto read = parse_plan(json, "plan.json");
        ASSERT_TRUE(read) << read.error().message;
        ASSERT_EQ(*read, proposal->plan) << "seed " << seed;
      }
    }
  }
  EXPECT_GT(returned, samples(1000));
  EXPECT_GT(refused, samples(200));
}

// The balancers assume the same number of stashes a stage as the schedules hold where no stage is
// frozen.
TEST(Propose, TheBalancersInFlightCountsAreTheSchedules) {
  for (int ranks = 1; ranks <= 6; ++ranks) {
    for (const int micro_batches : {ranks, 2 * ranks, 4 * ranks}) {
      for (const ScheduleKind kind : kAllKinds) {
        if (kind == ScheduleKind::kAdaptive) continue;
        const cost::ModelCost model = equal_model(4 * ranks, 1e-3);
        const cost::Cluster cluster = cost::equal_ranks(ranks);
        const BalanceProblem problem{{model, cluster, micro_batches}, kind};
        const auto holds = placement(Balancer::kUniform, problem);
        const auto counts = in_flight(kind, holds, ranks, micro_batches);
        ASSERT_TRUE(counts) << counts.error().message;
        const auto proposal = propose(Balancer::kUniform, problem);
        ASSERT_TRUE(proposal) << proposal.error().message;
        // Exact by rank but for interleaved 1F1B, whose stages do not all peak at once, and a V of
        // few micro-batches. The sums are those of ranks, as the stages of a V peak at different
        // times, and its middle is one stage.
        std::vector<std::int64_t> assumed(static_cast<std::size_t>(ranks), 0);
        for (std::size_t s = 0; s < holds.size(); ++s) {
          const int layers = 4 * ranks / static_cast<int>(holds.size());
          assumed[holds[s].index()] += std::int64_t{100} * layers * (*counts)[s];
        }
        for (std::size_t r = 0; r < assumed.size(); ++r) {
          const auto peak = proposal->evaluation.result.ranks[r].peak_activation.value;
          const bool only_a_bound = kind == ScheduleKind::kInterleaved ||
                                    (kind == ScheduleKind::kZbV && micro_batches < 2 * ranks);
          if (only_a_bound) {
            EXPECT_LE(peak, assumed[r]) << ranks << " ranks, " << micro_batches;
            EXPECT_GE(peak, assumed[r] / 2) << ranks << " ranks, " << micro_batches;
          } else {
            EXPECT_EQ(peak, assumed[r])
                << schedule::name(kind) << ", " << ranks << " ranks, " << micro_batches;
          }
        }
      }
    }
  }
}

TEST(Propose, SearchIsNoWorseThanAnyBalancerWithTheSameSchedule) {
  Rng rng(31);
  const cost::ModelCost model = random_model(rng, 20);
  const cost::Cluster cluster = cost::equal_ranks(4);
  const BalanceProblem problem{{model, cluster, 8}};
  for (const ScheduleChoice choice : {ScheduleChoice::kAsGiven, ScheduleChoice::kBest}) {
    const auto found =
        propose(Balancer::kSearch, problem, {.schedules = choice, .evaluations = 100});
    ASSERT_TRUE(found) << found.error().message;
    EXPECT_FALSE(found->winner.empty());
    EXPECT_GT(found->candidates, 1);
    if (choice == ScheduleChoice::kAsGiven) {
      EXPECT_EQ(found->plan.schedule, problem.schedule);
    }
    for (const Balancer balancer : {Balancer::kUniform, Balancer::kTime, Balancer::kOptimal}) {
      EXPECT_LE(found->evaluation.step_time_s, propose(balancer, problem)->evaluation.step_time_s)
          << name(balancer);
    }
  }
}

TEST(Propose, AnOrderThatDoesNotBelongIsNamed) {
  const cost::ModelCost model = equal_model(4, 1e-3);
  const cost::Cluster cluster = cost::equal_ranks(2);
  const auto proposal = propose(Balancer::kTime, {{model, cluster, 2}, ScheduleKind::kAdaptive});
  ASSERT_TRUE(proposal) << proposal.error().message;
  const Json good = plan_json(proposal->plan, proposal->evaluation, model, "time");
  const auto message = [&](auto change) {
    Json json = good;
    change(json);
    const auto read = parse_plan(json, "p.json");
    return read ? std::string("read") : read.error().message;
  };
  EXPECT_EQ(message([](Json&) {}), "read");
  EXPECT_NE(message([](Json& json) { json.erase("order"); }).find("/order is missing"),
            std::string::npos);
  EXPECT_NE(message([](Json& json) { json["order"].erase(1); }).find("each of 2 ranks"),
            std::string::npos);
  EXPECT_NE(message([](Json& json) { json["order"][1][0] = "0F0"; }).find("p.json: /order/1/0 is"),
            std::string::npos);
  EXPECT_NE(message([](Json& json) { json["order"][0][2] = 7; }).find("/order/0/2 wanted"),
            std::string::npos);
  EXPECT_NE(message([](Json& json) { json["schedule"] = "1f1b"; }).find("makes its own"),
            std::string::npos);
}

TEST(Propose, APlanOverTheMemoryIsRefusedByNameAndBytes) {
  const cost::ModelCost model = equal_model(8, 1e-3);  // 4,000 bytes of state a layer
  cost::Cluster cluster = cost::equal_ranks(4, Bytes{9000});
  cluster.ranks[2].memory = Bytes{8100};
  const auto refused = propose(Balancer::kUniform, {{model, cluster, 8}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInfeasible);
  EXPECT_NE(refused.error().message.find("8400 bytes (8.2 KiB) on rank 2, which has 8100 bytes"),
            std::string::npos)
      << refused.error().message;
  cluster.ranks[2].memory = Bytes{8400};
  EXPECT_TRUE(propose(Balancer::kUniform, {{model, cluster, 8}}));
}

TEST(Propose, NumbersThePlanAfterTheCurrentOne) {
  const cost::ModelCost model = equal_model(8, 1e-3);
  const cost::Cluster cluster = cost::equal_ranks(4);
  BalanceProblem problem{{model, cluster, 8}};
  EXPECT_EQ(propose(Balancer::kUniform, problem)->plan.generation, 0);
  const Plan same = make_plan({2, 2, 2, 2}, ScheduleKind::k1F1B, 7);
  problem.current = &same;
  EXPECT_EQ(propose(Balancer::kUniform, problem)->plan, same);
  const Plan other = make_plan({1, 3, 2, 2}, ScheduleKind::k1F1B, 7);
  problem.current = &other;
  EXPECT_EQ(propose(Balancer::kUniform, problem)->plan.generation, 8);
}

}  // namespace
}  // namespace dynmo::plan
