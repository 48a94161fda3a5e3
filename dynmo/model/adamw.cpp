// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/adamw.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "dynmo/core/check.h"
#include "dynmo/kernels/fused.h"
#include "dynmo/kernels/generic.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DYNMO_EACH_INSTRUCTION_SET __attribute__((target_clones("default", "fma", "avx512f")))
#else
#define DYNMO_EACH_INSTRUCTION_SET
#endif

namespace dynmo::model {
namespace {

constexpr std::int64_t kPart = 1 << 12;  // elements of a part, which stays in the cache

using kernels::device::AdamWFactors;

// Returns the factors of one step's update. They are the same for all elements of a layer, except
// for the decay.
AdamWFactors factors_of(std::int64_t step, const AdamWOptions& options, double scale) {
  const auto count = static_cast<double>(step);
  return {.gradient = static_cast<float>(scale),
          .first = static_cast<float>(1 - options.beta1),
          .second = static_cast<float>(1 - options.beta2),
          .second_kept = static_cast<float>(options.beta2),
          .rate = static_cast<float>(-options.learning_rate / (1 - std::pow(options.beta1, count))),
          .deviation = static_cast<float>(std::sqrt(1 - std::pow(options.beta2, count))),
          .epsilon = static_cast<float>(options.epsilon),
          .kept = 1};
}

struct Elements {
  float* value;
  float* gradient;
  float* first;
  float* second;
};

// Updates in one pass over memory. Gives the same bits as scaling, libtorch's fused AdamW (built
// for AVX-512) and zeroing, which are three passes. This file is compiled without contraction
// (CMakeLists.txt). So every instruction set fuses a product and a sum only where the code says so.
DYNMO_EACH_INSTRUCTION_SET void update_elements(const Elements& at, std::int64_t begin,
                                                std::int64_t end, const AdamWFactors& factors) {
  float* __restrict value = at.value;
  float* __restrict gradient = at.gradient;
  float* __restrict first = at.first;
  float* __restrict second = at.second;
  const AdamWFactors f = factors;
  for (std::int64_t i = begin; i < end; ++i) {
    const float g = gradient[i] * f.gradient;
    gradient[i] = 0;
    const float mean = __builtin_fmaf(f.first, g - first[i], first[i]);
    const float square = __builtin_fmaf(f.second * g, g, second[i] * f.second_kept);
    first[i] = mean;
    second[i] = square;
    const float deviation = __builtin_sqrtf(square) / f.deviation + f.epsilon;
    value[i] = value[i] * f.kept + f.rate * mean / deviation;
  }
}

// Updates by libtorch, in three passes. Used for fp64 (tests of whole models) and for devices
// without kernels of our own.
void update_by_libtorch(Parameter& parameter, std::int64_t step, const AdamWOptions& options,
                        double scale) {
  const at::NoGradGuard no_graph;
  parameter.gradient.mul_(scale);
  at::_fused_adamw_(
      {parameter.value}, {parameter.gradient}, {parameter.first_moment}, {parameter.second_moment},
      /*max_exp_avg_sqs=*/{},
      {at::full({}, static_cast<double>(step), parameter.value.options().dtype(at::kFloat))},
      options.learning_rate, options.beta1, options.beta2,
      parameter.weight_decay ? options.weight_decay : 0, options.epsilon,
      /*amsgrad=*/false, /*maximize=*/false);
  parameter.gradient.zero_();
  if (parameter.compute_copy.defined()) parameter.compute_copy.copy_(parameter.value);
}

// Rounds to the nearest bf16, ties to even, as libtorch does.
DYNMO_EACH_INSTRUCTION_SET void round_elements(const float* __restrict value,
                                               std::uint16_t* __restrict rounded,
                                               std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value[i]);
    const std::uint32_t nearest = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    rounded[i] = static_cast<std::uint16_t>(value[i] == value[i] ? nearest : 0x7FC0U);
  }
}

