// SPDX-License-Identifier: Apache-2.0
// Our own products of fp32 against libtorch's of fp64, and that an element's bits depend on its row
// and column alone.
#include "dynmo/kernels/gemm.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "dynmo/core/rng.h"
#include "dynmo/kernels/products.h"
#include "tests/model/helpers.h"

namespace dynmo::kernels {
namespace {

using at::Tensor;
using model::testing::random_tensor;
using model::testing::same_bits;

class OwnProducts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!gemm::is_possible()) GTEST_SKIP() << "a processor without AVX-512";
  }
  void TearDown() override { at::set_num_threads(1); }
};

// A matrix inside a larger one, by rows or by columns.
Tensor matrix_in_a_larger_one(Rng& rng, std::int64_t rows, std::int64_t columns, bool transposed) {
  const auto room = static_cast<std::int64_t>(rng.below(5));
  const Tensor all = transposed
                         ? random_tensor({columns, rows + room}, rng.below(1000), at::kFloat)
                         : random_tensor({rows, columns + room}, rng.below(1000), at::kFloat);
  return transposed ? all.narrow(1, 0, rows).t() : all.narrow(1, 0, columns);
}

std::int64_t size(Rng& rng, std::uint64_t below) {
  return 1 + static_cast<std::int64_t>(rng.below(rng.below(4) == 0 ? below : 40));
}

TEST_F(OwnProducts, AreThoseOfLibtorch) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Rng rng(seed);
    const std::int64_t rows = size(rng, 600);
    const std::int64_t columns = size(rng, 200);
    const std::int64_t depth = size(rng, 1000);
    const Tensor a = matrix_in_a_larger_one(rng, rows, depth, rng.below(2) == 0);
    const Tensor b = matrix_in_a_larger_one(rng, depth, columns, rng.below(2) == 0);
    const Tensor before = matrix_in_a_larger_one(rng, rows, columns, false);
    const bool adds = rng.below(2) == 0;
    const Tensor c = before.clone();
    own_product(c, a, b, adds ? gemm::Result::kAddTo : gemm::Result::kSet);
    Tensor wanted = at::mm(a.to(at::kDouble), b.to(at::kDouble));
    if (adds) wanted = wanted + before;
    const double error = (c - wanted).abs().max().item<double>();
    ASSERT_LT(error, 1e-6 * (10 + static_cast<double>(depth)))
        << rows << " x " << columns << ", depth " << depth << ", seed " << seed;
  }
}

TEST_F(OwnProducts, OfNothingAreZeroOrNothing) {
  const Tensor c = at::ones({3, 5});
  own_product(c, at::empty({3, 0}), at::empty({0, 5}), gemm::Result::kAddTo);
  EXPECT_TRUE(at::equal(c, at::ones({3, 5})));
  own_product(c, at::empty({3, 0}), at::empty({0, 5}), gemm::Result::kSet);
  EXPECT_TRUE(at::equal(c, at::zeros({3, 5})));
  own_product(at::empty({0, 5}), at::empty({0, 4}), at::empty({4, 5}), gemm::Result::kSet);
}

TEST_F(OwnProducts, GiveAnElementTheSameBitsInAnyPartAndByAnyThreads) {
  for (const auto& [rows, columns] : {std::pair{700, 150}, std::pair{90, 700}}) {
    const Tensor a = random_tensor({rows, 650}, 1, at::kFloat);
    const Tensor b = random_tensor({650, columns}, 2, at::kFloat);
    const Tensor whole = at::empty({rows, columns});
    at::set_num_threads(1);
    own_product(whole, a, b, gemm::Result::kSet);
    for (const int threads : {2, 3, 5}) {
      at::set_num_threads(threads);
      const Tensor c = at::empty({rows, columns});
      own_product(c, a, b, gemm::Result::kSet);
      EXPECT_TRUE(same_bits(c, whole)) << threads << " threads";
    }
    Rng rng(3);
    for (int i = 0; i < 20; ++i) {
      const auto row = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(rows - 30)));
      const auto count = 1 + static_cast<std::int64_t>(rng.below(30));
      const Tensor c = at::empty({count, columns});
      own_product(c, a.narrow(0, row, count), b, gemm::Result::kSet);
      EXPECT_TRUE(same_bits(c, whole.narrow(0, row, count))) << count << " rows from " << row;
      const Tensor one = at::empty({rows, 1});
      own_product(one, a, b.narrow(1, i, 1), gemm::Result::kSet);
      EXPECT_TRUE(same_bits(one, whole.narrow(1, i, 1))) << "column " << i;
    }
  }
}

}  // namespace
}  // namespace dynmo::kernels
