// SPDX-License-Identifier: Apache-2.0
// A head in slices against the whole head and against autograd.
#include "dynmo/model/head_slice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "dynmo/core/rng.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/precision.h"
#include "gradients.h"
#include "helpers.h"
#include "stash_bytes.h"

namespace dynmo::model {
namespace {

using testing::random_tensor;

constexpr std::int64_t kWords = 16 * 128 + 37;

DecoderConfig config_of(cost::Family family, std::int64_t slices) {
  if (family == cost::Family::kLlama) {
    LlamaConfig config = testing::tiny_config();
    config.shape.vocabulary = kWords;
    config.shape.head_slices = slices;
    return config;
  }
  Gpt2Config config = testing::tiny_gpt2();
  config.shape.vocabulary = kWords;
  config.shape.head_slices = slices;
  return config;
}

// The last `count` layers of a decoder.
Model head_of(const DecoderConfig& config, std::int64_t count) {
  const Model all = make_decoder(config);
  return {all.end() - count, all.end()};
}

// The state of a whole head in slices: values of any type, and gradients of 0.
std::vector<LayerState> cut(const LayerState& whole, const Model& slices) {
  std::vector<LayerState> states;
  for (const auto& layer : slices) {
    LayerState state = make_state(*layer, whole.id, 1);
    for (std::size_t i = 0; i < state.parameters.size(); ++i) {
      Parameter& p = state.parameters[i];
      const auto part = parse_matrix_rows(p.name);
      p.value = part ? whole.parameters.back()
                           .value.narrow(0, part->rows.begin, part->rows.end - part->rows.begin)
                           .clone()
                     : whole.parameters[i].value.clone();
      p.gradient = at::zeros_like(p.value);
    }
    derive(*layer, state);
    states.push_back(std::move(state));
  }
  return states;
}

// Some of the rows of [B, T, D] in their order, or none.
Hidden some_rows(const at::Tensor& x_BTD, const std::vector<std::int32_t>& rows) {
  const at::Tensor numbers = at::tensor(rows, at::kInt);
  return {x_BTD.reshape({-1, x_BTD.size(2)}).index_select(0, numbers.to(at::kLong)), numbers};
}

struct Result {
  at::Tensor loss;
  at::Tensor input_gradient;
  std::vector<at::Tensor> gradients;  // norms, then the whole matrix
};

Result run(const Model& head, std::vector<LayerState>& states, const Hidden& x,
           const LayerContext& context) {
  std::vector<std::unique_ptr<Stash>> stashes(head.size());
  Hidden hidden = x;
  Result result;
  for (std::size_t i = 0; i < head.size(); ++i) {
    Output output = head[i]->forward(states[i], hidden, context, &stashes[i]);
    EXPECT_EQ(output.loss.defined(), i + 1 == head.size());
    hidden = output.hidden;
    result.loss = output.loss;
  }
  for (std::size_t i = head.size(); i-- > 0;) {
    result.input_gradient = head[i]->input_gradient(states[i], *stashes[i], result.input_gradient,
                                                    Layer::InputGradient::kWanted);
  }
  std::vector<at::Tensor> rows;
  for (std::size_t i = 0; i < head.size(); ++i) {
    head[i]->weight_gradient(states[i], *stashes[i]);
    for (const Parameter& p : states[i].parameters) {
      (p.gradient.dim() == 2 ? rows : result.gradients).push_back(p.gradient);
    }
  }
  result.gradients.push_back(at::cat(rows));
  return result;
}

class HeadSlices : public ::testing::TestWithParam<cost::Family> {};

// The whole head is held against autograd in gradient_test.cpp and gpt2_test.cpp.
TEST_P(HeadSlices, HaveTheLossAndGradientsOfTheWholeHeadInFp64) {
  const Model whole = head_of(config_of(GetParam(), 1), 1);
  const at::Tensor x = random_tensor({3, 10, 24}, 21);
  LayerContext context = testing::random_context(shape_of(config_of(GetParam(), 1)), 3, 9);
  context.loss_weight = 0.25;
  LayerState state = testing::double_state(*whole[0], LayerId(5), 5);
  std::vector<LayerState> states = cut(state, whole);
  const Result expected = run(whole, states, x, context);
  for (const std::int64_t slices : {2, 3, 7}) {
    const Model head = head_of(config_of(GetParam(), slices), slices);
    states = cut(state, head);
    const Result found = run(head, states, x, context);
    EXPECT_TRUE(at::allclose(found.loss, expected.loss, 1e-13, 0)) << slices;
    EXPECT_TRUE(at::allclose(found.input_gradient, expected.input_gradient, 1e-11, 1e-14))
        << slices;
    ASSERT_EQ(found.gradients.size(), expected.gradients.size());
    for (std::size_t i = 0; i < found.gradients.size(); ++i) {
      EXPECT_TRUE(at::allclose(found.gradients[i], expected.gradients[i], 1e-11, 1e-14))
          << slices << " slices, gradient " << i;
    }
  }
}

// The largest difference of two scores of a row.
double score_range(const LayerState& head, const at::Tensor& x_BTD) {
  const at::Tensor x_ND = x_BTD.reshape({-1, x_BTD.size(2)});
  const at::Tensor n_ND =
      testing::plain_norm(x_ND, head.parameters[0].value, testing::tiny_config().rms_epsilon);
  const at::Tensor scores_NV = n_ND.matmul(head.parameters.back().value.t());
  return (scores_NV.amax(1) - scores_NV.amin(1)).max().item<double>();
}

// Sharp scores, more than 1e4 apart, so that p(target) is near 0 or 1; targets at the ends of
// slices; all rows, some, one or none.
TEST(HeadSlice, OfRandomHeadsHasTheLossAndGradientsOfTheWholeHead) {
  double widest = 0;  // difference of two scores of a row
  std::int64_t most = 0;
  int ragged = 0;
  int empty = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Rng rng(mix_key({seed, 91}));
    const auto below = [&](std::int64_t bound) {
      return static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(bound)));
    };
    LlamaConfig config = testing::tiny_config();
    config.shape.hidden = 8 * (1 + below(3));
    config.shape.sequence = 1 + below(9);
    config.shape.vocabulary = 256 + below(seed % 10 == 0 ? 2200 : 700);
    const std::int64_t slices =
        2 + below(std::min<std::int64_t>(15, config.shape.vocabulary / cost::kSliceRows - 1));
    most = std::max(most, slices);
    const Model whole = head_of(config, 1);
    config.shape.head_slices = slices;
    const Model head = head_of(config, slices);
    LayerContext context = testing::random_context(config.shape, 2, seed);
    for (std::int64_t n = 0; n < context.targets_BT.numel(); n += 2) {
      const cost::HeadRows rows = cost::head_rows(config.shape.vocabulary, slices, below(slices));
      context.targets_BT.view({-1}).data_ptr<std::int64_t>()[n] =
          below(2) == 0 ? rows.begin : rows.end - 1;
    }
    LayerState state = testing::double_state(*whole[0], LayerId(5), seed);
    const double scale = std::pow(10.0, static_cast<double>(below(5)) - 1);
    state.parameters.back().value.mul_(scale);
    const at::Tensor all =
        random_tensor({2, config.shape.sequence, config.shape.hidden}, mix_key({seed, 92}));
    Hidden x = all;
    if (seed % 3 == 1) {
      std::vector<std::int32_t> rows;
      const std::int64_t in_ten = below(11);
      for (std::int64_t n = 0; n < context.targets_BT.numel(); ++n) {
        if (below(10) < in_ten) rows.push_back(static_cast<std::int32_t>(n));
      }
      x = some_rows(all, rows);
      ++(rows.empty() ? empty : ragged);
    }
    widest = std::max(widest, score_range(state, all));
    std::vector<LayerState> states = cut(state, whole);
    const Result expected = run(whole, states, x, context);
    states = cut(state, head);
    const Result found = run(head, states, x, context);
    const auto near = [&](const at::Tensor& a, const at::Tensor& b, double relative) {
      if (b.numel() == 0) return a.sizes() == b.sizes();
      return at::allclose(a, b, relative, relative * b.abs().max().item<double>());
    };
    EXPECT_TRUE(near(found.loss, expected.loss, 1e-12)) << "seed " << seed;
    EXPECT_TRUE(near(found.input_gradient, expected.input_gradient, 1e-10)) << "seed " << seed;
    for (std::size_t i = 0; i < found.gradients.size(); ++i) {
      EXPECT_TRUE(near(found.gradients[i], expected.gradients[i], 1e-10))
          << "seed " << seed << ", gradient " << i;
    }
  }
  EXPECT_GT(widest, 1e4);
  EXPECT_EQ(most, 16);
  EXPECT_GT(ragged, 200);
  EXPECT_GT(empty, 20);
}

