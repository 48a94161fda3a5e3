// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "dynmo/tensor/counts_impl.h"
#include "dynmo/tensor/generate.h"

namespace dynmo::tensor {
namespace {

constexpr double kLeast = -0.95;  // least autocorrelation that is generated
constexpr double kEven = 1.001;   // largest max / mean at which all count as equal

}  // namespace

Expected<CostsRequest> costs_request_like(const Features& features) {
  const std::vector<std::string> names = {"step", "layer"};
  const auto along_steps = std::ranges::find_if(features.fibers, [](const GroupFeatures& group) {
    return group.free == std::vector<int>{0} && group.values;
  });
  if (features.names != names || !features.values || !features.along ||
      along_steps == features.fibers.end()) {
    return make_error(ErrorCode::kBadInput,
                      "these are no features of seconds by step and layer with their persistence "
                      "along the steps, as `dynmo trace stats` gives them of a load trace");
  }
  return CostsRequest{
      .steps = static_cast<std::int64_t>(features.sizes[0]),
      .layers = static_cast<std::int64_t>(features.sizes[1]),
      .step_s = features.values->sum / static_cast<double>(features.sizes[0]),
      .cv = features.values->all.cv,
      .lasting_cv = along_steps->values->all.cv,
      .autocorrelation = std::clamp(features.along->autocorrelation, kLeast, 0.999999)};
}

Expected<CountsRequest> counts_request_like(const Features& features) {
  const std::vector<std::string> names = {"step", "block", "expert"};
  const bool are_counts = features.names == names && features.values && features.along &&
                          features.along->mode == 0 && features.fibers.size() == 3 &&
                          features.fibers.front().values;
  if (!are_counts) {
    return make_error(ErrorCode::kBadInput,
                      "these are no features of counts by step, block and expert with their "
                      "persistence along the steps, as `dynmo trace stats RUN` gives them");
  }
  const double rows =
      static_cast<double>(features.sizes[0]) * static_cast<double>(features.sizes[1]);
  const double max_share = features.values->max * rows / features.values->sum;
  const bool is_even = max_share * static_cast<double>(features.sizes[2]) < kEven;
  return CountsRequest{
      .steps = static_cast<std::int64_t>(features.sizes[0]),
      .blocks = static_cast<std::int64_t>(features.sizes[1]),
      .experts = static_cast<std::int64_t>(features.sizes[2]),
      .tokens = count_of(std::round(features.values->sum / rows)),
      .cv = features.values->all.cv,
      .lasting_cv = features.fibers.front().values->all.cv,
      .drift_may_leave_more = true,  // so few sums are unlike by chance, too
      .autocorrelation = std::clamp(features.along->autocorrelation, kLeast, 0.999999),
      .max_share = is_even ? 1.0 : std::min(1.0, max_share),
      .uneven = features.uneven.value_or(Unevenness())};
}

}  // namespace dynmo::tensor
