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
constexpr double kSame = 1e-9;    // difference of coefficients of variation by rounding

// Returns the lasting coefficient of variation of features. It is `cv` if nothing changes from step
// to step. Their sums are in two orders and differ by rounding.
double lasting_of(double lasting_cv, double cv) {
  return std::abs(lasting_cv - cv) <= kSame ? cv : lasting_cv;
}

// Returns the share of its variance that a series of first order keeps in means of `steps` values.
double share_in_means(double autocorrelation, std::int64_t steps) {
  constexpr double kSmall = 1e-12;
  const auto n = static_cast<double>(steps);
  double sum = 1;
  double power = 1;
  for (std::int64_t lag = 1; lag < steps && std::abs(power) > kSmall; ++lag) {
    power *= autocorrelation;
    sum += 2 * (1 - static_cast<double>(lag) / n) * power;
  }
  return sum / n;
}

// Returns the lasting coefficient of variation over another number of steps. Drift leaves less of
// itself in sums over more steps. What is permanent stays.
double lasting_over(std::int64_t steps, const auto& request) {
  const double lasting_cv = *request.lasting_cv;
  if (steps == request.steps || lasting_cv >= request.cv) return lasting_cv;
  const double all = request.cv * request.cv;
  const double left = share_in_means(request.autocorrelation, request.steps);
  const double drift = std::min((all - lasting_cv * lasting_cv) / (1 - left), all);
  return std::sqrt(all - drift * (1 - share_in_means(request.autocorrelation, steps)));
}

}  // namespace

Expected<CostsRequest> costs_request_like(const Features& features) {
  const std::vector<std::string> names = {"step", "layer"};
  const auto along_steps = std::ranges::find_if(features.fibers, [](const GroupFeatures& group) {
    return group.free == std::vector<int>{0} && group.values;
  });
  const bool are_costs = features.names == names && features.values && features.along &&
                         features.along->mode == 0 && along_steps != features.fibers.end();
  if (!are_costs) {
    return make_error(ErrorCode::kBadInput,
                      "these are no features of seconds by step and layer with their persistence "
                      "along the steps, as `dynmo trace stats` gives them of a load trace");
  }
  const double cv = features.values->all.cv;
  return CostsRequest{
      .steps = static_cast<std::int64_t>(features.sizes[0]),
      .layers = static_cast<std::int64_t>(features.sizes[1]),
      .step_s = features.values->sum / static_cast<double>(features.sizes[0]),
      .cv = cv,
      .lasting_cv = lasting_of(along_steps->values->all.cv, cv),
      .drift_may_leave_more = true,  // so few sums are unlike by chance, too
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
  const double cv = features.values->all.cv;
  return CountsRequest{
      .steps = static_cast<std::int64_t>(features.sizes[0]),
      .blocks = static_cast<std::int64_t>(features.sizes[1]),
      .experts = static_cast<std::int64_t>(features.sizes[2]),
      .tokens = count_of(std::round(features.values->sum / rows)),
      .cv = cv,
      .lasting_cv = lasting_of(features.fibers.front().values->all.cv, cv),
      .drift_may_leave_more = true,  // so few sums are unlike by chance, too
      .autocorrelation = std::clamp(features.along->autocorrelation, kLeast, 0.999999),
      .max_share = is_even ? 1.0 : std::min(1.0, max_share),
      .uneven = features.uneven.value_or(Unevenness())};
}

CountsRequest resized(CountsRequest request, std::int64_t steps, std::int64_t blocks,
                      std::int64_t experts) {
  if (request.lasting_cv) request.lasting_cv = lasting_over(steps, request);
  if (request.max_share < 1) {
    const double fewer = static_cast<double>(request.experts) / static_cast<double>(experts);
    request.max_share = std::min(request.max_share * fewer, 1.0);
  }
  request.steps = steps;
  request.blocks = blocks;
  request.experts = experts;
  return request;
}

CostsRequest resized(CostsRequest request, std::int64_t steps, std::int64_t layers) {
  if (request.lasting_cv) request.lasting_cv = lasting_over(steps, request);
  request.steps = steps;
  request.layers = layers;
  return request;
}

}  // namespace dynmo::tensor
