// SPDX-License-Identifier: Apache-2.0
// Replicas, gradient accumulation and tied parameters: every run is held against one rank that
// knows no transport between ranks, no reduction and no plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/freezing/schedule.h"
#include "dynmo/model/tie.h"
#include "dynmo/runtime/ties.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

const model::Tie kTie{LayerId(0), "embed_tokens.weight", LayerId(kLayers - 1), "lm_head.weight"};

using Gradients = std::map<LayerId, std::vector<at::Tensor>>;

// One rank and the engine alone: an accumulator for each replica, added in the order of the
// replicas, then the tied ones, then clipping and the update, as the text of docs/config.md
// says it.
class OneRank {
 public:
  explicit OneRank(const RunOptions& run)
      : run_(run),
        config_(small_model()),
        model_(model::in_precision(model::make_llama(config_), run.precision)),
        options_(pipeline_options(config_, run)),
        plan_(plan::make_plan({kLayers}, schedule::ScheduleKind::kGpipe)),
        states_(in_type(initial_states(model_, plan_, Rank(0), run.seed, run.ties), run.type)) {}

  RunResult train() {
    RunResult result;
    result.layers = model_.size();
    result.status = transport::run_ranks(1, [&](transport::Transport& transport) -> Expected<void> {
      at::set_num_threads(1);
      for (int step = 0; step < run_.steps; ++step) {
        if (run_.freezing) {
          const int frozen = dynamism::frozen_layers(*run_.freezing, step, run_.steps, kLayers);
          for (auto& [id, state] : states_) {
            if (id.value < frozen && !state.frozen) model::freeze(state);
          }
          frozen_ = frozen;
        }
        DYNMO_ASSIGN(const std::vector<double> losses, gradients(transport, step));
        double loss = 0;
        for (const double value : losses) loss += value;
        result.losses.push_back(loss / static_cast<double>(losses.size()));
        result.gradient_norms.push_back(update(step));
      }
      for (const auto& [id, state] : states_) {
        result.states[id.value] = model::digest(state).hex();
        for (const auto& p : state.parameters) result.values[id.value].push_back(p.value.clone());
      }
      DYNMO_TRY(gradients(transport, run_.steps));
      for (const auto& [id, state] : states_) {
        Digester digester;
        for (const auto& parameter : state.parameters) {
          if (!parameter.gradient.defined()) continue;
          digester.update(bytes_of(parameter.gradient));
          result.gradient_values[id.value].push_back(parameter.gradient.clone());
        }
        result.gradients[id.value] = digester.digest().hex();
      }
      return {};
    });
    return result;
  }

 private:
  // Leaves the step's gradients in the states; returns the losses of all micro-batches.
  Expected<std::vector<double>> gradients(transport::Transport& transport, int step) {
    const int of_replica = run_.accumulation * run_.micro_batches;
    const auto shape = plan::shape_of(plan_, of_replica, frozen_);
    const auto lowered = schedule::lower(plan::schedule_of(plan_, of_replica, frozen_).value());
    std::vector<double> losses;
    Gradients total;
    for (int replica = 0; replica < run_.replicas; ++replica) {
      for (auto& [id, state] : states_) model::zero_gradients(state);
      const StepInput input{
          .lowered = lowered,
          .plan = plan_,
          .step = step,
          .frozen_layers = frozen_,
          .first_micro_batch = replica * of_replica,
          .step_micro_batches = run_.replicas * of_replica,
          .boundary_shape = options_.boundary_shape,
          .boundary_type = run_.type,
          .batch = [&](MicroBatchId id) { return batch(config_, run_.seed, step, id); }};
      DYNMO_ASSIGN(const StepOutput output, run_schedule(transport, 0, model_, input, states_));
      const auto& of_head = output.losses.at(LayerId(kLayers - 1));
      losses.insert(losses.end(), of_head.begin(), of_head.end());
      for (auto& [id, state] : states_) {
        for (std::size_t i = 0; i < state.parameters.size(); ++i) {
          const at::Tensor& gradient = state.parameters[i].gradient;
          if (!gradient.defined()) continue;
          if (replica == 0) total[id].push_back(gradient.clone());
          if (replica > 0) total[id][i] = total[id][i] + gradient;
        }
      }
    }
    for (const model::Tie& tie : run_.ties) {
      at::Tensor& first = total[tie.first][index_of(tie.first, tie.first_parameter)];
      at::Tensor& second = total[tie.second][index_of(tie.second, tie.second_parameter)];
      first = first + second;
      second = first.clone();
    }
    for (auto& [id, state] : states_) {
      for (std::size_t i = 0; i < state.parameters.size(); ++i) {
        if (!state.frozen) state.parameters[i].gradient = total[id][i];
      }
    }
    return losses;
  }

