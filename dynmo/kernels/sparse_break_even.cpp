// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/sparse_break_even.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <time.h>

#include <algorithm>
#include <array>
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

enum class Spread { kEvenly, kInBlocks };

struct Case {
  double sparsity;
  Spread spread = Spread::kEvenly;
};
// Sparsities that are measured. Below 43 % a compressed matrix takes more memory than a masked one,
// so none is compressed there, even if its products are faster. The case in blocks separates the
// cost of segments from the fixed cost.
constexpr std::size_t kEvenCases = 5;
constexpr std::array<Case, kEvenCases + 1> kCases = {
    {{0.45}, {0.6}, {0.75}, {0.9}, {0.95}, {0.9, Spread::kInBlocks}}};
constexpr std::int32_t kEdge = 32;  // of the blocks
constexpr std::int32_t kOneOf = 8;  // one of this number of blocks has weights
constexpr std::int64_t kMaxSize = 1024;
constexpr std::int64_t kMaxTokens = 512;

// Returns the number of rounds. The first one warms up. Small matrices need more, because each
// round is short.
int rounds_of(std::int64_t rows, std::int64_t columns, std::int64_t tokens) {
  constexpr std::int64_t kWork = kMaxSize * kMaxSize * kMaxTokens;
  const std::int64_t work = std::max<std::int64_t>(rows * columns * tokens, 1);
  return 1 + static_cast<int>(std::clamp<std::int64_t>(kWork / work, 3, 24));
}

// A matrix without some of its weights. Its values do not matter.
struct Compressed {
  Compressed(std::int64_t rows, std::int64_t columns, const Case& wanted) {
    Rng rng(mix_key({static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns)}));
    const bool in_blocks = wanted.spread == Spread::kInBlocks;
    const double sparsity = in_blocks ? 1 - kOneOf * (1 - wanted.sparsity) : wanted.sparsity;
    std::vector<std::int32_t> offsets;
    for (std::int32_t i = 0; i < rows; ++i) {
      for (std::int32_t j = 0; j < columns; ++j) {
        if (in_blocks && (3 * (i / kEdge) + j / kEdge) % kOneOf != 0) continue;
        if (rng.uniform() < sparsity) continue;
        offsets.push_back(i * static_cast<std::int32_t>(columns) + j);
      }
    }
    pattern = kernels::sparse::make_pattern(rows, columns, offsets);
    values = at::full({pattern->kept()}, 0.01, at::kFloat);
    gradient = at::zeros({pattern->kept()}, at::kFloat);
  }
  std::shared_ptr<const kernels::sparse::Pattern> pattern;
  at::Tensor values;
  at::Tensor gradient;
};

// Returns the minimum over the rounds, because other processes only add time. Dense and compressed
// products alternate, because the machine may become slower or faster.
std::vector<ProductTimes> times_of(std::int64_t rows, std::int64_t columns, std::int64_t tokens,
                                   const Stopwatch& seconds) {
  const at::Tensor weight = at::full({rows, columns}, 0.01, at::kFloat);
  const at::Tensor x = at::full({tokens, columns}, 0.01, at::kFloat);
  const at::Tensor dy = at::full({tokens, rows}, 0.01, at::kFloat);
  at::Tensor gradient = at::zeros({rows, columns}, at::kFloat);
  std::vector<Compressed> matrices;
  std::vector<ProductTimes> times;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  for (const Case& wanted : kCases) {
    const Compressed& m = matrices.emplace_back(rows, columns, wanted);
    times.push_back(
        {.sparsity = wanted.sparsity,
         .left = cost::occupancy(m.pattern->kept(), m.pattern->segments(), rows, columns),
         .dense_s = kNever,
         .compressed_s = kNever});
  }
  const int rounds = rounds_of(rows, columns, tokens);
  for (int round = 0; round < rounds; ++round) {
    const double dense_s = seconds([&] {
      at::linear(x, weight);
      at::mm(dy, weight);
      gradient.addmm_(dy.t(), x);
    });
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      Compressed& m = matrices[i];
      at::mm(dy, weight);  // so that no product finds data of the previous one in the caches
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

double by_the_clock(const std::function<void()>& work) {
  const clockid_t clock = at::get_num_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  const auto now = [&] {
    timespec time{};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  work();
  return now() - start;
}

double break_even(std::span<const ProductTimes> times) {
  double found = 1;
  double slower = 0;  // compressed - dense time at the sparsity `found`
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

std::vector<ProductTimes> measure_products(std::span<const MatrixSize> matrices,
                                           std::int64_t tokens, const Stopwatch& seconds) {
  const at::NoGradGuard no_graph;
  DYNMO_CHECK(tokens > 0, "tokens to multiply, got {}", tokens);
  std::map<std::pair<std::int64_t, std::int64_t>, double> weights;  // by measured size
  for (const MatrixSize& matrix : matrices) {
    const std::pair size(std::min(matrix.rows, kMaxSize), std::min(matrix.columns, kMaxSize));
    const double share = static_cast<double>(matrix.rows) * static_cast<double>(matrix.columns) /
                         static_cast<double>(size.first * size.second);
    weights[size] += share * matrix.matrices;
  }
  std::vector<ProductTimes> all;
  for (const Case& wanted : kCases) {
    all.push_back({.sparsity = wanted.sparsity, .left = {.weights = 0, .segments = 0}});
  }
  for (const auto& [size, weight] : weights) {
    const auto times = times_of(size.first, size.second, std::min(tokens, kMaxTokens), seconds);
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].dense_s += weight * times[i].dense_s;
      all[i].compressed_s += weight * times[i].compressed_s;
      all[i].left.weights += weight * times[i].dense_s * times[i].left.weights;
      all[i].left.segments += weight * times[i].dense_s * times[i].left.segments;
    }
  }
  // Shares are averages weighted by dense time.
  for (ProductTimes& times : all) {
    times.left.weights /= times.dense_s;
    times.left.segments /= times.dense_s;
  }
  return all;
}

double measure_break_even(std::span<const MatrixSize> matrices, std::int64_t tokens,
                          const Stopwatch& seconds) {
  const std::vector<ProductTimes> all = measure_products(matrices, tokens, seconds);
  return break_even(std::span(all).first(kEvenCases));
}

cost::ProductFit product_fit(std::span<const ProductTimes> times) {
  std::vector<cost::ProductPoint> points;
  for (const ProductTimes& each : times) {
    points.push_back({.left = each.left, .time = each.compressed_s / each.dense_s});
  }
  return cost::fit_products(points);
}

}  // namespace dynmo::kernels
