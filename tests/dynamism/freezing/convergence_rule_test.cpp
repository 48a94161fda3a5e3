// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/convergence_rule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "dynmo/core/rng.h"
#include "tests/support/samples.h"

namespace dynmo::dynamism {
namespace {

// Checks before steps 2, 4, 6 ... of what the last step was.
FreezingOptions every_two_steps(int patience) {
  FreezingOptions options{.rule = FreezingRule::kNorm};
  options.check_every = 2;
  options.smooth_steps = 1;
  options.bootstrap = 0;
  options.tolerance = 0.5;
  options.patience = patience;
  options.max_fraction = 1;
  return options;
}

struct NormRun {
  FreezingOptions options;
  std::int64_t steps = 100;
  std::int64_t step = 0;
  double learning_rate = 1;
  ConvergenceRule rule = {};

  // Steps with these norms; the prefix before the next one.
  int run(const std::vector<double>& norms, int count = 1) {
    for (int i = 0; i < count; ++i) {
      std::vector<double> squared;
      for (const double norm : norms) squared.push_back(norm * norm);
      rule = unfrozen_below(std::move(rule), options, learning_rate);
      for (int l = 0; l < rule.frozen; ++l) squared[static_cast<std::size_t>(l)] = 0;
      rule = after_step(
          std::move(rule), options,
          {.step = step, .steps = steps, .learning_rate = learning_rate, .squared_norms = squared});
      ++step;
    }
    return rule.frozen;
  }
};

TEST(ConvergenceRule, FreezesThePrefixWhoseNormsHaveFallenInChecksInARow) {
  NormRun run{.options = every_two_steps(2)};
  EXPECT_EQ(run.run({8, 8, 8, 8}, 2), 0);
  EXPECT_EQ(run.rule.first, (std::vector<double>{8, 8, 8, 8}));
  EXPECT_EQ(run.run({3, 5, 3, 3}, 2), 0) << "one check is not two";
  EXPECT_EQ(run.run({3, 5, 3, 3}, 1), 0) << "no check is due";
  EXPECT_EQ(run.run({3, 5, 3, 3}, 1), 1) << "the third layer waits for the second";
  EXPECT_EQ(next_to_first(run.rule), 5.0 / 8);
  EXPECT_EQ(run.run({9, 3, 4, 3}, 2), 1) << "4 is not below half of 8";
  EXPECT_EQ(run.run({9, 3, 3, 3}, 2), 2) << "the third begins anew";
  EXPECT_EQ(run.run({9, 9, 3, 3}, 2), 3);
  EXPECT_EQ(run.run({0, 0, 0, 0}, 20), 3) << "never the head";
}

TEST(ConvergenceRule, FreezesNoMoreThanItsShareOfTheLayers) {
  NormRun run{.options = every_two_steps(1)};
  run.options.max_fraction = 0.5;
  run.run({8, 8, 8, 8, 8}, 2);
  EXPECT_EQ(run.run({1, 1, 1, 1, 1}, 10), 2);
}

TEST(ConvergenceRule, AveragesOverItsTimeConstant) {
  NormRun run{.options = every_two_steps(1)};
  run.options.smooth_steps = 4;
  run.run({8, 8}, 1);
  EXPECT_EQ(run.rule.average[0], 8) << "of the first step itself";
  run.run({4, 8}, 1);
  EXPECT_EQ(run.rule.average[0], 7);
}

TEST(ConvergenceRule, TheFirstCheckIsBehindTheBootstrap) {
  FreezingOptions options = every_two_steps(1);
  EXPECT_EQ(first_check(options, 100), 2) << "nothing is known before the first step";
  options.bootstrap = 0.25;
  EXPECT_EQ(first_check(options, 100), 25);
  NormRun run{.options = options};
  run.run({8, 8}, 24);
  EXPECT_TRUE(run.rule.first.empty());
  run.run({8, 8}, 1);
  EXPECT_FALSE(run.rule.first.empty());
}

TEST(ConvergenceRule, AStepThatWasNoNumberChangesNoAverage) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    NormRun run{.options = every_two_steps(1)};
    run.run({8, 8, 8}, 2);
    const ConvergenceRule before = run.rule;
    run.run({1, bad, 1}, 1);
    EXPECT_EQ(run.rule, before);
  }
}

