// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/sparse_break_even.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/kernels/sparse_products.h"

namespace dynmo::kernels {
namespace {

// From 43 % on a compressed matrix takes less memory than a masked one, so none is compressed below
// even where its products are faster.
constexpr std::array kSparsities = {0.45, 0.6, 0.75, 0.9};
constexpr int kRounds = 4;  // the first of which warms up
constexpr std::int64_t kMaxSize = 1024;
constexpr std::int64_t kMaxTokens = 512;

double by_the_clock(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A matrix of which some weights are gone. What values are multiplied does not matter.
struct Compressed {
  Compressed(std::int64_t rows, std::int64_t columns, double sparsity) {
    Rng rng(mix_key({static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns)}));
    std::vector<std::int32_t> offsets;
    for (std::int32_t i = 0; i < rows * columns; ++i) {
      if (rng.uniform() >= sparsity) offsets.push_back(i);
    }
    pattern = kernels::sparse::make_pattern(rows, columns, offsets);
    values = at::full({pattern->kept()}, 0.01, at::kFloat);
    gradient = at::zeros({pattern->kept()}, at::kFloat);
  }
  std::shared_ptr<const kernels::sparse::Pattern> pattern;
  at::Tensor values;
  at::Tensor gradient;
};

// The best of the rounds, as what others do to the machine only adds; dense and compressed ones in
// turn, as the machine may change meanwhile.
std::vector<ProductTimes> times_of(std::int64_t rows, std::int64_t columns, std::int64_t tokens,
                                   const Stopwatch& seconds) {
  const at::Tensor weight = at::full({rows, columns}, 0.01, at::kFloat);
  const at::Tensor x = at::full({tokens, columns}, 0.01, at::kFloat);
  const at::Tensor dy = at::full({tokens, rows}, 0.01, at::kFloat);
  at::Tensor gradient = at::zeros({rows, columns}, at::kFloat);
  std::vector<Compressed> matrices;
  std::vector<ProductTimes> times;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  for (const double sparsity : kSparsities) {
    matrices.emplace_back(rows, columns, sparsity);
    times.push_back({.sparsity = sparsity, .dense_s = kNever, .compressed_s = kNever});
  }
  for (int round = 0; round < kRounds; ++round) {
    const double dense_s = seconds([&] {
      at::linear(x, weight);
      at::mm(dy, weight);
      gradient.addmm_(dy.t(), x);
    });
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      Compressed& m = matrices[i];
      const double compressed_s = seconds([&] {
        static_cast<void>(kernels::sparse::times(*m.pattern, m.values, x));
        static_cast<void>(kernels::sparse::times_transposed(*m.pattern, m.values, dy));
        kernels::sparse::add_product(*m.pattern, m.gradient, dy, x);
      });
      if (round == 0) continue;
      times[i].dense_s = std::min(times[i].dense_s, dense_s);
      times[i].compressed_s = std::min(times[i].compressed_s, compressed_s);
    }
  }
  return times;
}

}  // namespace

double break_even(std::span<const ProductTimes> times) {
  double found = 1;
  double slower = 0;  // by how much compressed products are, at the sparsity `found`
  for (std::size_t i = times.size(); i-- > 0;) {
    const ProductTimes& here = times[i];
    const double by = here.compressed_s - here.dense_s;
    if (by > 0) {
      if (i + 1 == times.size()) return 1;
      found = here.sparsity + (found - here.sparsity) * by / (by - slower);
      break;
    }
    found = here.sparsity;
    slower = by;
  }
  return std::round(100 * found) / 100;
}

double measure_break_even(std::span<const MatrixSize> matrices, std::int64_t tokens) {
  return measure_break_even(matrices, tokens, by_the_clock);
}

double measure_break_even(std::span<const MatrixSize> matrices, std::int64_t tokens,
                          const Stopwatch& seconds) {
  const at::NoGradGuard no_graph;
  DYNMO_CHECK(tokens > 0, "tokens to multiply, got {}", tokens);
  std::map<std::pair<std::int64_t, std::int64_t>, double> weights;  // by size as measured
  for (const MatrixSize& matrix : matrices) {
    const std::pair size(std::min(matrix.rows, kMaxSize), std::min(matrix.columns, kMaxSize));
    const double share = static_cast<double>(matrix.rows) * static_cast<double>(matrix.columns) /
                         static_cast<double>(size.first * size.second);
    weights[size] += share * matrix.matrices;
  }
  std::vector<ProductTimes> all;
  for (const double sparsity : kSparsities) all.push_back({.sparsity = sparsity});
  for (const auto& [size, weight] : weights) {
    const auto times = times_of(size.first, size.second, std::min(tokens, kMaxTokens), seconds);
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].dense_s += weight * times[i].dense_s;
      all[i].compressed_s += weight * times[i].compressed_s;
    }
  }
  return break_even(all);
}

}  // namespace dynmo::kernels
