// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/diffusion.h"

#include <algorithm>
#include <cmath>

#include "dynmo/core/check.h"
#include "dynmo/plan/balance_impl.h"
#include "dynmo/plan/chain_impl.h"

namespace dynmo::plan {
namespace internal {
namespace {

// Exchanges one pair at the boundary `cut` between [first, cut) and [cut, end). Returns the new
// boundary.
int exchange(const std::vector<std::int64_t>& prefix, int first, int cut, int end) {
  const auto sum = [&](int from, int to) {
    return prefix[static_cast<std::size_t>(to)] - prefix[static_cast<std::size_t>(from)];
  };
  const std::int64_t left = sum(first, cut);
  const std::int64_t right = sum(cut, end);
  const int moved = left > right ? cut - 1 : cut + 1;
  if (left == right || moved == first || moved == end) return cut;
  // The sum of the two does not change. So a smaller variance is the same as a smaller maximum, and
  // a tie of the maxima is a tie of both.
  return std::max(sum(first, moved), sum(moved, end)) < std::max(left, right) ? moved : cut;
}

}  // namespace

Diffusion diffuse(const std::vector<std::int64_t>& prefix, std::vector<int> counts) {
  std::vector<int> bounds = {0};
  for (const int count : counts) bounds.push_back(bounds.back() + count);
  DYNMO_CHECK(bounds.back() + 1 == static_cast<int>(prefix.size()), "counts of {} layers, got {}",
              prefix.size() - 1, bounds.back());
  Diffusion result;
  bool moved = true;
  while (moved) {
    moved = false;
    ++result.rounds;
    for (const std::size_t parity : {1U, 2U}) {
      for (std::size_t i = parity; i + 1 < bounds.size(); i += 2) {
        const int cut = exchange(prefix, bounds[i - 1], bounds[i], bounds[i + 1]);
        moved |= cut != bounds[i];
        bounds[i] = cut;
      }
    }
  }
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = bounds[i + 1] - bounds[i];
  result.counts = std::move(counts);
  return result;
}

}  // namespace internal

namespace {

// Returns the current plan's counts if it has the same layers, and stages on the same ranks. Else
// returns equal counts.
std::vector<int> starting_counts(const BalanceProblem& problem,
                                 const std::vector<Rank>& placement) {
  const Plan* current = problem.current;
  std::vector<int> counts;
  if (current != nullptr && current->layers() == problem.model.size() &&
      current->stages.size() == placement.size()) {
    for (std::size_t s = 0; s < placement.size(); ++s) {
      if (current->stages[s].rank == placement[s])
        counts.push_back(current->stages[s].layers.count);
    }
    if (counts.size() == placement.size()) return counts;
  }
  return internal::uniform_counts(problem.model.size(), static_cast<int>(placement.size()));
}

}  // namespace

Expected<Diffusion> diffuse(Balancer balancer, const BalanceProblem& problem) {
  DYNMO_CHECK(balancer == Balancer::kDiffusionParameters || balancer == Balancer::kDiffusionTime,
              "a diffusion balancer, got {}", name(balancer));
  DYNMO_TRY(internal::validate(balancer, problem));
  const auto weights = balancer == Balancer::kDiffusionTime
                           ? cost::layer_work_s(problem.model, problem.micro_batches)
                           : internal::parameter_weights(problem.model);
  return internal::diffuse(internal::quantized_prefix_sums(weights),
                           starting_counts(problem, placement(balancer, problem)));
}

double diffusion_bound(int ranks, int layers, double convergence) {
  DYNMO_CHECK(ranks >= 1 && layers >= 1 && convergence > 0,
              "ranks, layers and a convergence factor above 0, got {}, {} and {}", ranks, layers,
              convergence);
  const double n = ranks;
  const double s = layers;
  return std::min(n * n * std::log(s * n / convergence) * std::log(n),
                  s * n * std::log(n) / convergence);
}

}  // namespace dynmo::plan