// The calls of one slice are the chain rule of what it passes on.
TEST(HeadSlice, OfTheMiddleIsWhatAutogradMakesOfItsFormula) {
  const Model head = head_of(config_of(cost::Family::kLlama, 3), 3);
  LayerState state = testing::double_state(*head[1], LayerId(6), 5);
  const auto part = parse_matrix_rows(state.parameters[0].name);
  ASSERT_TRUE(part.has_value());
  const LayerContext context =
      testing::random_context(shape_of(config_of(cost::Family::kLlama, 3)), 3, 9);
  const at::Tensor input = random_tensor({3, 10, 26}, 21);
  const at::Tensor output_gradient = random_tensor({3, 10, 26}, 22);
  const auto plain = [&](const std::vector<at::Tensor>& p, const at::Tensor& x) {
    const at::Tensor n = x.narrow(2, 0, 24);
    const at::Tensor scores = n.matmul(p[0].t());
    const at::Tensor targets = context.targets_BT - part->rows.begin;
    const at::Tensor here = targets.ge(0).logical_and(targets.lt(p[0].size(0)));
    const at::Tensor column = at::where(here, targets, at::zeros_like(targets)).unsqueeze(2);
    const at::Tensor l = at::logaddexp(x.select(2, 24), scores.logsumexp({2}));
    const at::Tensor z = x.select(2, 25) + scores.gather(2, column).squeeze(2) * here;
    return at::cat({n, l.unsqueeze(2), z.unsqueeze(2)}, 2);
  };
  const testing::Gradients by_hand =
      testing::by_three_calls(*head[1], state, input, context, output_gradient);
  testing::expect_near(by_hand, testing::by_autograd(state, input, output_gradient, plain), state);
}