// Adds in eight running sums, so that vectors can be used and the order is fixed.
template <typename Scalar>
double sum_of_squares(std::span<const Scalar> values) {
  std::array<double, 8> sums{};
  std::size_t i = 0;
  for (; i + sums.size() <= values.size(); i += sums.size()) {
    for (std::size_t lane = 0; lane < sums.size(); ++lane) {
      const auto x = static_cast<double>(values[i + lane]);
      sums[lane] += x * x;
    }
  }
  double total = 0;
  for (; i < values.size(); ++i) {
    total += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  for (const double sum : sums) total += sum;
  return total;
}

template <typename Scalar>
double sum_of_squares(const at::Tensor& tensor) {
  return sum_of_squares(std::span<const Scalar>(tensor.const_data_ptr<Scalar>(),
                                                static_cast<std::size_t>(tensor.numel())));
}

}  // namespace

void update(LayerState& state, const AdamWOptions& options, double scale) {
  if (state.frozen) return;
  ++state.optimizer_steps;
  AdamWFactors factors = factors_of(state.optimizer_steps, options, scale);
  for (Parameter& parameter : state.parameters) {
    for (const at::Tensor* tensor : {&parameter.value, &parameter.gradient, &parameter.first_moment,
                                     &parameter.second_moment}) {
      DYNMO_CHECK(tensor->is_contiguous() && tensor->sizes() == parameter.value.sizes(),
                  "contiguous tensors of one shape for {}", parameter.name);
    }
    const double decay = parameter.weight_decay ? options.weight_decay : 0;
    factors.kept = static_cast<float>(1 - options.learning_rate * decay);
    const bool on_cpu = parameter.value.is_cpu();
    if (!on_cpu && kernels::fused::serves(parameter.value,
                                          {parameter.gradient, parameter.first_moment,
                                           parameter.second_moment, parameter.compute_copy})) {
      kernels::fused::update(parameter.value, parameter.gradient, parameter.first_moment,
                             parameter.second_moment, parameter.compute_copy, factors);
      continue;
    }
    if (parameter.value.scalar_type() == at::kDouble || !on_cpu) {
      update_by_libtorch(parameter, state.optimizer_steps, options, scale);
      continue;
    }
    const Elements elements{parameter.value.mutable_data_ptr<float>(),
                            parameter.gradient.mutable_data_ptr<float>(),
                            parameter.first_moment.mutable_data_ptr<float>(),
                            parameter.second_moment.mutable_data_ptr<float>()};
    std::uint16_t* rounded = nullptr;
    if (parameter.compute_copy.defined()) {
      rounded =
          reinterpret_cast<std::uint16_t*>(parameter.compute_copy.mutable_data_ptr<at::BFloat16>());
    }
    const std::int64_t count = parameter.value.numel();
    for (std::int64_t begin = 0; begin < count; begin += kPart) {
      const std::int64_t end = std::min(begin + kPart, count);
      update_elements(elements, begin, end, factors);
      if (rounded != nullptr) round_elements(elements.value, rounded, begin, end);
    }
  }
}

void zero_gradients(LayerState& state) {
  for (Parameter& parameter : state.parameters) {
    if (parameter.gradient.defined()) parameter.gradient.zero_();
  }
}

double squared_norm(const LayerState& state) {
  double total = 0;
  for (const Parameter& parameter : state.parameters) total += squared_norm(parameter);
  return total;
}

double squared_norm(const Parameter& parameter) {
  if (!parameter.gradient.defined()) return 0;
  DYNMO_CHECK(parameter.gradient.is_contiguous(), "a contiguous gradient of {}", parameter.name);
  if (!parameter.gradient.is_cpu()) return kernels::generic::sum_of_squares(parameter.gradient);
  return parameter.gradient.scalar_type() == at::kDouble
             ? sum_of_squares<double>(parameter.gradient)
             : sum_of_squares<float>(parameter.gradient);
}

double clip_factor(double total_norm, double max_norm) {
  if (max_norm == 0 || total_norm <= max_norm) return 1;
  return max_norm / total_norm;
}

}  // namespace dynmo::model
