// SPDX-License-Identifier: Apache-2.0
// Sparse attention: what its patterns choose, that layers do on it what the formula with a mask
// does, and what a run says of it.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "dynmo/dynamism/sparse_attention/load.h"
#include "dynmo/dynamism/sparse_attention/training/pattern.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/kernels/attention_impl.h"
#include "tests/model/gradients.h"
#include "tests/model/helpers.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

using dynamism::SparseAttentionOptions;
using dynamism::SparseRule;
using kernels::Selection;
using model::testing::random_tensor;

const std::vector<SparseAttentionOptions> kPatterns = {{.buckets = 1},
                                                       {.buckets = 4},
                                                       {.buckets = 16},
                                                       {.rule = SparseRule::kDrop, .dropped = 0},
                                                       {.rule = SparseRule::kDrop, .dropped = 0.5},
                                                       {.rule = SparseRule::kDrop, .dropped = 0.9}};

model::LayerState state_of(int layer, std::uint64_t key) {
  model::LayerState state;
  state.id = LayerId(layer);
  state.random_key = key;
  return state;
}

std::vector<std::int64_t> numbers(const at::Tensor& x) {
  return {x.const_data_ptr<std::int64_t>(), x.const_data_ptr<std::int64_t>() + x.numel()};
}

// [B, H, T, T]: whether a query sees a key.
at::Tensor seen_of(const kernels::Selection& selection, std::int64_t sequences, std::int64_t tokens,
                   std::int64_t heads) {
  at::Tensor seen = at::zeros({sequences, heads, tokens, tokens}, at::kBool);
  const auto queries = numbers(selection.queries);
  const auto keys = numbers(selection.keys);
  const auto query_offsets = numbers(selection.query_offsets);
  const auto key_offsets = numbers(selection.key_offsets);
  for (std::size_t s = 0; s + 1 < query_offsets.size(); ++s) {
    for (auto i = query_offsets[s]; i < query_offsets[s + 1]; ++i) {
      for (auto j = key_offsets[s]; j < key_offsets[s + 1]; ++j) {
        const std::int64_t query = queries[static_cast<std::size_t>(i)];
        const std::int64_t key = keys[static_cast<std::size_t>(j)];
        EXPECT_EQ(query % heads, key % heads);
        EXPECT_EQ(query / heads / tokens, key / heads / tokens);
        const std::int64_t t = query / heads % tokens;
        const std::int64_t u = key / heads % tokens;
        const bool sees = selection.mask == kernels::Mask::kStrict ? u < t : u <= t;
        if (!sees) continue;
        const std::int64_t head = query / heads / tokens * heads + query % heads;
        seen.data_ptr<bool>()[(head * tokens + t) * tokens + u] = true;
      }
    }
  }
  return seen;
}

at::Tensor masked_formula(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& seen) {
  const auto heads = [&](const at::Tensor& x) {
    return x.repeat_interleave(q.size(2) / x.size(2), 2).transpose(1, 2);
  };
  const at::Tensor scores = q.transpose(1, 2).matmul(heads(k).transpose(2, 3)) /
                            std::sqrt(static_cast<double>(q.size(3)));
  const at::Tensor weights = at::where(seen, scores.exp(), at::zeros({}, at::kDouble));
  const at::Tensor sums = weights.sum(-1, true);
  return (weights / at::where(sums == 0, at::ones({}, at::kDouble), sums))
      .matmul(heads(v))
      .transpose(1, 2);
}

TEST(SparsePatterns, ChooseForATextWhatTheyChooseForALongerOne) {
  for (const SparseAttentionOptions& options : kPatterns) {
    const auto pattern = dynamism::make_pattern(options);
    const at::Tensor q = random_tensor({2, 40, 3, 8}, 5, at::kFloat);
    const model::LayerContext now{.step = 7, .micro_batch = MicroBatchId(2)};
    const model::LayerState state = state_of(3, 11);
    const at::Tensor whole = seen_of(pattern->select(q, state, now), 2, 40, 3);
    for (const std::int64_t tokens : {1, 13, 39}) {
      const at::Tensor part =
          seen_of(pattern->select(q.narrow(1, 0, tokens), state, now), 2, tokens, 3);
      EXPECT_TRUE(part.equal(whole.narrow(2, 0, tokens).narrow(3, 0, tokens)))
          << tokens << " tokens, " << options.buckets << " buckets";
    }
  }
}

