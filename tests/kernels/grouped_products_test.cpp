// SPDX-License-Identifier: Apache-2.0
// Products of grouped rows against those of each group.
#include "dynmo/kernels/grouped_products.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "dynmo/core/rng.h"
#include "tests/model/helpers.h"

namespace dynmo::kernels {
namespace {

using model::testing::random_tensor;

// Draws where groups start. Some are empty, one may have most rows, and rows may lie behind all.
std::vector<std::int64_t> random_starts(Rng& rng, std::int64_t groups, std::int64_t rows) {
  std::vector<std::int64_t> starts = {0};
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t left = rows - starts.back();
    const auto drawn = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(left) + 1));
    starts.push_back(starts.back() + (rng.uniform() < 0.3 ? 0 : drawn));
  }
  if (rng.uniform() < 0.5) starts.back() = rows;
  return starts;
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                  const std::string& where) {
  const at::Tensor exact = expected.to(at::kDouble);
  EXPECT_TRUE(at::allclose(actual.to(at::kDouble), exact, tolerance, tolerance))
      << where << ": " << (actual.to(at::kDouble) - exact).abs().max();
}

TEST(GroupedProducts, AreThoseOfEachGroup) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x47524F, seed}));
    const auto groups = static_cast<std::int64_t>(1 + rng.below(9));
    const auto rows = static_cast<std::int64_t>(1 + rng.below(150));
    const std::vector<std::int64_t> starts = random_starts(rng, groups, rows);
    const at::ScalarType type = seed % 3 == 0 ? at::kBFloat16 : at::kDouble;
    const double tolerance = type == at::kBFloat16 ? 0.1 : 1e-12;
    at::Tensor x_RI = random_tensor({rows, 8}, seed, type);
    at::Tensor dy_RO = random_tensor({rows, 16}, seed + 1, type);
    const at::Tensor w_GOI = random_tensor({groups, 16, 8}, seed + 2, type);
    // Rows behind the groups change nothing.
    x_RI.narrow(0, starts.back(), rows - starts.back()).fill_(NAN);
    dy_RO.narrow(0, starts.back(), rows - starts.back()).fill_(NAN);
    for (const GroupForm form : {GroupForm::kBlocks, GroupForm::kOperator}) {
      // The operator's one on the CPU takes no fp64.
      if (form == GroupForm::kOperator && type != at::kBFloat16) continue;
      const RowGroups made = group_rows(at::tensor(starts), rows, form);
      const at::Tensor y_RO = grouped_times(made, x_RI, w_GOI);
      const at::Tensor dx_RI = grouped_times_transposed(made, dy_RO, w_GOI);
      const at::Tensor gradient_GOI = grouped_gradient(made, dy_RO, x_RI);
      for (std::int64_t g = 0; g < groups; ++g) {
        const std::int64_t first = starts[static_cast<std::size_t>(g)];
        const std::int64_t count = starts[static_cast<std::size_t>(g) + 1] - first;
        const auto where = fmt::format("seed {}, group {} of {} rows, form {}", seed, g, count,
                                       static_cast<int>(form));
        const at::Tensor x = x_RI.narrow(0, first, count).to(at::kDouble);
        const at::Tensor dy = dy_RO.narrow(0, first, count).to(at::kDouble);
        const at::Tensor w = w_GOI.select(0, g).to(at::kDouble);
        expect_close(y_RO.narrow(0, first, count), at::mm(x, w.t()), tolerance, where);
        expect_close(dx_RI.narrow(0, first, count), at::mm(dy, w), tolerance, where);
        expect_close(gradient_GOI.select(0, g), at::mm(dy.t(), x), tolerance * 2, where);
      }
      if (HasFailure()) return;
    }
  }
}

// So time and memory are bounded, however the rows are spread.
TEST(GroupedProducts, TakeAtMostThreeBlocksAGroup) {
  for (const std::int64_t groups : {1, 2, 8, 64}) {
    for (const std::int64_t rows : {1, 7, 100, 4096}) {
      at::Tensor starts = at::full({groups + 1}, rows, at::kLong);
      starts[0] = 0;
      const RowGroups made = group_rows(starts, rows, GroupForm::kBlocks);
      EXPECT_LE(made.group_of_Q.numel(), 3 * groups);
      EXPECT_EQ(made.rows_P.numel(), made.group_of_Q.numel() * made.block);
      EXPECT_LE(made.rows_P.numel(), rows + groups * made.block);
    }
  }
}

TEST(GroupedProducts, OnTheCpuAreInBlocks) {
  EXPECT_EQ(group_form(at::empty({4, 8}, at::kBFloat16), {8, 16}), GroupForm::kBlocks);
}

}  // namespace
}  // namespace dynmo::kernels
