// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dynmo/tensor/features_impl.h"

namespace dynmo::tensor {
namespace {

constexpr std::size_t kMaxCells = std::size_t{1} << 28;
constexpr double kRounding = 1e-9;  // far above that of a correlation by Fourier transforms

// The indices of an entry in all modes but one, packed into 128 bits. They identify its series.
// Modes take at most 127 bits together.
struct SeriesPlace {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  friend bool operator==(const SeriesPlace&, const SeriesPlace&) = default;
};
struct HashOfSeries {
  std::size_t operator()(const SeriesPlace& place) const {
    std::uint64_t hash = (place.high ^ (place.low + 0x9e3779b97f4a7c15U)) * 0xbf58476d1ce4e5b9U;
    hash = (hash ^ (hash >> 29) ^ place.low) * 0x94d049bb133111ebU;
    return hash ^ (hash >> 32);
  }
};

// Returns the series of the tensor along `mode` as rows, in the order in which they occur.
Expected<std::vector<double>> series_of(const SparseTensor& tensor, int mode) {
  const auto along = static_cast<std::size_t>(mode);
  const auto steps = static_cast<std::size_t>(tensor.sizes[along]);
  std::unordered_map<SeriesPlace, std::size_t, HashOfSeries> rows;
  std::vector<double> cells;
  for (std::size_t i = 0; i < tensor.entries(); ++i) {
    SeriesPlace place;
    for (std::size_t m = 0; m < tensor.indices.size(); ++m) {
      if (m == along) continue;
      const auto bits = static_cast<unsigned>(std::bit_width(tensor.sizes[m] - 1));
      if (bits == 0) continue;
      place.high = place.high << bits | place.low >> (64 - bits);
      place.low = place.low << bits | tensor.indices[m][i];
    }
    const std::size_t row = rows.try_emplace(place, rows.size()).first->second;
    if (rows.size() > kMaxCells / steps) {
      return make_error(ErrorCode::kBadInput,
                        "more than {} series of {} steps, wanted at most 2^28 values: choose "
                        "another mode for the steps, or none",
                        kMaxCells / steps, steps);
    }
    cells.resize(rows.size() * steps);
    cells[row * steps + tensor.indices[along][i]] += tensor.values.empty() ? 1 : tensor.values[i];
  }
  return cells;
}

// Replaces values by their discrete Fourier transform (Cooley and Tukey, 1965). Their number n is a
// power of two. Root k is exp(-2 pi i k / n), for k below n / 2.
void transform(std::vector<std::complex<double>>& values,
               const std::vector<std::complex<double>>& roots) {
  const std::size_t n = values.size();
  for (std::size_t i = 1, reversed = 0; i < n; ++i) {
    std::size_t bit = n / 2;
    for (; (reversed & bit) != 0; bit /= 2) reversed ^= bit;
    reversed ^= bit;
    if (i < reversed) std::swap(values[i], values[reversed]);
  }
  for (std::size_t half = 1; half < n; half *= 2) {
    for (std::size_t begin = 0; begin < n; begin += 2 * half) {
      for (std::size_t k = 0; k < half; ++k) {
        std::complex<double>& even = values[begin + k];
        std::complex<double>& odd = values[begin + k + half];
        const std::complex<double> turned = odd * roots[k * (n / 2 / half)];
        odd = even - turned;
        even += turned;
      }
    }
  }
}

// Returns the sum over all series of the products of values that are `lag` steps apart.
double lagged_sum(const std::vector<double>& cells, std::size_t steps, std::size_t lag) {
  double sum = 0;
  for (std::size_t begin = 0; begin < cells.size(); begin += steps) {
    for (std::size_t t = 0; t + lag < steps; ++t) sum += cells[begin + t] * cells[begin + t + lag];
  }
  return sum;
}

// Returns lagged_sum() of all lags up to `most`, except for rounding. A long recording has too many
// lags for a pass over it each. Takes at most 72 bytes a step.
//
// The sums are the transform of the power spectrum (Wiener and Khinchin). Zeros behind a series
// keep its end from its beginning. Two series go through one transform, as real and imaginary part.
std::vector<double> lagged_sums(const std::vector<double>& cells, std::size_t steps,
                                std::size_t most) {
  const std::size_t n = std::bit_ceil(steps + most);
  std::vector<std::complex<double>> roots(n / 2);
  for (std::size_t k = 0; k < roots.size(); ++k) {
    roots[k] =
        std::polar(1.0, -2 * std::numbers::pi * static_cast<double>(k) / static_cast<double>(n));
  }
  std::vector<std::complex<double>> values;
  std::vector<double> power(n, 0.0);
  for (std::size_t begin = 0; begin < cells.size(); begin += 2 * steps) {
    values.assign(n, 0.0);
    for (std::size_t t = 0; t < steps; ++t) {
      const std::size_t second = begin + steps + t;
      values[t] = {cells[begin + t], second < cells.size() ? cells[second] : 0.0};
    }
    transform(values, roots);
    for (std::size_t k = 0; k < n; ++k) power[k] += std::norm(values[k]);
  }
  values.assign(power.begin(), power.end());
  transform(values, roots);
  std::vector<double> sums(most + 1);
  for (std::size_t lag = 0; lag <= most; ++lag) {
    sums[lag] = values[lag].real() / static_cast<double>(n);
  }
  return sums;
}

}  // namespace

Expected<Persistence> persistence_of(const SparseTensor& tensor, int mode) {
  Persistence result{.mode = mode};
  const auto steps = static_cast<std::size_t>(tensor.sizes[static_cast<std::size_t>(mode)]);
  DYNMO_ASSIGN(std::vector<double> cells, series_of(tensor, mode));
  double variance = 0;  // the sum over all series
  for (std::size_t begin = 0; begin < cells.size(); begin += steps) {
    double mean = 0;
    for (std::size_t t = 0; t < steps; ++t) mean += cells[begin + t];
    mean /= static_cast<double>(steps);
    for (std::size_t t = 0; t < steps; ++t) {
      cells[begin + t] -= mean;
      variance += cells[begin + t] * cells[begin + t];
    }
  }
  // Series that never change have a variance of rounding only: the mean rounds in each step.
  double scale = 0;
  for (const double value : tensor.values) scale += value * value;
  const double rounding = std::max(1e-12, static_cast<double>(steps) * 0x1p-53);
  if (!(variance > rounding * rounding * scale) || variance == 0) return result;
  const auto correlation = [&](double sum, std::size_t lag) {
    const double pairs = static_cast<double>(steps - lag) / static_cast<double>(steps);
    return sum / pairs / variance;
  };
  result.autocorrelation = correlation(lagged_sum(cells, steps, 1), 1);
  if (result.autocorrelation <= 0.5) {
    result.half_life = 1;
    return result;
  }
  const std::vector<double> sums = lagged_sums(cells, steps, steps / 2);
  for (std::size_t lag = 2; lag < sums.size(); ++lag) {
    if (correlation(sums[lag], lag) > 0.5 + kRounding) continue;
    if (correlation(lagged_sum(cells, steps, lag), lag) > 0.5) continue;
    result.half_life = static_cast<std::int64_t>(lag);
    return result;
  }
  return result;
}

}  // namespace dynmo::tensor
