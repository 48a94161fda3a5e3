// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/reduction.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/core/rng.h"
#include "dynmo/runtime/pieces.h"
#include "dynmo/transport/in_process.h"
#include "dynmo/transport/traffic.h"

namespace dynmo::runtime {
namespace {

// Gradients of very different sizes, so that the order of a sum shows in its bits.
at::Tensor random_gradient(at::IntArrayRef shape, std::uint64_t key, at::ScalarType type) {
  Rng rng(key);
  at::Tensor tensor = at::empty(shape, at::kDouble);
  auto* data = tensor.data_ptr<double>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    data[i] = rng.normal() * std::exp2(static_cast<double>(rng.below(24)));
  }
  return tensor.to(type);
}

model::LayerState layer_of(int id, const std::vector<std::vector<std::int64_t>>& shapes,
                           std::uint64_t seed, at::ScalarType type) {
  model::LayerState state;
  state.id = LayerId(id);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    model::Parameter parameter;
    parameter.name = fmt::format("p{}", i);
    parameter.gradient =
        random_gradient(shapes[i], mix_key({seed, static_cast<std::uint64_t>(id), i}), type);
    state.parameters.push_back(std::move(parameter));
  }
  return state;
}

LayerStates states_of(int replica, at::ScalarType type) {
  const auto seed = static_cast<std::uint64_t>(replica + 100);
  LayerStates states;
  states.emplace(LayerId(2), layer_of(2, {{3, 5}, {1}, {7}}, seed, type));
  states.emplace(LayerId(3), layer_of(3, {{700, 1001}, {64}}, seed, type));  // more than a piece
  states.emplace(LayerId(4), layer_of(4, {{2}}, seed, type));  // fewer elements than replicas
  states.emplace(LayerId(9), layer_of(9, {{33}, {17, 3}}, seed, type));
  return states;
}

class Sums : public ::testing::TestWithParam<std::tuple<int, at::ScalarType>> {};

TEST_P(Sums, AreTakenInTheOrderOfTheReplicasOnAllOfThem) {
  const auto [replicas, type] = GetParam();
  std::map<LayerId, std::vector<at::Tensor>> expected;
  for (int replica = 0; replica < replicas; ++replica) {
    for (const auto& [id, state] : states_of(replica, type)) {
      auto& sums = expected[id];
      for (std::size_t i = 0; i < state.parameters.size(); ++i) {
        const at::Tensor& gradient = state.parameters[i].gradient;
        if (replica == 0) sums.push_back(gradient);
        if (replica > 0) sums[i] = sums[i] + gradient;
      }
    }
  }
  const auto done =
      transport::run_ranks(replicas, [&](transport::Transport& peers) -> Expected<void> {
        at::set_num_threads(1);
        LayerStates states = states_of(peers.rank().value, type);
        Reduction reduction(peers, states);
        for (const int id : {9, 4, 3, 2}) reduction.start(LayerId(id));
        DYNMO_TRY(reduction.finish());
        for (const auto& [id, state] : states) {
          for (std::size_t i = 0; i < state.parameters.size(); ++i) {
            EXPECT_TRUE(at::equal(state.parameters[i].gradient, expected.at(id)[i]))
                << "layer " << id.value << ", parameter " << i << ", replica "
                << peers.rank().value;
          }
        }
        return {};
      });
  EXPECT_TRUE(done.has_value()) << done.error().message;
}

INSTANTIATE_TEST_SUITE_P(Reduction, Sums,
                         ::testing::Combine(::testing::Values(1, 2, 3, 5),
                                            ::testing::Values(at::kFloat, at::kDouble,
                                                              at::kBFloat16)),
                         [](const auto& test) {
                           return fmt::format("{}_{}", std::get<0>(test.param),
                                              c10::toString(std::get<1>(test.param)));
                         });

// Each of D replicas sends every other one a D-th of its N gradients and of the sums, in all
// 2 (D - 1) / D of its bytes where D divides N.
TEST(Reduction, OfRandomSizesSendsTheBytesOfItsClosedForm) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(mix_key({0x5EDC, seed}));
    const auto replicas = static_cast<std::int64_t>(2 + rng.below(4));
    const bool even = rng.below(2) == 0;
    const std::int64_t elements = even ? replicas * static_cast<std::int64_t>(1 + rng.below(500))
                                       : static_cast<std::int64_t>(1 + rng.below(2000));
    const auto bytes_of = [&](std::int64_t part) {
      return 4 * (elements * (part + 1) / replicas - elements * part / replicas);
    };
    const auto done = transport::run_ranks(
        static_cast<int>(replicas), [&](transport::Transport& inner) -> Expected<void> {
          at::set_num_threads(1);
          transport::CountingTransport counting(inner);
          LayerStates states;
          states.emplace(LayerId(6), layer_of(6, {{elements}}, seed, at::kFloat));
          Reduction reduction(counting, states);
          reduction.start(LayerId(6));
          DYNMO_TRY(reduction.finish());
          const std::int64_t self = inner.rank().value;
          for (std::int64_t to = 0; to < replicas; ++to) {
            const std::int64_t expected = to == self ? 0 : bytes_of(to) + bytes_of(self);
            const auto& count =
                counting.sent(transport::Member(static_cast<int>(to)), Purpose::kReduction);
            EXPECT_EQ(count.bytes.value, expected)
                << "seed " << seed << ", " << self << " to " << to;
          }
          if (even) {
            EXPECT_EQ(counting.sent_bytes().value, 2 * (replicas - 1) * 4 * elements / replicas)
                << "seed " << seed;
          }
          return {};
        });
    ASSERT_TRUE(done.has_value()) << "seed " << seed << ": " << done.error().message;
  }
}

TEST(GradientPieces, CoverEveryElementOnceInEvenPartsOfBoundedPieces) {
  for (const auto& [id, state] : states_of(0, at::kFloat)) {
    std::int64_t elements = 0;
    for (const auto& parameter : state.parameters) elements += parameter.gradient.numel();
    for (const int parts : {1, 2, 3, 7}) {
      for (const auto& parameter : state.parameters) parameter.gradient.zero_();
      for (int part = 0; part < parts; ++part) {
        std::int64_t count = 0;
        for (const at::Tensor& piece : gradient_pieces(state, part, parts)) {
          EXPECT_GT(piece.numel(), 0);
          EXPECT_LE(static_cast<std::int64_t>(piece.nbytes()), kPieceBytes);
          EXPECT_TRUE(piece.is_contiguous());
          count += piece.numel();
          piece.add_(1);
        }
        EXPECT_GE(count, elements / parts);
        EXPECT_LE(count, elements / parts + 1);
      }
      for (const auto& parameter : state.parameters) {
        EXPECT_TRUE(at::equal(parameter.gradient, at::ones_like(parameter.gradient)))
            << "layer " << id.value << ", " << parts << " parts";
      }
    }
  }
}

TEST(GradientPieces, AFrozenLayerHasNone) {
  model::LayerState state = layer_of(1, {{4, 4}}, 1, at::kFloat);
  state.parameters[0].value = at::ones({4, 4});
  model::freeze(state);
  EXPECT_TRUE(gradient_pieces(state, 0, 2).empty());
}

}  // namespace
}  // namespace dynmo::runtime