TEST(SparsePatterns, AreOtherOnesForEveryLayerStepAndMicroBatchInTrainingAlone) {
  const auto pattern = dynamism::make_pattern({.buckets = 8});
  const at::Tensor q = random_tensor({1, 64, 2, 8}, 5, at::kFloat);
  const auto rows = [&](model::Pass pass, int layer, std::int64_t step, int micro_batch) {
    const model::LayerContext now{
        .step = step, .micro_batch = MicroBatchId(micro_batch), .pass = pass};
    return numbers(
        pattern->select(q, state_of(layer, static_cast<std::uint64_t>(layer)), now).queries);
  };
  const auto training = rows(model::Pass::kTraining, 1, 4, 2);
  EXPECT_EQ(rows(model::Pass::kTraining, 1, 4, 2), training);
  EXPECT_NE(rows(model::Pass::kTraining, 3, 4, 2), training);
  EXPECT_NE(rows(model::Pass::kTraining, 1, 5, 2), training);
  EXPECT_NE(rows(model::Pass::kTraining, 1, 4, 3), training);
  const auto validation = rows(model::Pass::kValidation, 1, 4, 2);
  EXPECT_EQ(rows(model::Pass::kGeneration, 1, 0, 0), validation);
  EXPECT_EQ(rows(model::Pass::kValidation, 1, 9, 3), validation);
  EXPECT_NE(rows(model::Pass::kValidation, 3, 4, 2), validation);
}

TEST(SparsePatterns, PutEveryTokenIntoOneBucketOfItsLikes) {
  constexpr std::int64_t kTokens = 200;
  const at::Tensor q = random_tensor({2, kTokens, 3, 16}, 6);
  const kernels::Selection selection =
      dynamism::make_pattern({.buckets = 8})->select(q, state_of(1, 1), {});
  std::vector<std::int64_t> rows = numbers(selection.queries);
  EXPECT_EQ(numbers(selection.query_offsets).size(), 2U * 3 * 8 + 1);
  const at::Tensor seen = seen_of(selection, 2, kTokens, 3);
  const std::vector<double> figures = model::pattern_figures_of(q, selection);
  EXPECT_EQ(figures[model::kPairs], seen.sum().item<double>());
  EXPECT_EQ(figures[model::kCausalPairs], 2. * 3 * kTokens * (kTokens + 1) / 2);
  EXPECT_NEAR(figures[model::kPairs] / figures[model::kCausalPairs], 1. / 8, 0.03);
  std::ranges::sort(rows);
  for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_EQ(rows[i], static_cast<std::int64_t>(i));
  // Buckets go by direction: a token lies with its multiples, and never with its opposite.
  const at::Tensor like = at::cat({q, q * 3, -q}, 1);
  const at::Tensor met = seen_of(
      dynamism::make_pattern({.buckets = 8})->select(like, state_of(1, 1), {}), 2, 3 * kTokens, 3);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    ASSERT_TRUE(met.select(2, kTokens + t).select(2, t).all().item<bool>());
    ASSERT_FALSE(met.select(2, 2 * kTokens + t).select(2, t).any().item<bool>());
  }
}

