// SPDX-License-Identifier: Apache-2.0
// The products of a pruned matrix against those of the masked matrix in fp64, over random shapes
// and densities, with every instruction set that the processor has.
#include "dynmo/kernels/sparse_products.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/cost/product_fit.h"
#include "tests/model/helpers.h"

namespace dynmo::kernels::sparse {
namespace {

using model::testing::random_tensor;
using model::testing::same_bits;

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets = {InstructionSet::kAny};
  if (instruction_set() >= InstructionSet::kAvx2) sets.push_back(InstructionSet::kAvx2);
  if (instruction_set() >= InstructionSet::kAvx512) sets.push_back(InstructionSet::kAvx512);
  return sets;
}

// A pruned matrix and activations. Sizes lie on both sides of blocks, groups and tiles.
struct Case {
  Case(std::uint64_t seed, at::ScalarType type) : Case(seed, type, Rng(seed)) {}
  // Makes a case of the given shape.
  Case(std::uint64_t seed, at::ScalarType type, std::int64_t rows, std::int64_t columns,
       std::int64_t tokens, double density)
      : mask_OI(at::zeros({rows, columns}, at::kBool)) {
    Rng rng(mix_key({seed, 1}));
    bool* mask = mask_OI.data_ptr<bool>();
    for (std::int64_t i = 0; i < rows * columns; ++i) mask[i] = rng.uniform() < density;
    if (density < 1 && rows > 2) mask_OI[rows / 2].zero_();
    if (density < 1 && columns > 2) mask_OI.select(1, columns / 3).zero_();
    pattern = make_pattern(mask_OI);
    weight_OI = random_tensor({rows, columns}, mix_key({seed, 2}), type) * mask_OI;
    values = weight_OI.masked_select(mask_OI);
    x_NI = random_tensor({tokens, columns}, mix_key({seed, 3}), type);
    dy_NO = random_tensor({tokens, rows}, mix_key({seed, 4}), type);
    sum_NI = random_tensor({tokens, columns}, mix_key({seed, 5}), type);
    gradient = random_tensor({pattern->kept()}, mix_key({seed, 6}), type);
  }

  at::Tensor mask_OI;
  std::shared_ptr<const Pattern> pattern;
  at::Tensor weight_OI;
  at::Tensor values;
  at::Tensor x_NI;
  at::Tensor dy_NO;
  at::Tensor sum_NI;
  at::Tensor gradient;

 private:
  Case(std::uint64_t seed, at::ScalarType type, Rng rng)
      : Case(seed, type, 1 + size(rng, 3 * kBlock), 1 + size(rng, 3 * kBlock), size(rng, 200),
             density(rng)) {}
  static std::int64_t size(Rng& rng, std::int64_t bound) {
    return static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(bound)));
  }
  static double density(Rng& rng) {
    constexpr double kDensities[] = {0, 0.02, 0.1, 0.35, 0.7, 1};
    return kDensities[rng.below(6)];
  }
};

struct Results {
  at::Tensor y_NO;
  at::Tensor dx_NI;
  at::Tensor sum_NI;
  at::Tensor gradient;
};
Results results(const Case& c, InstructionSet set) {
  Results r{times(*c.pattern, c.values, c.x_NI, set),
            times_transposed(*c.pattern, c.values, c.dy_NO, set), c.sum_NI.clone(),
            c.gradient.clone()};
  add_times_transposed(r.sum_NI, *c.pattern, c.values, c.dy_NO, set);
  add_product(*c.pattern, r.gradient, c.dy_NO, c.x_NI, set);
  return r;
}

// Largest distance between elements that are sums of products of normal numbers.
double difference(const at::Tensor& actual, const at::Tensor& exact) {
  EXPECT_EQ(actual.sizes(), exact.sizes());
  if (actual.numel() == 0) return 0;
  return (actual.to(at::kDouble) - exact).abs().max().item<double>();
}

void expect_exact(const Case& c, double tolerance) {
  const at::Tensor weight = c.weight_OI.to(at::kDouble);
  const at::Tensor x = c.x_NI.to(at::kDouble);
  const at::Tensor dy = c.dy_NO.to(at::kDouble);
  const at::Tensor y = at::mm(x, weight.t());
  const at::Tensor dx = at::mm(dy, weight);
  const at::Tensor gradient =
      at::mm(dy.t(), x).masked_select(c.mask_OI) + c.gradient.to(at::kDouble);
  for (const InstructionSet set : instruction_sets()) {
    SCOPED_TRACE(static_cast<int>(set));
    const Results r = results(c, set);
    EXPECT_LT(difference(r.y_NO, y), tolerance);
    EXPECT_LT(difference(r.dx_NI, dx), tolerance);
    EXPECT_LT(difference(r.sum_NI, c.sum_NI.to(at::kDouble) + dx), tolerance);
    EXPECT_LT(difference(r.gradient, gradient), tolerance);
  }
}

TEST(SparseProducts, AreThoseOfTheMaskedMatrix) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    expect_exact(Case(seed, at::kDouble), 1e-12);
    // Sums of up to 384 products of size 1, of about 20 in size: a hundred units of their last bit.
    expect_exact(Case(seed, at::kFloat), 2e-4);
  }
}