TEST_P(HeadSlices, BeginWithTheRowsOfTheWholeMatrix) {
  const Model whole = make_decoder(config_of(GetParam(), 1));
  const LayerState expected = make_state(*whole[5], LayerId(5), 3);
  for (const std::int64_t slices : {2, 7}) {
    const Model head = head_of(config_of(GetParam(), slices), slices);
    std::vector<at::Tensor> rows;
    for (std::int64_t i = 0; i < slices; ++i) {
      const auto& layer = *head[static_cast<std::size_t>(i)];
      EXPECT_EQ(layer.name(), fmt::format("head.{} of {}", i, slices));
      rows.push_back(
          make_state(layer, LayerId(5 + static_cast<int>(i)), 3).parameters.back().value);
    }
    EXPECT_TRUE(testing::same_bits(at::cat(rows), expected.parameters.back().value)) << slices;
  }
}

// Bytes that a layer holds between forward and input_gradient, and the most that its three calls
// have allocated at once.
struct Metered {
  std::int64_t held = 0;
  std::int64_t peak = 0;
};
Metered metered(const Layer& layer, const at::Tensor& x, const LayerContext& context) {
  LayerState state = make_state(layer, LayerId(5), 3);
  Metered found{.held = measure_stash(layer, state, x, context).held.value};
  const AllocationMeter meter;
  std::unique_ptr<Stash> stash;
  at::Tensor gradient = layer.forward(state, {x}, context, &stash).hidden.x;  // any of its shape
  (void)layer.input_gradient(state, *stash, gradient, Layer::InputGradient::kWanted);
  layer.weight_gradient(state, *stash);
  found.peak = meter.peak().value;
  return found;
}

// A slice holds a share of the scores, and nothing that is as large as all of them.
TEST(HeadSlice, HoldsItsShareOfTheScoresAtMostTwice) {
  constexpr std::int64_t kSequences = 2;
  LlamaConfig config;
  config.shape = {.vocabulary = 32768,
                  .hidden = 256,
                  .blocks = 1,
                  .heads = 4,
                  .kv_heads = 4,
                  .intermediate = 64,
                  .sequence = 128};
  const std::int64_t tokens = kSequences * config.shape.sequence;
  const LayerContext context = testing::random_context(config.shape, kSequences, 9);
  const at::Tensor x = random_tensor({kSequences, 128, 256}, 21, at::kFloat);
  const Metered whole = metered(*head_of(config, 1)[0], x, context);
  EXPECT_GT(whole.peak, kFp32Bytes * tokens * config.shape.vocabulary);
  for (const std::int64_t slices : {2, 5, 16}) {
    config.shape.head_slices = slices;
    const std::int64_t boundary = kFp32Bytes * tokens * (config.shape.hidden + 2);
    at::Tensor input = x;
    std::int64_t slice = 0;
    for (const auto& layer : head_of(config, slices)) {
      const cost::HeadRows rows = cost::head_rows(config.shape.vocabulary, slices, slice++);
      const Metered found = metered(*layer, input, context);
      const auto predicted =
          static_cast<double>(boundary + kFp32Bytes * tokens * (rows.end - rows.begin));
      EXPECT_NEAR(static_cast<double>(found.held), predicted, 0.05 * predicted) << layer->name();
      EXPECT_LE(found.peak, 2 * whole.peak / slices + boundary) << layer->name();
      const LayerState state = make_state(*layer, LayerId(5), 3);
      input = layer->forward(state, {input}, context, nullptr).hidden.x;
    }
    ASSERT_EQ(slice, slices);
  }
}