TEST(SparsePatterns, AttentionOnThemIsTheMaskedFormulaAndSoAreItsGradients) {
  for (const SparseAttentionOptions& options : kPatterns) {
    for (const std::int64_t key_heads : {1, 2, 4}) {
      const auto pattern = dynamism::make_pattern(options);
      const bool shared = pattern->shares_keys();
      std::vector<at::Tensor> leaves = {random_tensor({2, 90, 4, 6}, 1),
                                        random_tensor({2, 90, key_heads, 6}, 2),
                                        random_tensor({2, 90, key_heads, 6}, 3)};
      for (at::Tensor& leaf : leaves) leaf.set_requires_grad(true);
      const at::Tensor slope = random_tensor({2, 90, 4, 6}, 4);
      const kernels::Selection selection = pattern->select(leaves[0].detach(), state_of(1, 1), {});
      const at::Tensor norm = (leaves[0].square().sum({-1}, true) + 1e-12).sqrt();
      const at::Tensor expected = masked_formula(leaves[0], shared ? leaves[0] / norm : leaves[1],
                                                 leaves[2], seen_of(selection, 2, 90, 4));
      expected.backward(slope);
      const at::NoGradGuard no_graph;
      const at::Tensor k = shared ? at::Tensor() : leaves[1];
      const kernels::Attention attention =
          kernels::selected_attention(leaves[0], k, leaves[2], selection);
      const kernels::AttentionGradient gradient = kernels::selected_attention_gradient(
          slope, leaves[0], k, leaves[2], attention, selection);
      EXPECT_TRUE(at::allclose(attention.out_BTHK, expected, 1e-12, 1e-12));
      EXPECT_TRUE(at::allclose(gradient.q_BTHK, leaves[0].grad(), 1e-11, 1e-11));
      EXPECT_TRUE(at::allclose(gradient.v_BTHK, leaves[2].grad(), 1e-11, 1e-11));
      if (shared) {
        EXPECT_FALSE(gradient.k_BTHK.defined());
      } else {
        EXPECT_TRUE(at::allclose(gradient.k_BTHK, leaves[1].grad(), 1e-11, 1e-11));
      }
    }
  }
}

std::shared_ptr<const model::Layer> sparse_layer(const model::Model& layers,
                                                 const SparseAttentionOptions& options) {
  model::Recipe recipe = model::decoder_recipe(layers);
  EXPECT_TRUE(dynamism::make_sparse_attention_source(options)->shape(recipe));
  return recipe.slots[1].layer;
}

// Blocks that have lost heads have fewer causal pairs.
TEST(SparseAttentionSource, SharesAreOfTheCausalPairsOfEachBlock) {
  const auto layer = sparse_layer(model::make_llama(model::testing::tiny_config()), {});
  const model::Model model = {layer, layer};
  std::vector<std::vector<double>> figures(2, std::vector<double>(layer->figures().size()));
  figures[0][model::kPairs] = 10;
  figures[0][model::kCausalPairs] = 20;
  figures[1][model::kPairs] = 2;
  figures[1][model::kCausalPairs] = 8;
  const auto source = dynamism::make_sparse_attention_source({});
  model::LayerStates states;
  ASSERT_TRUE(source->after_update({.step = 1, .model = model, .states = states},
                                   {.figures = figures, .squared_norms = {}}));
  EXPECT_EQ(source->figures(), (Json{{"pairs", {10.0, 2.0}}, {"share", 0.375}}));
  EXPECT_EQ(source->progress(), "pairs 37.5 % (25.0 to 50.0)");
}

// At a selection that stays: hashes of the inputs on either side of a step are the same.
TEST(SparseAttentionLayers, HaveTheGradientsOfCentralDifferences) {
  for (const bool gpt2 : {false, true}) {
    for (const SparseAttentionOptions& options : kPatterns) {
      const auto layer =
          gpt2 ? sparse_layer(model::make_gpt2(model::testing::tiny_gpt2()), options)
               : sparse_layer(model::make_llama(model::testing::tiny_config()), options);
      model::LayerState state = model::testing::double_state(*layer, LayerId(1), 5);
      const at::Tensor input = random_tensor({3, 10, 24}, 21);
      const at::Tensor weight = random_tensor({3, 10, 24}, 31);
      const model::testing::Gradients gradients =
          model::testing::by_three_calls(*layer, state, input, {}, weight);
      const auto loss = [&] {
        return (layer->forward(state, input, {}, nullptr).hidden.x * weight).sum().item<double>();
      };
      std::vector<at::Tensor> moved = {input};
      std::vector<at::Tensor> slopes = {gradients.input};
      for (std::size_t p = 0; p < state.parameters.size(); ++p) {
        moved.push_back(state.parameters[p].value);
        slopes.push_back(gradients.parameters[p]);
      }
      for (std::size_t i = 0; i < moved.size(); ++i) {
        const at::Tensor direction = random_tensor(moved[i].sizes(), 100 + i);
        constexpr double kStep = 1e-6;
        moved[i].add_(direction, kStep);
        const double above = loss();
        moved[i].add_(direction, -2 * kStep);
        const double below = loss();
        moved[i].add_(direction, kStep);
        const double slope = (slopes[i] * direction).sum().item<double>();
        EXPECT_NEAR((above - below) / (2 * kStep), slope, 1e-5 * std::max(1.0, std::abs(slope)))
            << (gpt2 ? "gpt2" : "llama") << ", " << options.buckets << " buckets, tensor " << i;
      }
    }
  }
}