TEST(SparseProducts, TakeMatricesOfSeveralGroupsOfRows) {
  expect_exact(Case(1, at::kDouble, 2 * kGroup + 3, 131, 70, 0.1), 1e-12);
  expect_exact(Case(2, at::kDouble, 131, 2 * kGroup + 3, 70, 0.1), 1e-12);
}

TEST(SparseProducts, TakeEmptyMatricesAndNoTokens) {
  expect_exact(Case(1, at::kFloat, 5, 7, 0, 0.5), 1e-12);
  expect_exact(Case(2, at::kFloat, 5, 7, 9, 0), 1e-12);
  expect_exact(Case(3, at::kFloat, 0, 7, 9, 0.5), 1e-12);
  expect_exact(Case(4, at::kFloat, 5, 0, 9, 0.5), 1e-12);
}

TEST(SparseProducts, TakeRowsThatLieApart) {
  Case c(7, at::kDouble, 40, 50, 33, 0.3);
  c.x_NI = random_tensor({33, 61}, 8).narrow(1, 3, 50);
  c.dy_NO = random_tensor({40, 33}, 9).t();
  expect_exact(c, 1e-12);
}

TEST(SparseProducts, HaveTheSameBitsWithAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    SCOPED_TRACE(seed);
    const Case c(seed, at::kFloat, 300 + 141 * static_cast<std::int64_t>(seed), 700, 150, 0.1);
    at::set_num_threads(1);
    const Results one = results(c, instruction_set());
    for (const int count : {2, 3}) {
      at::set_num_threads(count);
      const Results more = results(c, instruction_set());
      EXPECT_TRUE(same_bits(one.y_NO, more.y_NO)) << count;
      EXPECT_TRUE(same_bits(one.dx_NI, more.dx_NI)) << count;
      EXPECT_TRUE(same_bits(one.sum_NI, more.sum_NI)) << count;
      EXPECT_TRUE(same_bits(one.gradient, more.gradient)) << count;
    }
  }
  at::set_num_threads(threads);
}

TEST(SparsePattern, KeepsWhatItWasMadeFrom) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    const Case c(seed, at::kFloat);
    const at::Tensor expected = c.mask_OI.flatten().nonzero().flatten();
    const std::vector<std::int64_t> offsets = c.pattern->offsets();
    ASSERT_EQ(c.pattern->kept(), expected.numel());
    EXPECT_TRUE(std::equal(offsets.begin(), offsets.end(), expected.data_ptr<std::int64_t>()));
    EXPECT_DOUBLE_EQ(c.pattern->density(), static_cast<double>(expected.numel()) /
                                               static_cast<double>(c.mask_OI.numel()));
  }
}

// Rows in blocks of 128 columns, and columns in blocks of 128 rows, that have a weight.
std::int64_t segments_of(const at::Tensor& mask_OI) {
  std::int64_t segments = 0;
  for (const std::int64_t along : {0, 1}) {
    const std::int64_t across = 1 - along;
    for (std::int64_t begin = 0; begin < mask_OI.size(across); begin += 128) {
      const std::int64_t count = std::min<std::int64_t>(128, mask_OI.size(across) - begin);
      segments += mask_OI.narrow(across, begin, count).any(across).sum().item<std::int64_t>();
    }
  }
  return segments;
}

TEST(SparsePattern, HasASegmentWhereARowOrAColumnHasAWeightInABlock) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Case c(seed, at::kFloat);
    EXPECT_EQ(c.pattern->segments(), segments_of(c.mask_OI)) << "seed " << seed;
  }
  for (const double density : {0.0, 0.001, 0.01, 1.0}) {
    const Case c(7, at::kFloat, 1100, 300, 0, density);
    EXPECT_EQ(c.pattern->segments(), segments_of(c.mask_OI)) << "density " << density;
  }
  EXPECT_EQ(Case(7, at::kFloat, 1100, 300, 0, 1).pattern->segments(),
            cost::all_segments(1100, 300));
}

TEST(SparsePattern, TakesTenBytesAWeightAndLittleMore) {
  const Case c(1, at::kFloat, 1024, 1024, 0, 0.1);
  EXPECT_GE(c.pattern->bytes().value, 10 * c.pattern->kept());
  EXPECT_LE(c.pattern->bytes().value, 11 * c.pattern->kept());
}

TEST(SparsePattern, RefusesOffsetsThatDoNotAscendOrLieOutside) {
  EXPECT_ANY_THROW(static_cast<void>(make_pattern(2, 3, std::vector<std::int32_t>{1, 1})));
  EXPECT_ANY_THROW(static_cast<void>(make_pattern(2, 3, std::vector<std::int32_t>{6})));
  EXPECT_ANY_THROW(static_cast<void>(make_pattern(2, 3, std::vector<std::int32_t>{-1})));
}

TEST(SparseProducts, RefuseWhatDoesNotFit) {
  const Case c(1, at::kFloat, 4, 6, 5, 0.5);
  EXPECT_ANY_THROW(static_cast<void>(times(*c.pattern, c.values, c.dy_NO)));
  EXPECT_ANY_THROW(static_cast<void>(times_transposed(*c.pattern, c.values, c.x_NI)));
  EXPECT_ANY_THROW(static_cast<void>(times(*c.pattern, c.values.to(at::kDouble), c.x_NI)));
  EXPECT_ANY_THROW(static_cast<void>(times(*c.pattern, at::zeros({1}), c.x_NI)));
}

}  // namespace
}  // namespace dynmo::kernels::sparse