// The gradient of the hidden values is a sum over all slices: in bf16 it would lose bits at each.
// The product of each slice is rounded, as the whole head's is, and the norm's gradient is not.
TEST_P(HeadSlices, AddNoErrorInBf16) {
  const at::Tensor x = random_tensor({3, 10, 24}, 21);
  const LayerContext context = testing::random_context(shape_of(config_of(GetParam(), 1)), 3, 9);
  const Model exact = head_of(config_of(GetParam(), 1), 1);
  const LayerState state = testing::double_state(*exact[0], LayerId(5), 5);
  std::vector<LayerState> states = cut(state, exact);
  const Result expected = run(exact, states, x, context);
  LayerState rounded = state;
  for (Parameter& p : rounded.parameters) p.value = p.value.to(at::kFloat);
  const auto error = [&](std::int64_t slices) {
    const Model head =
        in_precision(head_of(config_of(GetParam(), slices), slices), cost::Precision::kBf16);
    std::vector<LayerState> own = cut(rounded, head);
    const Result found = run(head, own, x.to(at::kBFloat16), context);
    EXPECT_EQ(found.input_gradient.scalar_type(), at::kBFloat16);
    return ((found.input_gradient.to(at::kDouble) - expected.input_gradient).norm() /
            expected.input_gradient.norm())
        .item<double>();
  };
  const double whole = error(1);
  EXPECT_GT(whole, 1e-4) << "is it bf16?";
  for (const std::int64_t slices : {2, 7, 16}) {
    EXPECT_LT(error(slices), 1.1 * whole) << slices;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, HeadSlices,
                         ::testing::Values(cost::Family::kLlama, cost::Family::kGpt2),
                         [](const auto& test) { return std::string(cost::name(test.param)); });

TEST(HeadSlice, NamesItsRowsAndReadsNoOtherName) {
  const MatrixRows rows = {.matrix = "lm_head.weight", .rows = {.begin = 128, .end = 256}};
  EXPECT_EQ(name_of(rows), "lm_head.weight[128:256]");
  const auto read = parse_matrix_rows("lm_head.weight[128:256]");
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->matrix, rows.matrix);
  EXPECT_EQ(read->rows, rows.rows);
  for (const char* other :
       {"lm_head.weight", "w[", "w[]", "w[1]", "w[1:", "w[1:]", "w[1:2", "w[:2]", "w[1:2]x",
        "w[-1:2]", "w[2:2]", "w[3:2]", "w[1:99999999999999999999]", "w[1 :2]", ""}) {
    EXPECT_FALSE(parse_matrix_rows(other).has_value()) << other;
  }
}

TEST(HeadSlice, TiesEachSliceToItsRowsOfTheEmbedding) {
  DecoderConfig config = config_of(cost::Family::kGpt2, 3);
  const std::vector<Tie> tied = ties(config);
  ASSERT_EQ(tied.size(), 3U);
  EXPECT_EQ(tied[0].rows->begin, 0);
  EXPECT_EQ(tied[2].rows->end, kWords);
  EXPECT_EQ(tied[2].second, LayerId(7));
  EXPECT_EQ(tied[1].second_parameter,
            fmt::format("lm_head.weight[{}:{}]", tied[1].rows->begin, tied[1].rows->end));
  EXPECT_EQ(layers_with_whole_head(make_decoder(config)), 6);
  EXPECT_EQ(head_words(*make_decoder(config).back()), kWords);
}

}  // namespace
}  // namespace dynmo::model