TEST(ConvergenceRule, AllLayersTrainAgainWhenTheLearningRateHasDropped) {
  NormRun run{.options = every_two_steps(2)};
  run.run({8, 8, 8}, 2);
  ASSERT_EQ(run.run({1, 9, 9}, 4), 1);
  run.learning_rate = 0.5;
  ASSERT_EQ(run.run({1, 1, 9}, 4), 2);
  run.learning_rate = 0.11;
  EXPECT_EQ(run.run({1, 1, 9}, 1), 2);
  run.learning_rate = 0.1;  // of the 1 at which the first of them froze
  EXPECT_EQ(run.run({1, 1, 9}, 1), 0);
  // The reference values stay; the checks count from 0 again, and so does the drop.
  EXPECT_EQ(run.run({1, 1, 9}, 1), 0);
  EXPECT_EQ(run.run({1, 1, 9}, 2), 2);
  EXPECT_EQ(run.rule.learning_rate, 0.1);
  run.learning_rate = 0.02;
  EXPECT_EQ(run.run({1, 1, 9}, 20), 2);
  run.options.unfreeze_below = 0;
  run.learning_rate = 0;
  EXPECT_EQ(run.run({1, 1, 9}, 20), 2) << "never";
}

// Slopes come once a check. The first ones are those that others are compared with.
TEST(ConvergenceRule, FreezesThePrefixWhoseSlopesHaveFallenInChecksInARow) {
  FreezingOptions options{.rule = FreezingRule::kPlasticity};
  options.check_every = 10;
  options.smooth_steps = 10;
  options.tolerance = 0.5;
  options.patience = 2;
  options.max_fraction = 1;
  ConvergenceRule rule;
  const auto check = [&](const std::vector<double>& slopes) {
    rule = after_check(std::move(rule), options, /*learning_rate=*/0.3, slopes);
    return rule.frozen;
  };
  EXPECT_EQ(check({8, 8, 8, 0}), 0);
  EXPECT_EQ(rule.first, (std::vector<double>{8, 8, 8, 0}));
  EXPECT_EQ(check({3, 5, 3, 0}), 0);
  EXPECT_EQ(check({3, 3, 3, 0}), 1);
  EXPECT_EQ(rule.learning_rate, 0.3);
  EXPECT_EQ(next_to_first(rule), 3.0 / 8);
  const ConvergenceRule before = rule;
  EXPECT_EQ(check({0, std::nan(""), 3, 0}), 3) << "the averages are those of the last check";
  EXPECT_EQ(rule.average, before.average);
  // A time constant of two checks.
  options.smooth_steps = 20;
  rule = {.average = {8, 8}, .first = {8, 8}, .converged = {0, 0}};
  check({4, 8});
  EXPECT_EQ(rule.average[0], 6);
}

TEST(ConvergenceRule, ChecksAreTheStepsBehindTheBootstrap) {
  FreezingOptions options = every_two_steps(1);
  options.bootstrap = 0.05;
  std::vector<std::int64_t> checks;
  for (std::int64_t step = 0; step < 12; ++step) {
    if (is_check(options, step, 100)) checks.push_back(step);
  }
  EXPECT_EQ(checks, (std::vector<std::int64_t>{5, 7, 9, 11}));
  EXPECT_EQ(max_frozen(options, 8), 7) << "never the head";
  options.max_fraction = 0.75;
  EXPECT_EQ(max_frozen(options, 8), 6);
}