struct HeadGroups {
  std::int64_t heads;
  std::int64_t key_heads;
};
constexpr HeadGroups kHeadGroups[] = {{1, 1}, {4, 4}, {4, 2}, {4, 1}, {6, 2}, {6, 3}, {8, 1}};

// Several blocks of the kernel, whole ones and a rest, so that a group's sums have many terms.
TEST(SparsePatterns, OfNothingDroppedHaveTheBitsOfDenseAttentionForEveryGroupOfHeads) {
  const auto pattern = dynamism::make_pattern({.rule = SparseRule::kDrop, .dropped = 0});
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    if (kernels::product_type(type) != type) continue;
    for (const auto [heads, key_heads] : kHeadGroups) {
      for (const std::int64_t tokens : {1, 12, 64, 200}) {
        const at::Tensor q = random_tensor({2, tokens, heads, 16}, 1, type);
        const at::Tensor k = random_tensor({2, tokens, key_heads, 16}, 2, type);
        const at::Tensor v = random_tensor({2, tokens, key_heads, 16}, 3, type);
        const at::Tensor slope = random_tensor({2, tokens, heads, 16}, 4, type);
        const kernels::Selection selection = pattern->select(q, state_of(1, 1), {});
        const kernels::Attention dense = kernels::causal_attention(q, k, v);
        const kernels::Attention sparse = kernels::selected_attention(q, k, v, selection);
        const kernels::AttentionGradient expected =
            kernels::causal_attention_gradient(slope, q, k, v, dense);
        const kernels::AttentionGradient gradient =
            kernels::selected_attention_gradient(slope, q, k, v, sparse, selection);
        const auto where = fmt::format("{} of {} heads of {}, {} tokens", at::toString(type), heads,
                                       key_heads, tokens);
        EXPECT_TRUE(model::testing::same_bits(sparse.out_BTHK, dense.out_BTHK)) << where;
        EXPECT_TRUE(model::testing::same_bits(gradient.q_BTHK, expected.q_BTHK)) << where;
        EXPECT_TRUE(model::testing::same_bits(gradient.k_BTHK, expected.k_BTHK)) << where;
        EXPECT_TRUE(model::testing::same_bits(gradient.v_BTHK, expected.v_BTHK)) << where;
      }
    }
  }
}

TEST(SparseAttentionLayers, OfNothingDroppedAreDenseOnes) {
  for (const auto [heads, key_heads] : kHeadGroups) {
    model::LlamaConfig config = small_model();
    config.shape.hidden = 16 * static_cast<int>(heads);
    config.shape.heads = static_cast<int>(heads);
    config.shape.kv_heads = static_cast<int>(key_heads);
    config.shape.sequence = 80;
    const model::Model dense = model::make_llama(config);
    const auto layer = sparse_layer(dense, {.rule = SparseRule::kDrop, .dropped = 0});
    const at::Tensor input = random_tensor({2, 80, 16 * heads}, 1, at::kFloat);
    const at::Tensor weight = random_tensor({2, 80, 16 * heads}, 2, at::kFloat);
    const auto gradients = [&](const model::Layer& of) {
      model::LayerState state = model::make_state(of, LayerId(1), 3);
      return model::testing::by_three_calls(of, state, input, {}, weight);
    };
    const model::testing::Gradients sparse = gradients(*layer);
    const model::testing::Gradients expected = gradients(*dense[1]);
    EXPECT_TRUE(model::testing::same_bits(sparse.input, expected.input));
    for (std::size_t p = 0; p < expected.parameters.size(); ++p) {
      EXPECT_TRUE(model::testing::same_bits(sparse.parameters[p], expected.parameters[p]))
          << heads << " heads of " << key_heads << ", parameter " << p;
    }
  }
}

