// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/training/plasticity.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/freezing/training/reference.h"
#include "dynmo/model/pruned.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

at::Tensor drawn(Rng& rng, std::vector<std::int64_t> shape, double scale) {
  at::Tensor tensor = at::empty(shape, at::kFloat);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.data_ptr<float>()[i] = static_cast<float>(scale * rng.normal());
  }
  return tensor;
}

// Row by row: within half a scale, the largest element exactly at 127 scales, zeros where zeros
// were.
TEST(Reference, IsWithinHalfAScaleOfEachWeight) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(mix_key({0x0EF, seed}));
    const auto rows = static_cast<std::int64_t>(1 + rng.below(9));
    const auto columns = static_cast<std::int64_t>(1 + rng.below(70));
    at::Tensor matrix = drawn(rng, {rows, columns}, std::exp(12 * rng.normal()));
    if (seed % 4 == 0) matrix[0].zero_();
    const dynamism::QuantizedRows quantized = dynamism::quantize_rows(matrix);
    ASSERT_EQ(quantized.values.scalar_type(), at::kChar);
    const at::Tensor back = dynamism::dequantize_rows(quantized);
    for (std::int64_t i = 0; i < rows; ++i) {
      const float* row = matrix.const_data_ptr<float>() + i * columns;
      float largest = 0;
      for (std::int64_t j = 0; j < columns; ++j) largest = std::max(largest, std::abs(row[j]));
      const double scale = double{largest} / 127;
      ASSERT_NEAR(quantized.scales[i].item<double>(), scale, 1e-6 * scale) << "seed " << seed;
      for (std::int64_t j = 0; j < columns; ++j) {
        const double read = back.const_data_ptr<float>()[i * columns + j];
        ASSERT_LE(std::abs(read - double{row[j]}), (0.5 + 1e-4) * scale) << "seed " << seed;
        if (row[j] == 0) {
          ASSERT_EQ(read, 0) << "seed " << seed;
        }
        if (std::abs(row[j]) == largest) {
          ASSERT_NEAR(read, row[j], 1e-6 * double{largest}) << "seed " << seed;
        }
      }
    }
  }
}

TEST(Reference, RunsTheLayerAsItWasWhateverHasBeenPrunedSince) {
  const model::Model plain = model::make_llama(small_model());
  const auto layer = dynamism::with_reference(plain[2]);
  EXPECT_FALSE(dynamism::has_reference(*plain[2]));
  ASSERT_TRUE(dynamism::has_reference(*layer));
  const model::LayerState before = model::make_state(*layer, LayerId(2), 5);
  for (const auto format : {model::MatrixFormat::kMasked, model::MatrixFormat::kCompressed}) {
    model::LayerState state = model::make_state(*layer, LayerId(2), 5);
    dynamism::take_reference(*layer, state);
    const auto specs = layer->parameters();
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].prunable) {
        model::prune(state.parameters[i], specs[i], std::vector<std::int32_t>{1, 7, 30}, format);
      }
      state.parameters[i].value.add_(1);
    }
    model::derive(*layer, state);
    const model::LayerState reference = dynamism::reference_of(*layer, state);
    ASSERT_EQ(reference.parameters.size(), specs.size());
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const at::Tensor& was = before.parameters[i].value;
      const at::Tensor& is = reference.parameters[i].value;
      EXPECT_TRUE(at::allclose(was, is, 0, was.abs().max().item<double>() / 253)) << specs[i].name;
      EXPECT_TRUE(specs[i].shape.size() == 2 || at::equal(was, is)) << specs[i].name;
    }
    // Taken anew of what is left.
    dynamism::take_reference(*layer, state);
    const at::Tensor now = model::dense_value(state.parameters[1], specs[1].shape);
    const at::Tensor is = dynamism::reference_of(*layer, state).parameters[1].value;
    EXPECT_TRUE(at::allclose(now, is, 0, now.abs().max().item<double>() / 253));
    EXPECT_TRUE(at::equal(now == 0, is == 0));
  }
}

// In fp64, by the definition.
std::vector<std::vector<double>> oracle(const at::Tensor& hidden) {
  const at::Tensor wide = hidden.to(at::kDouble).reshape({-1, hidden.size(-1)}).contiguous();
  const std::int64_t rows = wide.size(0);
  const std::int64_t size = wide.size(1);
  const std::int64_t n = std::min<std::int64_t>(rows, 64);
  std::vector<std::vector<double>> g(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    std::vector<double>& row = g[static_cast<std::size_t>(i)];
    double squared = 0;
    for (std::int64_t j = 0; j < n; ++j) {
      const double* a = wide.const_data_ptr<double>() + i * rows / n * size;
      const double* b = wide.const_data_ptr<double>() + j * rows / n * size;
      double product = 0;
      for (std::int64_t k = 0; k < size; ++k) product += a[k] * b[k];
      row.push_back(product);
      squared += product * product;
    }
    for (double& value : row) value /= squared > 0 ? std::sqrt(squared) : 1;
  }
  return g;
}

TEST(Plasticity, IsThatOfTheDefinitionInFp64) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Rng rng(mix_key({0x51A, seed}));
    const std::vector<std::int64_t> shape = {static_cast<std::int64_t>(1 + rng.below(4)),
                                             static_cast<std::int64_t>(1 + rng.below(90)),
                                             static_cast<std::int64_t>(1 + rng.below(40))};
    const at::Tensor x = drawn(rng, shape, std::exp(3 * rng.normal()));
    const at::Tensor y = x + drawn(rng, shape, x.std(/*unbiased=*/false).item<double>());
    const auto g = oracle(x);
    const auto h = oracle(y);
    double wanted = 0;
    for (std::size_t i = 0; i < g.size(); ++i) {
      for (std::size_t j = 0; j < g.size(); ++j) wanted += std::pow(g[i][j] - h[i][j], 2);
    }
    wanted /= static_cast<double>(g.size() * g.size());
    const at::Tensor gx = dynamism::similarities(x);
    ASSERT_EQ(gx.size(0), std::ssize(g)) << "seed " << seed;
    const double found = dynamism::similarity_loss(gx, dynamism::similarities(y));
    ASSERT_NEAR(found, wanted, 1e-5 * wanted + 1e-12) << "seed " << seed;
    ASSERT_EQ(dynamism::similarity_loss(gx, dynamism::similarities(x)), 0) << "seed " << seed;
  }
}

// The loss compares similarities: outputs that are only rotated and scaled have not moved.
TEST(Plasticity, IsBlindToATurnOfTheOutputs) {
  Rng rng(9);
  const at::Tensor x = drawn(rng, {2, 40, 8}, 1);
  const at::Tensor turned = 3 * x.flip({2}) * at::tensor({1, -1, 1, 1, -1, -1, 1, 1});
  EXPECT_LT(dynamism::similarity_loss(dynamism::similarities(x), dynamism::similarities(turned)),
            1e-12);
  const at::Tensor zeros = at::zeros({2, 40, 8});
  EXPECT_EQ(dynamism::similarity_loss(dynamism::similarities(zeros), dynamism::similarities(zeros)),
            0);
}

}  // namespace
}  // namespace dynmo::runtime::testing
