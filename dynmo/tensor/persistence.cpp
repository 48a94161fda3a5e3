// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "dynmo/tensor/features_impl.h"

namespace dynmo::tensor {
namespace {

constexpr std::size_t kMaxCells = std::size_t{1} << 28;

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
  // Series that never change have a variance of rounding only.
  double scale = 0;
  for (const double value : tensor.values) scale += value * value;
  if (!(variance > 1e-24 * scale) || variance == 0) return result;
  for (std::size_t lag = 1; lag <= std::max<std::size_t>(steps / 2, 1) && lag < steps; ++lag) {
    double sum = 0;
    for (std::size_t begin = 0; begin < cells.size(); begin += steps) {
      for (std::size_t t = 0; t + lag < steps; ++t)
        sum += cells[begin + t] * cells[begin + t + lag];
    }
    const double pairs = static_cast<double>(steps - lag) / static_cast<double>(steps);
    const double correlation = sum / pairs / variance;
    if (lag == 1) result.autocorrelation = correlation;
    if (correlation <= 0.5) {
      result.half_life = static_cast<std::int64_t>(lag);
      break;
    }
  }
  return result;
}

}  // namespace dynmo::tensor