  double update(int step) {
    double squared = 0;
    for (const auto& [id, state] : states_) {
      double layer = 0;
      for (const auto& parameter : state.parameters) {
        const bool counted = std::none_of(run_.ties.begin(), run_.ties.end(), [&](const auto& tie) {
          return tie.second == id && tie.second_parameter == parameter.name;
        });
        if (counted) layer += model::squared_norm(parameter);
      }
      squared += layer;
    }
    const double norm = std::sqrt(squared);
    model::AdamWOptions optimizer = options_.optimizer;
    optimizer.learning_rate = config::learning_rate(options_.learning_rate, step);
    for (auto& [id, state] : states_) {
      model::update(state, optimizer, model::clip_factor(norm, options_.clip_norm));
    }
    return norm;
  }

  std::size_t index_of(LayerId layer, const std::string& name) const {
    const auto& parameters = states_.at(layer).parameters;
    const auto found = std::find_if(parameters.begin(), parameters.end(),
                                    [&](const auto& p) { return p.name == name; });
    return static_cast<std::size_t>(found - parameters.begin());
  }

  RunOptions run_;
  model::LlamaConfig config_;
  model::Model model_;
  PipelineOptions options_;
  plan::Plan plan_;
  LayerStates states_;
  int frozen_ = 0;
};

class Replicas : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Replicas, EqualOneRankThatAddsTheirSumsInOrderBitForBit) {
  const auto [replicas, ranks] = GetParam();
  constexpr std::uint64_t kSeed = 31;
  RunOptions options{.steps = 6, .micro_batches = 2 * ranks, .replicas = replicas};
  const RunResult single = OneRank(options).train();
  Rng rng(mix_key({kSeed, static_cast<std::uint64_t>(ranks)}));
  for (const schedule::ScheduleKind kind : kKinds) {
    options.plan = random_plan(rng, kind, kLayers, ranks, options.micro_batches);
    expect_same(single, run_pipeline(options),
                fmt::format("seed {}, {} x {} {}", kSeed, replicas, schedule::name(kind),
                            plan::to_string(*options.plan)));
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, Replicas,
                         ::testing::Combine(::testing::Values(2, 3), ::testing::Values(1, 2, 3)),
                         [](const auto& test) {
                           return fmt::format("{}x{}", std::get<0>(test.param),
                                              std::get<1>(test.param));
                         });

// The order matters: another grouping of the same micro-batches gives other bits, so the test above
// can fail.
TEST(Grid, AnotherGroupingChangesBits) {
  const RunResult together = OneRank({.steps = 2, .micro_batches = 12}).train();
  const RunResult grouped = OneRank({.steps = 2, .micro_batches = 4, .replicas = 3}).train();
  EXPECT_EQ(together.losses.front(), grouped.losses.front());
  EXPECT_NE(together.states, grouped.states);
}

TEST(Accumulation, RoundsEqualOneRoundOfAsManyMicroBatchesBitForBit) {
  for (const int replicas : {1, 2}) {
    const RunResult one =
        run_pipeline({.steps = 6, .micro_batches = 12, .replicas = replicas, .cut = {3, 5}});
    for (const auto& [rounds, kind] : {std::pair{3, schedule::ScheduleKind::k1F1B},
                                       std::pair{2, schedule::ScheduleKind::kZbH1}}) {
      const RunResult several = run_pipeline({.steps = 6,
                                              .micro_batches = 12 / rounds,
                                              .accumulation = rounds,
                                              .replicas = replicas,
                                              .cut = {4, 4},
                                              .schedule = kind});
      expect_same(one, several, fmt::format("{} rounds, {} replicas", rounds, replicas));
    }
  }
}

double largest(const at::Tensor& tensor) { return tensor.abs().max().item<double>(); }

TEST(Grid, AnyGroupingIsTheSameToTwelveDigitsInFp64) {
  const RunOptions base{.steps = 5, .micro_batches = 12, .ties = {kTie}, .type = at::kDouble};
  const RunResult expected = OneRank(base).train();
  ASSERT_TRUE(expected.status.has_value()) << expected.status.error().message;
  struct Grouping {
    int replicas, accumulation, micro_batches;
    std::vector<int> cut;
  };
  for (const Grouping& g :
       {Grouping{2, 1, 6, {8}}, Grouping{3, 2, 2, {3, 5}}, Grouping{2, 3, 2, {2, 3, 3}},
        Grouping{1, 4, 3, {5, 3}}, Grouping{4, 1, 3, {4, 4}}}) {
    RunOptions options = base;
    options.replicas = g.replicas;
    options.accumulation = g.accumulation;
    options.micro_batches = g.micro_batches;
    options.cut = g.cut;
    const RunResult found = run_pipeline(options);
    const std::string what = fmt::format("{} x {} x {} on {} ranks", g.replicas, g.accumulation,
                                         g.micro_batches, g.cut.size());
    ASSERT_TRUE(found.status.has_value()) << what << ": " << found.status.error().message;
    EXPECT_EQ(found.different, 0) << what;
    for (std::size_t step = 0; step < expected.losses.size(); ++step) {
      EXPECT_NEAR(found.losses[step], expected.losses[step], 1e-12 * expected.losses[step]) << what;
    }
    for (const auto field : {&RunResult::values, &RunResult::gradient_values}) {
      const auto& all = expected.*field;
      for (const auto& [layer, tensors] : all) {
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          const at::Tensor& other = (found.*field).at(layer)[i];
          EXPECT_LE(largest(tensors[i] - other), 1e-12 * std::max(1.0, largest(tensors[i])))
              << what << ", layer " << layer;
        }
      }
    }
  }
}

