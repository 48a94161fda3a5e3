// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/early_exit/training/exit_layer.h"
#include "dynmo/kernels/host_memory.h"

namespace dynmo::dynamism {
namespace {

// Returns the lower ends of the bins: 0, then 2^-16 to 1/2 in factors of sqrt(2), and their mirror
// image.
std::array<double, kExitBins> make_edges() {
  std::array<double, kExitBins> edges{};
  constexpr int kHalf = kExitBins / 2;
  double edge = 0.5;
  for (int i = 0; i < kHalf; ++i) {
    edges[static_cast<std::size_t>(kHalf - i)] = edge;
    edges[static_cast<std::size_t>(kHalf + i)] = 1 - edge;
    edge *= std::sqrt(0.5);
  }
  edges[0] = 0;
  return edges;
}

const std::array<double, kExitBins>& edges() {
  static const std::array<double, kExitBins> kEdges = make_edges();
  return kEdges;
}

}  // namespace

int exit_bin(double confidence) {
  if (!(confidence > 0)) return 0;  // NaN, too
  const auto above = std::upper_bound(edges().begin() + 1, edges().end(), confidence);
  return static_cast<int>(above - edges().begin()) - 1;
}

// A confidence is in the last bin whose lower end it reaches. NaN is in the first bin.
at::Tensor exit_bin_counts(const at::Tensor& confidence_N) {
  const bool pinned = !confidence_N.is_cpu();
  const at::Tensor ends =
      at::empty({kExitBins - 1, 1}, at::dtype(at::kDouble).pinned_memory(pinned));
  std::copy(edges().begin() + 1, edges().end(), kernels::host_data<double>(ends));
  const at::Tensor each_N = confidence_N.to(at::kDouble);
  const at::Tensor reached = each_N.ge(ends.to(each_N.device(), /*non_blocking=*/true))
                                 .sum(1, /*keepdim=*/false, at::kDouble);
  const auto one = [&](double value) { return at::full({1}, value, each_N.options()); };
  return at::cat({one(static_cast<double>(each_N.numel())), reached}) - at::cat({reached, one(0)});
}

float threshold_for(const std::vector<double>& counts, double share) {
  DYNMO_CHECK(std::ssize(counts) == kExitBins, "{} counts, got {}", kExitBins, counts.size());
  double all = 0;
  for (const double count : counts) all += count;
  const double wanted = share * all;
  if (!(wanted > 0)) return kNeverLeaves;
  double above = 0;
  for (std::size_t bin = counts.size(); bin-- > 0;) {
    if (counts[bin] == 0 || above + counts[bin] < wanted) {
      above += counts[bin];
      continue;
    }
    const double low = edges()[bin];
    const double high = bin + 1 < counts.size() ? edges()[bin + 1] : 1;
    const double inside = (wanted - above) / counts[bin];
    return static_cast<float>(high - inside * (high - low));
  }
  return 0;
}

}  // namespace dynmo::dynamism
