// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/adamw_loops.h"

#include <algorithm>
#include <array>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DYNMO_EACH_INSTRUCTION_SET __attribute__((target_clones("default", "fma", "avx512f")))
#else
#define DYNMO_EACH_INSTRUCTION_SET
#endif

namespace dynmo::kernels {
namespace {

using device::AdamWFactors;

constexpr std::int64_t kPart = 1 << 12;  // elements of a part, which stays in the cache

// Gives the same bits as scaling, libtorch's fused AdamW (built for AVX-512) and zeroing, which are
// three passes. This file is compiled without contraction (CMakeLists.txt). So every instruction
// set fuses a product and a sum only where the code says so.
DYNMO_EACH_INSTRUCTION_SET void update_elements(const AdamWElements& at, std::int64_t begin,
                                                std::int64_t end, const AdamWFactors& factors) {
  float* __restrict value = at.value;
  float* __restrict gradient = at.gradient;
  float* __restrict first = at.first_moment;
  float* __restrict second = at.second_moment;
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
double sum_in_lanes(std::span<const Scalar> values) {
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

}  // namespace

void update(const AdamWElements& elements, std::int64_t count, const AdamWFactors& factors) {
  for (std::int64_t begin = 0; begin < count; begin += kPart) {
    const std::int64_t end = std::min(begin + kPart, count);
    update_elements(elements, begin, end, factors);
    if (elements.rounded != nullptr) round_elements(elements.value, elements.rounded, begin, end);
  }
}

double sum_of_squares(std::span<const float> values) { return sum_in_lanes(values); }
double sum_of_squares(std::span<const double> values) { return sum_in_lanes(values); }

}  // namespace dynmo::kernels