// Whatever the norms are: decisions come at checks alone, the prefix shrinks to nothing or not at
// all, asking twice changes nothing, and a run that goes on from its text decides the same.
TEST(ConvergenceRule, DecidesTheSameFromItsText) {
  int froze = 0;
  int thawed = 0;
  for (std::uint64_t seed = 0; seed < samples(300U); ++seed) {
    Rng rng(mix_key({0x4072, seed}));
    const auto pick = [&](std::uint64_t from, std::uint64_t to) {
      return static_cast<std::int64_t>(from + rng.below(to - from + 1));
    };
    FreezingOptions options{.rule = FreezingRule::kNorm};
    options.check_every = pick(1, 5);
    options.smooth_steps = pick(1, 10);
    options.bootstrap = 0.3 * rng.uniform();
    options.tolerance = 0.3 + 0.7 * rng.uniform();
    options.patience = static_cast<int>(pick(1, 3));
    options.max_fraction = rng.uniform();
    ASSERT_TRUE(check(options)) << "seed " << seed;
    const auto layers = static_cast<std::size_t>(pick(1, 12));
    constexpr std::int64_t kSteps = 80;
    ConvergenceRule rule;
    for (std::int64_t step = 0; step < kSteps; ++step) {
      const double learning_rate = step < kSteps / 2 ? 1 : 0.05;
      const int before = rule.frozen;
      rule = unfrozen_below(rule, options, learning_rate);
      ASSERT_TRUE(rule.frozen == before || (rule.frozen == 0 && step >= kSteps / 2)) << seed;
      thawed += rule.frozen < before;
      ASSERT_EQ(rule, unfrozen_below(rule, options, learning_rate)) << "seed " << seed;
      std::vector<double> norms;
      for (std::size_t i = 0; i < layers; ++i) {
        const double size = std::exp(-0.05 * static_cast<double>(step) + 0.3 * rng.normal());
        norms.push_back(std::cmp_less(i, rule.frozen) ? 0 : size * size);
      }
      const NormStep done{
          .step = step, .steps = kSteps, .learning_rate = learning_rate, .squared_norms = norms};
      const auto read = parse_convergence_rule(parse_json(to_json(rule).dump(), "test").value());
      ASSERT_TRUE(read) << "seed " << seed << ": " << read.error().message;
      ASSERT_EQ(*read, rule) << "seed " << seed;
      const ConvergenceRule next = after_step(rule, options, done);
      ASSERT_EQ(after_step(*read, options, done), next) << "seed " << seed;
      ASSERT_GE(next.frozen, rule.frozen) << "seed " << seed;
      ASSERT_LT(next.frozen, std::ssize(norms)) << "seed " << seed;
      const std::int64_t since = step + 1 - first_check(options, kSteps);
      if (since < 0 || since % options.check_every != 0) {
        ASSERT_EQ(next.frozen, rule.frozen) << "seed " << seed;
      }
      froze += next.frozen > rule.frozen;
      rule = next;
    }
  }
  EXPECT_GT(froze, samples(300));
  EXPECT_GT(thawed, samples(100));
}

TEST(ConvergenceRule, AStateThatIsNoneIsRefusedByName) {
  const auto error = [](const Json& json) { return parse_convergence_rule(json).error().message; };
  ConvergenceRule rule{
      .frozen = 1, .learning_rate = 1, .average = {0, 1, 2}, .first = {}, .converged = {0, 0, 0}};
  ASSERT_TRUE(parse_convergence_rule(to_json(rule)));
  Json json = to_json(rule);
  json["average"][1] = "one";
  EXPECT_EQ(error(json),
            "state of freezing: /average is not an array of numbers that are 0 or more");
  json = to_json(rule);
  json.erase("converged");
  EXPECT_NE(error(json).find("/converged"), std::string::npos);
  json = to_json(rule);
  json["frozen"] = 3;
  EXPECT_NE(error(json).find("3 frozen of 3"), std::string::npos);
  json = to_json(rule);
  json["first"] = {1, 2};
  EXPECT_NE(error(json).find("3, 2 and 3 layers"), std::string::npos);
  EXPECT_NE(error(Json(7)).find("state of freezing"), std::string::npos);
  EXPECT_FALSE(parse_convergence_rule(Json::object()));
}

}  // namespace
}  // namespace dynmo::dynamism
