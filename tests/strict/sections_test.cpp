// SPDX-License-Identifier: Apache-2.0
// Attention within buckets and grouped products on the strict device, by the operators that CUDA
// has: numbers are those of the CPU, and nothing waits.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/sparse_attention/training/pattern.h"
#include "dynmo/kernels/generic_selection.h"
#include "dynmo/kernels/grouped_products.h"
#include "dynmo/kernels/selected_attention.h"
#include "tests/model/helpers.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::kernels {
namespace {

using at::Tensor;
using model::testing::random_tensor;

double distance_in_largest(const Tensor& device, const Tensor& cpu) {
  const Tensor exact = cpu.to(at::kDouble);
  return (device.to(at::kCPU).to(at::kDouble) - exact).abs().max().item<double>() /
         std::max(1e-30, exact.abs().max().item<double>());
}

// The host's work ends before the device's begins.
class LateMode {
 public:
  LateMode() : before_(strict::mode()) { strict::set_mode(strict::Mode::kLate); }
  ~LateMode() { strict::set_mode(before_); }
  LateMode(const LateMode&) = delete;
  LateMode& operator=(const LateMode&) = delete;

 private:
  strict::Mode before_;
};

struct Shape {
  std::int64_t sequences, tokens, heads, key_heads, size, buckets;
};

// Draws what the layers would give, with a query of norm 0.
struct Drawn {
  Drawn(const Shape& s, at::ScalarType type)
      : q(random_tensor({s.sequences, s.tokens, 2, s.heads, s.size}, 1, type).select(2, 1)),
        v(random_tensor({s.sequences, s.tokens, s.key_heads, s.size}, 2, type)),
        slope(random_tensor({s.sequences, s.tokens, s.heads, s.size}, 3, type)) {
    if (s.tokens > 3) q.select(1, 3).zero_();
  }
  Tensor q, v, slope;
};

void expect_attention_of_the_cpu(const Shape& shape, at::ScalarType type) {
  const double tolerance = type == at::kFloat ? 1e-5 : 1.0 / 50;
  const at::Device device = strict::open(0);
  const Drawn x(shape, type);
  const auto pattern = dynamism::make_pattern({.buckets = static_cast<int>(shape.buckets)});
  const model::LayerState state;
  const Selection ragged = pattern->select(x.q, state, {});
  const Attention expected = selected_attention(x.q, {}, x.v, ragged);
  const AttentionGradient expected_gradient =
      selected_attention_gradient(x.slope, x.q, {}, x.v, expected, ragged);

  const Tensor q = x.q.to(device);
  const Tensor v = x.v.to(device);
  const Tensor slope = x.slope.to(device);
  Selection packed;
  Attention attention;
  AttentionGradient gradient;
  {
    const strict::NoWait none;
    packed = pattern->select(q, state, {});
    attention = selected_attention(q, {}, v, packed);
    gradient = selected_attention_gradient(slope, q, {}, v, attention, packed);
  }
  const auto where =
      fmt::format("{}, {} tokens, {} buckets", at::toString(type), shape.tokens, shape.buckets);
  ASSERT_TRUE(packed.packed()) << where;
  EXPECT_EQ(pairs_of(q, packed), pairs_of(x.q, ragged)) << where;
  EXPECT_LT(distance_in_largest(attention.out_BTHK, expected.out_BTHK), tolerance) << where;
  EXPECT_LT(distance_in_largest(gradient.v_BTHK, expected_gradient.v_BTHK), tolerance) << where;
  // Through a key of norm 0 comes 1e6 times the gradient.
  const auto part = [&](const Tensor& gradient_BTHK, std::int64_t first, std::int64_t count) {
    return gradient_BTHK.narrow(1, first, count);
  };
  if (shape.tokens <= 4) return;
  for (const auto& [first, count] :
       {std::pair<std::int64_t, std::int64_t>{0, 3}, {3, 1}, {4, shape.tokens - 4}}) {
    EXPECT_LT(distance_in_largest(part(gradient.q_BTHK, first, count),
                                  part(expected_gradient.q_BTHK, first, count)),
              tolerance)
        << where << ", tokens from " << first;
  }
}

TEST(SectionsOnStrictDevice, AttendAsOnTheCpuWithoutAWait) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t tokens : {1, 2, 67}) {
      for (const std::int64_t buckets : {2, 4, 64}) {
        expect_attention_of_the_cpu({2, tokens, 4, 2, 8, buckets}, type);
      }
    }
    expect_attention_of_the_cpu({1, 130, 2, 1, 64, 8}, type);
  }
}

