// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dynmo/tensor/features_impl.h"

namespace dynmo::tensor {
namespace {

constexpr std::size_t kMaxRows = std::size_t{1} << 28;

// Returns the means of `most` equal parts, or the values themselves if there are fewer.
std::vector<double> in_parts(const std::vector<double>& values, std::size_t most) {
  const std::size_t parts = std::min(values.size(), most);
  std::vector<double> means;
  for (std::size_t p = 0; p < parts; ++p) {
    const std::size_t begin = p * values.size() / parts;
    const std::size_t end = (p + 1) * values.size() / parts;
    double sum = 0;
    for (std::size_t i = begin; i < end; ++i) sum += values[i];
    means.push_back(sum / static_cast<double>(end - begin));
  }
  return means;
}

}  // namespace

Expected<Unevenness> unevenness_of(const SparseTensor& tensor) {
  const auto steps = static_cast<std::size_t>(tensor.sizes[0]);
  const auto rows = static_cast<std::size_t>(tensor.sizes[1]);
  const auto places = static_cast<double>(tensor.sizes[2]);
  if (rows > kMaxRows / steps) {
    return make_error(ErrorCode::kBadInput,
                      "{} steps of {} rows, wanted at most 2^28 rows in all: choose another mode "
                      "for the steps, or none",
                      steps, rows);
  }
  struct Row {
    double sum = 0;
    double squares = 0;
  };
  std::vector<Row> all(steps * rows);
  for (std::size_t i = 0; i < tensor.entries(); ++i) {
    Row& row = all[tensor.indices[0][i] * rows + tensor.indices[1][i]];
    row.sum += tensor.values[i];
    row.squares += tensor.values[i] * tensor.values[i];
  }
  std::vector<double> of_steps(steps, 0.0);
  std::vector<double> of_rows(rows, 0.0);
  for (std::size_t t = 0; t < steps; ++t) {
    for (std::size_t r = 0; r < rows; ++r) {
      const Row& row = all[t * rows + r];
      const double mean = row.sum / places;
      const double variance = row.squares / places - mean * mean;
      const double cv = mean > 0 ? std::sqrt(std::max(variance, 0.0)) / mean : 0;
      of_steps[t] += cv / static_cast<double>(rows);
      of_rows[r] += cv / static_cast<double>(steps);
    }
  }
  return Unevenness{.steps = in_parts(of_steps, kMaxStepParts),
                    .rows = in_parts(of_rows, kMaxRowParts)};
}

}  // namespace dynmo::tensor