TEST(Grid, RandomPlansUnderReplicasAndFreezingChangeNoBit) {
  RunOptions options{.steps = 30, .micro_batches = 4, .replicas = 2, .cut = {3, 5}};
  options.freezing = freezing();
  const RunResult single = OneRank(options).train();
  options.before_step = random_plans(37, 2, options.micro_batches);
  const RunResult moving = run_pipeline(options);
  expect_same(single, moving, "seed 37");
  for (const auto& [layer, owners] : moving.owners) EXPECT_EQ(owners, 2) << "layer " << layer;
}

TEST(Grid, BalancesByItselfWithAllReplicasAlike) {
  RunOptions options{.steps = 30, .micro_batches = 4, .replicas = 2, .cut = {1, 7}};
  options.freezing = freezing();
  const RunResult single = OneRank(options).train();
  options.balancing = Balancing::kAutomatic;
  expect_same(single, run_pipeline(options), "automatic balancing");
}

TEST(Grid, ACopyRefusedInOneReplicaIsRefusedInAll) {
  RunOptions options{.steps = 10, .replicas = 2, .cut = {4, 4}};
  const RunResult still = run_pipeline(options);
  std::mutex mutex;
  int refusals = 0;
  options.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 5) return {};
    DYNMO_ASSIGN(const bool moved,
                 pipeline.apply(plan::make_plan({2, 6}, pipeline.plan().schedule, 1)));
    const std::lock_guard lock(mutex);
    refusals += moved ? 0 : 1;
    EXPECT_NE(pipeline.last_migration().refusal.find("checksum"), std::string::npos)
        << pipeline.last_migration().refusal;
    EXPECT_NE(pipeline.last_migration().refusal.find("from rank 2: "), std::string::npos)
        << pipeline.last_migration().refusal;
    EXPECT_EQ(pipeline.plan().generation, 0);
    return {};
  };
  options.faulty = transport::Member(2);  // the first rank of the second replica
  options.faults = {{.kind = transport::Fault::Kind::kCorrupt,
                     .first_tag = transport::migration_tag(LayerId(0)),
                     .last_tag = transport::migration_tag(LayerId(kLayers)),
                     .first = 2,
                     .byte = 17}};
  const RunResult refused = run_pipeline(options);
  EXPECT_EQ(refusals, 4);
  expect_same(still, refused, "a flipped bit in one replica");
}

// When the head's gradients leave, the last micro-batch has not yet added to the embedding's.
TEST(Grid, LayersAreReducedWhileTheStepStillRuns) {
  RunOptions options{.steps = 1, .replicas = 2, .cut = {kLayers}};
  Pipeline* pipeline = nullptr;  // of the first replica
  options.faulty = transport::Member(0);
  options.before_step = [&](Pipeline& own, std::int64_t) -> Expected<void> {
    if (own.grid().replica() == 0) pipeline = &own;
    return {};
  };
  std::map<int, double> seen;  // norm of the embedding's gradient when a layer's messages leave
  for (const int layer : {kLayers - 1, 0}) {
    options.faults.push_back({.kind = transport::Fault::Kind::kCall,
                              .first_tag = transport::reduction_tag(LayerId(layer)),
                              .last_tag = transport::reduction_tag(LayerId(layer)),
                              .call = [&, layer] {
                                seen[layer] =
                                    model::squared_norm(pipeline->states().at(LayerId(0)));
                              }});
  }
  const RunResult result = run_pipeline(options);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_GT(seen.at(kLayers - 1), 0);
  EXPECT_NE(seen.at(kLayers - 1), seen.at(0));
}