TEST(SparseAttentionLayers, ProjectNoKeysWhereQueriesAreTheKeys) {
  const model::Model dense = model::make_llama(small_model());
  EXPECT_EQ(sparse_layer(dense, {})->parameters().size() + 1, dense[1]->parameters().size());
  EXPECT_EQ(sparse_layer(dense, {.rule = SparseRule::kDrop})->parameters().size(),
            dense[1]->parameters().size());
}

// Remembers what another pattern chose.
class RecordingPattern final : public model::AttentionPattern {
 public:
  explicit RecordingPattern(std::shared_ptr<const model::AttentionPattern> inner)
      : inner_(std::move(inner)) {}
  bool shares_keys() const override { return inner_->shares_keys(); }
  kernels::Selection select(const at::Tensor& q_BTHK, const model::LayerState& state,
                            const model::LayerContext& context) const override {
    return chosen_ = inner_->select(q_BTHK, state, context);
  }
  [[nodiscard]] const kernels::Selection& chosen() const { return chosen_; }

 private:
  std::shared_ptr<const model::AttentionPattern> inner_;
  mutable kernels::Selection chosen_;
};

// Products of the kernel, (query, key) by blocks of so many rows: a block works on the keys that
// its last row sees.
constexpr std::int64_t kKernelRows = 64;
double worked_pairs(const std::vector<std::int64_t>& offsets) {
  double pairs = 0;
  for (std::size_t s = 0; s + 1 < offsets.size(); ++s) {
    const std::int64_t rows = offsets[s + 1] - offsets[s];
    for (std::int64_t first = 0; first < rows; first += kKernelRows) {
      const std::int64_t count = std::min(kKernelRows, rows - first);
      pairs += static_cast<double>(count * (first + count));
    }
  }
  return pairs;
}

// The load model, given what a layer was measured to choose, against what its kernel works on.
TEST(SparseAttentionLoad, IsTheWorkOfEachLayerGivenItsPairs) {
  constexpr std::int64_t kTokens = 1024;
  model::LlamaConfig config = small_model();
  config.shape.blocks = 4;
  config.shape.sequence = kTokens;
  config.dropout = 0;
  config.init_std = 0.2;  // tokens that differ less from layer to layer would fill few buckets
  for (const int buckets : {2, 4, 8}) {
    model::Model layers = model::make_llama(config);
    model::Hidden hidden;
    model::LayerContext now;
    now.tokens_BT = model::testing::random_tokens(2, kTokens, 61, 3);
    for (std::size_t i = 0; i + 1 < layers.size(); ++i) {
      std::shared_ptr<RecordingPattern> pattern;
      if (const auto* takes = dynamic_cast<const model::TakesPattern*>(layers[i].get())) {
        pattern = std::make_shared<RecordingPattern>(dynamism::make_pattern({.buckets = buckets}));
        layers[i] = takes->with(pattern);
      }
      const model::LayerState state =
          model::make_state(*layers[i], LayerId(static_cast<int>(i)), 4);
      const model::Output output = layers[i]->forward(state, hidden, now, nullptr);
      hidden = output.hidden;
      if (!pattern) continue;
      const double sequences = 2. * 4;  // each head of each of two
      const double kappa =
          buckets * (2 * output.figures[model::kPairs] / sequences + kTokens) / (kTokens * kTokens);
      const double share = worked_pairs(numbers(pattern->chosen().query_offsets)) /
                           (sequences * worked_pairs({0, kTokens}));
      EXPECT_NEAR(dynamism::core_share(kappa, buckets, kKernelRows, kTokens), share, 0.2 * share)
          << "layer " << i << ", " << buckets << " buckets, kappa " << kappa;
    }
  }
}

TEST(SparseAttentionSource, RefusesAModelWithoutAttentionOfOurs) {
  model::Recipe recipe;
  const auto refused = dynamism::make_sparse_attention_source({})->shape(recipe);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
  EXPECT_NE(refused.error().message.find("sparse_attention.enabled"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::runtime::testing
