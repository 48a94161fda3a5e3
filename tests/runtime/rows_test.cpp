// SPDX-License-Identifier: Apache-2.0
// Rows that leave between layers: the same bits however the layers are cut, ordered and run, and
// whatever their messages have room for.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "dropping_layer.h"
#include "dynmo/core/rng.h"
#include "dynmo/model/autograd_layer.h"
#include "dynmo/model/gpt2.h"
#include "dynmo/runtime/row_messages.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/transport/traffic.h"
#include "pipeline_fixture.h"
#include "tests/model/helpers.h"
#include "tests/schedule/random_pipelines.h"
#include "tests/support/samples.h"

namespace dynmo::runtime::testing {
namespace {

using model::testing::random_tensor;
using model::testing::same_bits;

model::Model dropping_llama() { return dropping(model::make_llama(small_model()), {2, 4}); }

model::Model dropping_gpt2() {
  model::Gpt2Config config;
  config.shape = small_model().shape;
  config.shape.kv_heads = 0;
  config.shape.positions = config.shape.sequence;
  config.tied_embeddings = false;
  return dropping(model::make_gpt2(config), {1, 4});
}

TEST(RowMessages, CarryRowsOfAnyNumberWithAnyRoom) {
  const RowFormat format{.shape = {2, 5, 3}, .type = at::kFloat};
  const at::Tensor x = random_tensor({10, 3}, 1, at::kFloat);
  for (const std::int64_t count : {0, 1, 4, 9, 10}) {
    const at::Tensor rows = at::arange(10, at::kInt).narrow(0, 10 - count, count).contiguous();
    const model::Hidden hidden(x.narrow(0, 10 - count, count), rows);
    for (const std::int64_t room : {1, 3, 4, 10}) {
      const at::Tensor first = first_message(format, room, hidden);
      const at::Tensor second = second_message(format, room, hidden);
      EXPECT_EQ(first.numel(), first_bytes(format, room).value);
      EXPECT_EQ(first.numel(), 8 + room * 16);
      EXPECT_EQ(second.defined(), count > room);
      EXPECT_EQ(second.defined() ? second.numel() : 0, second_bytes(format, room, count).value);
      EXPECT_EQ(count_in(first), count);
      const model::Hidden back = unpacked(format, room, first, second);
      EXPECT_EQ(back.rows.defined(), count < 10);
      if (count == 10) {
        EXPECT_TRUE(same_bits(back.x, x.view({2, 5, 3})));
      } else {
        EXPECT_TRUE(same_bits(back.x, hidden.x));
        EXPECT_TRUE(at::equal(back.rows, rows));
      }
    }
  }
  EXPECT_EQ(mean_message_bytes(format, 4, {2, 6}).value, 8 + (4 + 6) * 16 / 2);
}

TEST(RowMessages, HaveRoomBehindALayerThatDropsRowsAlone) {
  EXPECT_EQ(whole_room(dropping_llama(), {2, 12, 32}),
            (std::vector<std::int64_t>{0, 0, 24, 24, 24, 24, 24, 0}));
  EXPECT_TRUE(whole_room(model::make_llama(small_model()), {2, 12, 32}).empty());
}

// A layer on rows of which none has left is the layer on whole sequences.
TEST(RowsLeft, AllOfThemGiveTheBitsOfWholeSequences) {
  for (const model::Model& layers : {model::make_llama(small_model()), dropping_gpt2()}) {
    for (const int i : {1, 2, 7}) {
      const auto& layer = layers[static_cast<std::size_t>(i)];
      if (layer->needs().drops_rows) continue;
      model::LayerContext context = model::testing::random_context(small_model().shape, 2, 5);
      context.sequences = 2;
      context.sequence_length = 12;
      const at::Tensor x = random_tensor({2, 12, 32}, 3, at::kFloat);
      const at::Tensor dy = random_tensor({2, 12, 32}, 4, at::kFloat);
      std::vector<std::vector<at::Tensor>> results;
      for (const bool ragged : {false, true}) {
        model::LayerState state = model::make_state(*layer, LayerId(i), 3);
        std::unique_ptr<model::Stash> stash;
        const model::Hidden input =
            ragged ? model::Hidden(x.view({24, 32}), at::arange(24, at::kInt)) : model::Hidden(x);
        const model::Output output = layer->forward(state, input, context, &stash);
        const at::Tensor gradient = layer->input_gradient(state, *stash,
                                                          i == 7   ? at::Tensor()
                                                          : ragged ? dy.view({24, 32})
                                                                   : dy,
                                                          model::Layer::InputGradient::kWanted);
        layer->weight_gradient(state, *stash);
        auto& result = results.emplace_back();
        result = {gradient.reshape({24, 32})};
        result.push_back(i == 7 ? output.loss : output.hidden.x.reshape({24, 32}));
        for (const auto& parameter : state.parameters) result.push_back(parameter.gradient);
      }
      for (std::size_t k = 0; k < results[0].size(); ++k) {
        EXPECT_TRUE(same_bits(results[0][k], results[1][k])) << layer->name() << " " << k;
      }
    }
  }
}

RunOptions dropping_run(const model::Model& layers, double room) {
  RunOptions run{.cut = {kLayers}};
  run.layers = layers;
  run.row_room = room;
  return run;
}

// Cut, placement and schedule; a stage's micro-batches wait for each other where there is room for
// one row, and where there is room for all of them.
TEST(Rows, LeaveTheSameBitsUnderEveryScheduleWithAnyRoom) {
  for (const model::Model& layers : {dropping_llama(), dropping_gpt2()}) {
    const RunResult alone = run_pipeline(dropping_run(layers, 1));
    Rng rng(11);
    int runs = 0;
    for (const schedule::ScheduleKind kind : kKinds) {
      for (const double room : {1e-9, 1.05, 1e9}) {
        RunOptions run = dropping_run(layers, room);
        const int ranks = 2 + runs % 3;
        run.micro_batches = ranks == 3 ? 6 : 4;
        run.plan = random_plan(rng, kind, kLayers, ranks, run.micro_batches);
        if (runs % 4 == 3) run.recompute = plan::Recompute::kWhole;
        if (runs % 3 == 1) run.before_step = random_plans(rng.next(), ranks, run.micro_batches);
        RunOptions reference = dropping_run(layers, 1);
        reference.micro_batches = run.micro_batches;
        expect_same(run.micro_batches == 4 ? alone : run_pipeline(reference), run_pipeline(run),
                    fmt::format("{}, room {}", plan::to_string(*run.plan), room));
        ++runs;
      }
    }
  }
}

TEST(Rows, OfTwoReplicasAndOfSeveralRoundsAreTheSame) {
  for (const bool replicas : {false, true}) {
    RunOptions run = dropping_run(dropping_llama(), 1.05);
    (replicas ? run.replicas : run.accumulation) = 2;
    const RunResult alone = run_pipeline(run);
    run.cut = {3, 5};
    expect_same(alone, run_pipeline(run), replicas ? "replicas" : "rounds");
  }
}

TEST(Rows, WithCopiesAndInBf16) {
  RunOptions run = dropping_run(dropping_llama(), 1.05);
  run.precision = cost::Precision::kBf16;
  const RunResult alone = run_pipeline(run);
  run.cut = {2, 2, 4};
  expect_same(alone, run_pipeline(run), "bf16");
  run = dropping_run(dropping_llama(), 1.05);
  run.cut = {3, 5};
  const RunResult plain = run_pipeline(run);
  run.staging.copies = Staging::Copies::kAlways;
  expect_same(plain, run_pipeline(run), "copies");
}

// As many small layers as a schedule has stages; rows leave behind some of them.
model::Model small_layers(std::size_t count, std::uint64_t seed) {
  const auto named = [](const char* name) {
    return std::vector<model::ParameterSpec>{{.name = name, .shape = {7, 4}, .init_std = 1}};
  };
  model::Model layers;
  for (std::size_t i = 0; i < count; ++i) {
    layers.push_back(model::autograd_layer(
        fmt::format("layer {}", i), named("weight"),
        [i, count](const std::vector<at::Tensor>& p, const at::Tensor& x,
                   const model::LayerContext& context, const model::LayerState&) {
          model::Output output;
          const at::Tensor y =
              i == 0 ? at::embedding(p[0], context.tokens_BT) : at::tanh(x * p[0][1]) + x;
          if (i + 1 < count) {
            output.hidden = y;
          } else {
            output.loss = (y * y).sum() / 10;
          }
          return output;
        },
        {.needs = {.loss = i + 1 == count}}));
    const bool drops = i + 1 < count && Rng(mix_key({seed, 4, i})).below(2) == 0;
    if (drops) layers.back() = std::make_shared<DroppingLayer>(layers.back(), seed);
  }
  return layers;
}

plan::Plan plan_of(const schedule::PipelineShape& shape) {
  plan::Plan plan;
  plan.ranks = shape.ranks;
  for (std::size_t s = 0; s < shape.stages.size(); ++s) {
    plan.stages.push_back(
        {.rank = shape.stages[s].rank, .layers = {LayerId(static_cast<int>(s)), 1}});
  }
  return plan;
}

struct ScheduleResult {
  Expected<void> status;
  std::map<int, std::vector<double>> losses;
  std::map<int, at::Tensor> gradients;
};

ScheduleResult run_lowered(const schedule::Schedule& lowered, const model::Model& layers,
                           const std::vector<std::int64_t>& room, std::uint64_t seed,
                           const std::vector<transport::Fault>& faults) {
  const plan::Plan plan = plan_of(lowered.shape);
  int frozen = 0;
  for (const auto& stage : lowered.shape.stages) frozen += stage.frozen ? 1 : 0;
  ScheduleResult result;
  std::mutex mutex;
  result.status =
      transport::run_ranks(lowered.shape.ranks, [&](transport::Transport& inner) -> Expected<void> {
        at::set_num_threads(1);
        const auto transport = transport::with_faults(inner, faults);
        LayerStates states = initial_states(layers, plan, Rank(inner.rank().value), seed);
        for (auto& [id, state] : states) {
          if (id.value < frozen) model::freeze(state);
        }
        StepInput input{.lowered = lowered,
                        .plan = plan,
                        .step = static_cast<std::int64_t>(seed),
                        .frozen_layers = frozen,
                        .boundary_shape = {2, 5, 4},
                        .room = room,
                        .batch = [&](MicroBatchId id) {
                          const auto tokens = model::testing::random_tokens(
                              2, 5, 7, mix_key({seed, static_cast<std::uint64_t>(id.value)}));
                          return MicroBatch{tokens, tokens};
                        }};
        DYNMO_ASSIGN(const StepOutput output, run_schedule(*transport, 0, layers, input, states));
        const std::lock_guard lock(mutex);
        for (const auto& [id, losses] : output.losses) result.losses[id.value] = losses;
        for (const auto& [id, state] : states) {
          if (!state.frozen) result.gradients[id.value] = state.parameters[0].gradient;
        }
        return {};
      });
  return result;
}

// Neighbours in the lists change places: what the checker lets pass is another valid order.
schedule::Schedule shuffled(schedule::Schedule lowered, Rng& rng) {
  for (auto& list : lowered.ranks) {
    for (std::size_t swaps = list.size(); swaps-- > 0 && list.size() > 1;) {
      const std::size_t i = rng.below(list.size() - 1);
      std::swap(list[i], list[i + 1]);
      if (rng.below(16) != 0 && !schedule::check(lowered)) std::swap(list[i], list[i + 1]);
    }
  }
  return lowered;
}

// Orders that no template has, with receives and sends where the checker lets them be, counts drawn
// from none to all, late messages: whatever it calls valid ends, with the bits of one rank.
TEST(Rows, CrossEveryScheduleThatIsCalledValid) {
  constexpr std::uint64_t kCases = 1000;
  int run = 0;
  int refused = 0;
  for (std::uint64_t seed = 0; run < samples(static_cast<int>(kCases)); ++seed) {
    ASSERT_LT(seed, 4 * kCases);
    Rng rng(mix_key({0x40357, seed}));
    const schedule::PipelineShape shape = schedule::testing::random_crowded_shape(rng);
    const schedule::Schedule lowered =
        shuffled(schedule::lower(schedule::testing::random_schedule(rng, shape)), rng);
    if (!schedule::check(lowered)) {
      ++refused;
      continue;
    }
    const model::Model layers = small_layers(shape.stages.size(), seed);
    std::vector<std::int64_t> room = whole_room(layers, {2, 5, 4});
    for (std::int64_t& one : room) {
      if (one > 0) one = 1 + static_cast<std::int64_t>(rng.below(10));
    }
    std::vector<transport::Fault> faults;
    for (int i = 0; i < 2; ++i) {
      faults.push_back(
          {.kind = transport::Fault::Kind::kDelay,
           .on = rng.below(2) == 0 ? transport::Fault::On::kSend : transport::Fault::On::kReceive,
           .first = static_cast<int>(rng.below(8)),
           .delay = std::chrono::milliseconds(1)});
    }
    schedule::PipelineShape alone = shape;
    alone.ranks = 1;
    for (auto& stage : alone.stages) stage.rank = Rank(0);
    const ScheduleResult expected = run_lowered(
        schedule::lower(schedule::testing::random_schedule(rng, alone)), layers, room, seed, {});
    const ScheduleResult found = run_lowered(lowered, layers, room, seed, faults);
    ASSERT_TRUE(expected.status) << "seed " << seed << ": " << expected.status.error().message;
    ASSERT_TRUE(found.status) << "seed " << seed << ": " << found.status.error().message;
    ASSERT_EQ(found.losses, expected.losses) << "seed " << seed;
    ASSERT_EQ(found.gradients.size(), expected.gradients.size()) << "seed " << seed;
    for (const auto& [layer, gradient] : expected.gradients) {
      ASSERT_TRUE(same_bits(found.gradients.at(layer), gradient))
          << "seed " << seed << ", layer " << layer;
    }
    ++run;
  }
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace dynmo::runtime::testing