TEST(Grid, AFailedReductionEndsEveryRankWithPeerLost) {
  RunOptions options{.steps = 5, .replicas = 2, .cut = {4, 4}};
  options.faulty = transport::Member(3);
  options.faults = {{.kind = transport::Fault::Kind::kFail,
                     .first_tag = transport::reduction_tag(LayerId(0)),
                     .last_tag = transport::reduction_tag(LayerId(kLayers)),
                     .first = 7}};
  const RunResult result = run_pipeline(options);
  ASSERT_FALSE(result.status.has_value());
  EXPECT_EQ(result.status.error().code, ErrorCode::kPeerLost);
  EXPECT_LT(result.losses.size(), 5U);
}

// Without replicas, and with them.
TEST(Ties, RandomPlansEqualOneRankBitForBitAndKeepTheCopiesEqual) {
  for (const int replicas : {1, 2}) {
    RunOptions options{.steps = 60, .micro_batches = 6, .replicas = replicas, .cut = {3, 2, 3}};
    options.ties = {kTie};
    const RunResult single = OneRank(options).train();
    options.before_step = random_plans(41, 3, options.micro_batches);
    const RunResult moving = run_pipeline(options);
    expect_same(single, moving, fmt::format("seed 41, {} replicas", replicas));
    const at::Tensor& first = moving.values.at(0)[0];
    const at::Tensor& second = moving.values.at(kLayers - 1)[1];
    EXPECT_TRUE(at::equal(first, second));
    EXPECT_TRUE(
        at::equal(moving.gradient_values.at(0)[0], moving.gradient_values.at(kLayers - 1)[1]));
    options.ties.clear();
    options.before_step = {};
    // A tie that nobody adds up would show.
    if (replicas == 1) {
      EXPECT_NE(run_pipeline(options).losses, single.losses);
    }
  }
}

TEST(Ties, UnderReplicasInBf16EqualOneRankBitForBit) {
  RunOptions options{.steps = 9, .micro_batches = 4, .replicas = 2, .cut = {3, 5}};
  options.precision = cost::Precision::kBf16;
  options.ties = {kTie};
  const RunResult single = OneRank(options).train();
  options.recompute = plan::Recompute::kWhole;
  options.before_step = random_plans(43, 2, options.micro_batches);
  expect_same(single, run_pipeline(options), "seed 43, bf16, recomputed");
}

// The sum of the two gradients is the gradient of the one matrix.
TEST(Ties, TheirGradientMatchesCentralDifferences) {
  constexpr double kStep = 1e-5;
  RunOptions options{.steps = 0, .cut = {3, 5}, .ties = {kTie}, .type = at::kDouble};
  const RunResult result = run_pipeline(options);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
  const at::Tensor gradient = result.gradient_values.at(0)[0];
  const auto loss_at = [&](double distance) {
    RunOptions moved = options;
    moved.steps = 1;
    moved.before_step = [&](Pipeline& pipeline, std::int64_t) -> Expected<void> {
      for (const auto& [layer, parameter] : {std::pair{0, 0}, std::pair{kLayers - 1, 1}}) {
        const auto found = pipeline.states().find(LayerId(layer));
        if (found == pipeline.states().end()) continue;
        found->second.parameters[static_cast<std::size_t>(parameter)].value.add_(gradient,
                                                                                 distance);
      }
      return {};
    };
    return run_pipeline(moved).losses.at(0);
  };
  const double expected = gradient.pow(2).sum().item<double>();
  EXPECT_NEAR((loss_at(kStep) - loss_at(-kStep)) / (2 * kStep), expected, 1e-7 * expected);
}

TEST(Ties, WhatCannotBeTiedIsSaid) {
  const model::Model model = model::make_llama(small_model());
  EXPECT_TRUE(check_ties({kTie}, model).has_value());
  EXPECT_TRUE(check_ties({}, model).has_value());
  const auto refused = [&](std::vector<model::Tie> ties, const std::string& word) {
    const auto done = check_ties(ties, model);
    ASSERT_FALSE(done.has_value()) << word;
    EXPECT_EQ(done.error().code, ErrorCode::kBadInput);
    EXPECT_NE(done.error().message.find(word), std::string::npos) << done.error().message;
  };
  refused({kTie, kTie}, "one tie");
  model::Tie tie = kTie;
  tie.second = LayerId(kLayers);
  refused({tie}, "layer 8");
  tie = kTie;
  tie.first_parameter = "wte.weight";
  refused({tie}, "wte.weight");
  tie = kTie;
  tie.second_parameter = "norm.weight";
  refused({tie}, "[61, 32]");
}

}  // namespace
}  // namespace dynmo::runtime::testing