TEST(SectionsOnStrictDevice, AttendAsOnTheCpuWhenTheDeviceRunsLate) {
  static_cast<void>(strict::open(0));
  const LateMode late;
  expect_attention_of_the_cpu({2, 67, 4, 2, 8, 4}, at::kFloat);
  expect_attention_of_the_cpu({2, 67, 4, 2, 8, 4}, at::kBFloat16);
}

TEST(SectionsOnStrictDevice, ArePaddedWhereNoOperatorTakesThem) {
  const at::Device device = strict::open(0);
  const auto queries = [&](std::int64_t size, at::ScalarType type) {
    return at::zeros({1, 6, 2, size}, at::TensorOptions().device(device).dtype(type));
  };
  EXPECT_TRUE(generic::can_pack(queries(8, at::kFloat), 4));
  EXPECT_TRUE(generic::can_pack(queries(128, at::kBFloat16), 4));
  EXPECT_FALSE(generic::can_pack(queries(4, at::kFloat), 4));
  EXPECT_FALSE(generic::can_pack(queries(136, at::kBFloat16), 4));
  EXPECT_FALSE(generic::can_pack(queries(8, at::kDouble), 4));
  EXPECT_TRUE(generic::can_pack(queries(8, at::kFloat), 32767));
  EXPECT_FALSE(generic::can_pack(queries(8, at::kFloat), 32768)) << "sections of a grid";
}

// Products and gradients of each form, and that the form is what CUDA takes without a wait.
TEST(GroupsOnStrictDevice, MultiplyAsOnTheCpuWithoutAWait) {
  const at::Device device = strict::open(0);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const GroupForm form =
        group_form(at::empty({1}, at::TensorOptions().device(device).dtype(type)), {16, 8});
    EXPECT_EQ(form, type == at::kBFloat16 ? GroupForm::kOperator : GroupForm::kBlocks);
    for (const auto& starts :
         {std::vector<std::int64_t>{0, 0, 30, 37, 90}, {0, 100, 100, 100, 100}, {0, 1, 2, 3, 3}}) {
      Tensor x = random_tensor({100, 8}, 1, type);
      Tensor dy = random_tensor({100, 16}, 2, type);
      const Tensor w = random_tensor({4, 16, 8}, 3, type);
      const Tensor there = at::tensor(starts).to(device);
      const Tensor x_there = x.to(device);
      const Tensor dy_there = dy.to(device);
      const Tensor w_there = w.to(device);
      Tensor y, dx, sums;
      {
        const strict::NoWait none;
        const RowGroups groups = group_rows(there, 100, form);
        y = grouped_times(groups, x_there, w_there);
        dx = grouped_times_transposed(groups, dy_there, w_there);
        sums = grouped_gradient(groups, dy_there, x_there);
      }
      const double tolerance = type == at::kFloat ? 1e-5 : 1.0 / 50;
      for (std::size_t g = 0; g + 1 < starts.size(); ++g) {
        const std::int64_t count = starts[g + 1] - starts[g];
        const Tensor x_g = x.narrow(0, starts[g], count).to(at::kDouble);
        const Tensor dy_g = dy.narrow(0, starts[g], count).to(at::kDouble);
        const Tensor w_g = w[static_cast<std::int64_t>(g)].to(at::kDouble);
        const Tensor sum = sums[static_cast<std::int64_t>(g)];
        if (count == 0) {
          EXPECT_EQ(sum.abs().max().item<double>(), 0);
          continue;
        }
        EXPECT_LT(distance_in_largest(y.narrow(0, starts[g], count), at::mm(x_g, w_g.t())),
                  tolerance);
        EXPECT_LT(distance_in_largest(dx.narrow(0, starts[g], count), at::mm(dy_g, w_g)),
                  tolerance);
        EXPECT_LT(distance_in_largest(sum, at::mm(dy_g.t(), x_g)), tolerance);
      }
    }
  }
}

// libtorch reads the ends of groups on the host for all but bf16. So they are multiplied in blocks.
TEST(GroupsOnStrictDevice, OfFp32WaitInLibtorchsOperator) {
  const at::Device device = strict::open(0);
  const Tensor x = at::ones({8, 8}, device);
  const Tensor w = at::ones({1, 8, 8}, device);
  const Tensor ends = at::full({1}, 8, at::TensorOptions().device(device).dtype(at::kInt));
  strict::take_waits();
  EXPECT_EQ(at::_grouped_mm(x, w, ends).sum().item<double>(), 512);
  EXPECT_EQ(strict::take_waits(), (std::map<std::string, std::int64_t>{
                                      {"aten::copy_", 1}, {"aten::_local_scalar_dense", 1}}));
}

}  // namespace
}  // namespace dynmo::kernels
